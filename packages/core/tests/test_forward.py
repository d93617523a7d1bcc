"""The road of a call, where the contract leaves it to the library: reasons, logs, hooks in order, the base class."""

import logging
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import graphreplay
from graphreplay import GraphedForward, ReferenceGraphedForward
from graphreplay.state import MAX_REFUSED
from graphreplay.testing import zoo
from graphreplay.testing.contract_twin import assert_same


def plus_one(*, x, **_):
    return x + 1


class Traced(ReferenceGraphedForward):
    """Notes the order of its hooks."""

    def __init__(self, module, **options):
        self.events = []
        super().__init__(lambda **kwargs: self.note("run") or module(**kwargs), device="cpu", **options)

    def note(self, event):
        self.events.append(event)

    @contextmanager
    def around(self, name, inner):
        self.note(f"<{name}")
        with inner:
            yield
        self.note(f"{name}>")

    def _warmup_stream(self):
        return self.around("stream", super()._warmup_stream())

    def _sync_probe(self):
        return self.around("probe", super()._sync_probe())

    def _range(self, phase):
        return self.around(phase, super()._range(phase))

    def _take_turn(self):
        self.note("turn")

    def _capture_graph(self, forward):
        self.note("<graph")
        result = super()._capture_graph(forward)
        self.note("graph>")
        return result


def test_hooks_run_in_order():
    graphed = Traced(plus_one, warmup_iters=3, nvtx=True)
    graphed(x=zoo.rows(2))
    eager, warmups = ["turn", "run", "<capture"], ["<stream", "<probe", "run", "probe>", "run", "run", "stream>"]
    assert graphed.events == [*eager, *warmups, "<graph", "run", "graph>", "capture>"]
    graphed.events.clear()
    graphed(x=zoo.rows(2))
    assert graphed.events == ["turn", "<replay", "replay>"]
    graphed.events.clear()
    graphed(x=zoo.rows(2))
    assert graphed._plans  # by which this call was recognized; it is marked once all the same
    assert graphed.events == ["turn", "<replay", "replay>"]


def test_ranges_only_on_request():
    graphed = Traced(plus_one)
    for _ in range(3):
        graphed(x=zoo.rows(2))
    assert graphed.stats()["replays"] == 2
    assert not {"<capture", "<replay"} & set(graphed.events)


def test_base_class_runs_plainly():
    graphed = GraphedForward(plus_one, device="cpu")
    assert not graphed.enabled
    assert_same(graphed(x=zoo.rows(2)), zoo.rows(2) + 1)
    assert "get_graphed_forward_cls" in (graphed.disabled_reason or "")
    assert graphed.stats()["eager_calls"] == 1


def test_miss_reasons_name_what_is_new():
    graphed = ReferenceGraphedForward(plus_one, device="cpu", max_entries=1)
    for options, kwargs in [
        ({}, {"x": zoo.rows(2), "n": 1}),
        ({}, {"x": zoo.rows(3), "n": 1}),
        ({}, {"x": zoo.rows(3), "n": 2}),
        ({"variant": "other"}, {"x": zoo.rows(3), "n": 2}),
    ]:
        graphed(**options, **kwargs)
    first, shape, value, variant = graphed.stats()["miss_reasons"]
    assert first == "first capture"
    assert shape == 'kwargs["x"]: shape (2, 8) became (3, 8)'
    assert value == 'kwargs["n"]: int 1 became int 2'
    assert "variant" in variant


def test_each_eager_reason_is_logged_once(caplog):
    graphed = ReferenceGraphedForward(plus_one, device="cpu", name="encoder")
    for _ in range(3):
        graphed(x=zoo.rows(2), extra=object())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "graphreplay"
    assert "encoder" in record.getMessage()
    assert 'kwargs["extra"]' in record.getMessage()
    assert list(graphed.stats()["eager_reasons"].values()) == [3]


