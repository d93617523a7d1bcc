"""The road of a call, where the contract leaves it to the library: reasons, logs, hooks in order, the base class."""

import logging
from contextlib import contextmanager

import torch

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


def test_ranges_only_on_request():
    graphed = Traced(plus_one)
    graphed(x=zoo.rows(2))
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