def test_output_that_cannot_be_handed_out_refuses_that_call_only():
    graphed = ReferenceGraphedForward(lambda *, x, flag: (x + 1, object()) if flag else x + 1, device="cpu")
    for _ in range(3):
        assert_same(graphed(x=zoo.rows(2), flag=True)[0], zoo.rows(2) + 1)
        assert_same(graphed(x=zoo.rows(2), flag=False), zoo.rows(2) + 1)
    stats = graphed.stats()
    assert (stats["captures"], stats["replays"], stats["eager_calls"]) == (1, 2, 2)
    (reason,) = stats["eager_reasons"]
    assert reason.startswith("output[1]: ")
    assert graphed.enabled


def test_refused_calls_are_remembered_within_a_bound():
    graphed = ReferenceGraphedForward(lambda *, x, n: (x, object()), device="cpu", warmup_iters=1)
    x = torch.ones(1)
    for n in range(MAX_REFUSED + 5):
        graphed(x=x, n=n)
    assert graphed.stats()["misses"] == MAX_REFUSED + 5
    graphed(x=x, n=MAX_REFUSED)  # still known
    assert graphed.stats()["misses"] == MAX_REFUSED + 5
    graphed(x=x, n=0)  # forgotten, so tried anew
    assert graphed.stats()["misses"] == MAX_REFUSED + 6


def test_reset_tries_refused_calls_anew():
    opaque = [True]
    graphed = ReferenceGraphedForward(lambda *, x: (x + 1, object() if opaque[0] else None), device="cpu")
    graphed(x=zoo.rows(2))
    opaque[0] = False
    graphed(x=zoo.rows(2))
    assert graphed.captures == 0
    graphed.reset()
    graphed(x=zoo.rows(2))
    assert graphed.captures == 1


def test_reasons_are_bounded():
    graphed = ReferenceGraphedForward(plus_one, device="cpu", enabled=False)
    for n in range(300):
        graphed._stats.eager(f"reason {n}")
    reasons = graphed.stats()["eager_reasons"]
    assert len(reasons) == 257
    assert reasons["other reasons"] == 44
    assert graphed.stats()["eager_calls"] == 300


def test_values_without_a_text_are_no_reason_to_raise():
    graphed = ReferenceGraphedForward(plus_one, device="cpu")
    for n in (10**5000, 10**5001, 10**5000, "n" * 10_000):
        assert_same(graphed(x=zoo.rows(2), n=n), zoo.rows(2) + 1)
    stats = graphed.stats()
    assert (stats["captures"], stats["replays"], stats["eager_calls"]) == (3, 1, 0)
    assert max(map(len, stats["miss_reasons"])) < 500


def test_a_kwarg_that_torch_cannot_copy_refuses_that_call_only():
    graphed = ReferenceGraphedForward(plus_one, device="cpu")
    odd = torch.zeros(2, dtype=torch.uint8).view(torch.uint4)
    for seed in range(2):
        assert_same(graphed(x=zoo.rows(2, seed), q=odd), zoo.rows(2, seed) + 1)
        assert_same(graphed(x=zoo.rows(2, seed), q=None), zoo.rows(2, seed) + 1)
    stats = graphed.stats()
    assert (stats["captures"], stats["replays"], stats["eager_calls"]) == (1, 1, 1)
    assert graphed.prepare(x=zoo.rows(2), q=odd) is False
    assert graphed.enabled


def test_sparse_intermediates_run_eagerly():
    graphed = ReferenceGraphedForward(lambda *, x: torch.sparse.mm(x.to_sparse(), x), device="cpu")
    x = zoo.rows(zoo.WIDTH)
    with torch.no_grad():
        assert graphed.prepare(x=x) is False
        for seed in range(2):
            x = zoo.rows(zoo.WIDTH, seed)
            assert_same(graphed(x=x), torch.sparse.mm(x.to_sparse(), x))
    assert f"{__file__}:" in graphed.disabled_reason
    assert (graphed.captures, graphed.stats()["eager_calls"]) == (0, 2)
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.fixture
def group_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_collectives_without_a_group(ranks, group_of_one, monkeypatch):
    def forward(*, x):
        y = x * 2
        dist.all_reduce(y)
        return y

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)
    graphed = ReferenceGraphedForward(forward, device="cpu")
    for seed in range(3):
        assert_same(graphed(x=zoo.rows(2, seed)), zoo.rows(2, seed) * 2)
    assert graphed.captures == 0 if ranks > 1 else graphed.enabled
    assert ("runs collectives" in (graphed.disabled_reason or "")) is (ranks > 1)


def test_conjugate_views_over_shared_storage():
    graphed = ReferenceGraphedForward(lambda *, a, b: a * b, device="cpu")
    for seed in range(4):
        z = torch.complex(zoo.rows(2, seed), zoo.rows(2, seed + 1))
        for a, b in ((z, z), (z, z.conj()), (z.conj(), z), (z.conj(), z.conj())):
            assert torch.equal(graphed(a=a, b=b), a * b)
    assert graphed.enabled
    assert graphed.stats()["replays"] >= 3


def test_graphed_forward_is_a_public_name():
    for name in graphreplay.__all__:
        assert getattr(graphreplay, name) is not None


@pytest.mark.parametrize("end", ["close", "disable"])
def test_a_forward_that_ends_its_wrapper_while_captured_leaves_no_graph(end):
    runs = []

    def forward(*, x):
        runs.append(1)
        if len(runs) == 3:  # the capture, after the call's own run and a warm-up
            graphed.close() if end == "close" else graphed.disable("enough")
        return x * 2

    graphed = ReferenceGraphedForward(forward, device="cpu")
    assert_same(graphed(x=zoo.rows(2)), zoo.rows(2) * 2)
    assert (len(runs), graphed.num_graphs) == (3, 0)


def test_huge_integer_keys_are_names_like_others():
    graphed = ReferenceGraphedForward(lambda *, x, d: x * d[10**5000], device="cpu")
    for d in ({10**5000: 1, 10**5001: 2}, {10**5000: 1, 10**5001: 2}, {10**5000: 3, 10**5001: 2}):
        assert_same(graphed(x=zoo.rows(2), d=d), zoo.rows(2) * d[10**5000])
    assert (graphed.captures, graphed.stats()["replays"]) == (2, 1)


def test_miss_reasons_name_what_is_new_beside_the_kwargs():
    graphed = ReferenceGraphedForward(lambda *, x, y: x + y, device="cpu")
    x, y = zoo.rows(2), zoo.rows(2, 1)
    with torch.no_grad():
        graphed(x=x, y=y)
        with torch.autocast("cpu"):
            graphed(x=x, y=y)
    with torch.inference_mode():
        graphed(x=x, y=y)
        graphed(variant="lora", x=x, y=y)
        graphed(variant="lora", x=x, y=x)
        graphed.evict(variant="lora", x=x, y=x)
        graphed(variant="lora", x=x, y=x)
        torch.use_deterministic_algorithms(True)
        try:
            graphed(variant="lora", x=x, y=x)
        finally:
            torch.use_deterministic_algorithms(False)
    assert graphed.stats()["miss_reasons"] == {
        "first capture": 1,
        "autocast is another": 1,
        "inference mode is another": 1,
        "another variant": 1,
        "other kwargs share storage": 1,
        "its graph was evicted or dropped": 1,
        "process switch deterministic_algorithms is True": 1,
    }


def test_prepare_says_false_where_a_capture_would_be_refused_and_undoes_the_rehearsal():
    class Average(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            self.mean.data = self.mean.data * 0.5 + x[0]
            return self.mean + x

    def seeds(*, x):
        torch.manual_seed(0)
        return x + torch.rand(8)

    module, plain, x = Average(), Average(), zoo.rows(2)
    with torch.no_grad():
        for forward in (module, seeds, lambda *, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))):
            graphed = ReferenceGraphedForward(forward, device="cpu")
            assert graphed.prepare(x=x) is False
            assert graphed.disabled_reason is not None
        assert_same(module(x=x), plain(x=x))


def test_prepare_may_be_the_first_to_meet_a_higher_order_operator():
    """In a process of its own: torch.cond loads the compiler at its first use."""
    program = """
import sys, torch
from graphreplay import ReferenceGraphedForward
assert "torch._dynamo" not in sys.modules
graphed = ReferenceGraphedForward(lambda *, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), device="cpu")
with torch.no_grad():
    print(graphed.prepare(x=torch.ones(2)), "higher-order operator cond" in graphed.disabled_reason)
    print(torch.equal(graphed(x=torch.ones(2)), torch.ones(2).sin()))
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "True", "True"], done.stderr


def test_prepare_inside_another_capture_does_nothing():
    inner = ReferenceGraphedForward(plus_one, device="cpu")
    prepared = []

    def forward(*, x):
        prepared.append(inner.prepare(x=x))
        return inner(x=x)

    outer = ReferenceGraphedForward(forward, device="cpu")
    for seed in range(2):
        assert_same(outer(x=zoo.rows(2, seed)), zoo.rows(2, seed) + 1)
    # The call's own run is no capture; its warm-up and its capture are.
    assert prepared == [True, False, False]
    assert (outer.captures, outer.stats()["replays"], inner.captures) == (1, 1, 1)


@pytest.mark.parametrize("warmup_iters", [1, 3])
def test_how_many_forwards_a_capture_takes(warmup_iters):
    """The first warm-up runs no compiled code, so that one forward more runs as the capture will: the call's own, or
    one of ``prepare``."""
    runs = []

    def forward(*, x):
        runs.append(torch._C._len_torch_dispatch_stack())
        return x * 2

    graphed = ReferenceGraphedForward(forward, device="cpu", warmup_iters=warmup_iters)
    graphed(x=zoo.rows(2))
    # One mode observes; one records, which is how the reference backend captures.
    assert runs == [0, 1, *[0] * (warmup_iters - 1), 1]
    runs.clear()
    assert graphed.prepare(x=zoo.rows(3))
    assert runs == [1, 1, *[0] * warmup_iters, 1]


MOVES = {
    "smaller": lambda weight: setattr(weight, "data", torch.full((2,), 7.0)),
    "another dtype": lambda weight: setattr(weight, "data", weight.data.half()),
    "other strides": lambda weight: setattr(weight, "data", weight.data.view(4, 2)),
    "resized": lambda weight: weight.set_(torch.full((3,), 7.0)),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("move", MOVES)
def test_memory_for_outputs_is_what_the_graph_writes_though_a_weight_among_them_moves(move, check):
    """A device graph copies as many bytes as at its capture, whatever has become of the weight since."""
    sizes = []

    class Noted(ReferenceGraphedForward):
        def _capture_graph(self, forward):
            graph, outputs = super()._capture_graph(forward)
            staging = graph.staging

            def noted(inputs, static_outputs):
                launch, wanted = staging(inputs, static_outputs), [look(tensor) for tensor in static_outputs]

                def noting(inputs, outputs):
                    sizes.append([look(tensor) for tensor in outputs] == wanted)
                    launch(inputs, outputs)

                return noting

            graph = SimpleNamespace(nbytes=graph.nbytes, reset=graph.reset, staging=noted)
            return graph, outputs

    def look(tensor):
        return tensor.shape, tensor.stride(), tensor.dtype

    class Returning(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(8.0))

        def forward(self, x):
            return x + 1, self.weight

    module = Returning()
    before = module.weight.detach().clone()
    graphed = Noted(module, device="cpu", check_module=check)
    with torch.no_grad():
        for _ in range(3):
            graphed(x=torch.ones(2))
        MOVES[move](module.weight)
        outputs = graphed(x=torch.ones(2))
    assert_same(outputs, (torch.full((2,), 2.0), module.weight if check else before))
    assert sizes == [True] * 3
    assert graphed.enabled
