"""Outputs handed out by the last kernel of a graph, to addresses that each launch brings."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from graphreplay.storage import CopyPlan
from graphreplay.testing.contract_twin import assert_same
from graphreplay_cuda import CUDAGraph, CUDAGraphedForward, copynode, driver, graph, kernels, while_loop
from graphreplay_cuda.copynode import HandOut, Table

gpu = pytest.mark.cuda


# --------------------------------------------------------------------------------------------- anywhere


def test_which_outputs_the_kernel_hands_out():
    """Those alone in their storage and without gaps, wherever they begin in it; the others are copied afterwards."""
    base, z = torch.zeros(64), torch.zeros(4, dtype=torch.complex64)
    for outputs, dense in (
        ([torch.zeros(4), torch.zeros(2, 3).t(), torch.zeros(())], [0, 1, 2]),
        ([base[3:8], torch.zeros(2)], [0, 1]),
        ([base[3:8], base[:2]], []),
        ([base[3:8], base], []),
        ([base, base, torch.zeros(2)], [0, 2]),  # one object twice is copied once
        ([base[::2], torch.zeros(1).expand(4), torch.zeros(0), z.conj(), z.clone().conj().imag], [2]),
    ):
        plan = CopyPlan(outputs)
        assert plan.dense == dense
        assert plan.pick_dense(outputs) == [outputs[p] for p in dense]
        copies = plan.clone(outputs)
        assert_same([copy.resolve_conj() for copy in copies], [output.resolve_conj() for output in outputs])


@pytest.mark.parametrize("inputs", [0, 1, 4, 5, 128])
@pytest.mark.parametrize("outputs", [1, 4, 5, 64])
def test_the_tables_of_the_kernels(monkeypatch, inputs, outputs):
    params = {}
    monkeypatch.setattr(kernels, "stage", lambda index, capacity, outputs: ("stage", capacity, outputs))
    monkeypatch.setattr(kernels, "hand_out", lambda index, capacity: ("hand_out", capacity))
    monkeypatch.setattr(driver, "kernel_params", lambda kernel, argument, grid, block: params.update({kernel: grid}))
    noted = torch.zeros(64, dtype=torch.int64)
    made = [torch.zeros(n + 1) for n in range(outputs)]
    hand_out = HandOut(0, made, noted)
    table = Table(0, [torch.zeros(2) for _ in range(inputs)], hand_out)
    room = next(n for n in kernels.CAPACITIES if n >= inputs)
    places = next(n for n in kernels.OUTPUT_CAPACITIES if n >= outputs)
    assert params == {("hand_out", places): (1, outputs), ("stage", room, places): (1, max(1, inputs))}
    spare = [0] * (places - outputs)
    assert hand_out._words[:] == [
        *(tensor.data_ptr() for tensor in made),
        *spare,
        *(tensor.nbytes for tensor in made),
        *spare,
        noted.data_ptr(),
    ]
    words = table._words
    assert 8 * len(words) <= 4096, "what kernel parameters may have"
    assert words[room : 2 * room] == [8] * inputs + [0] * (room - inputs)
    assert words[2 * room :] == [0] * (room + places) + [noted.data_ptr()]


# ------------------------------------------------------------------------------------ graphed forwards


def graphed_of(forward, **options):
    return CUDAGraphedForward(forward, device="cuda", **options)


def graph_of(graphed):
    """The CUDAGraph of its one entry."""
    (key,) = graphed._cache
    return graphed._cache.get(key).graph._graph


def handed_out(graphed):
    """How many outputs the graph hands out by itself."""
    hand_out = graph_of(graphed)._hand_out
    return 0 if hand_out is None else hand_out.count


@gpu
def test_a_captured_forward_is_instantiated_once(monkeypatch):
    instantiate, times = torch.cuda.CUDAGraph.instantiate, []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "instantiate", lambda self: times.append(self) or instantiate(self))
    graphed, x = graphed_of(lambda *, x: x + 1), torch.ones(3, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(graphed(x=x), x + 1)
    assert graphed.stats()["replays"] == 2
    assert len(times) == 1


@gpu
@pytest.mark.parametrize("count", [0, 1, 4, 5, 16, 17, 64, 65, 70, 130])
def test_every_output_reaches_its_memory(count):
    graphed = graphed_of(lambda *, x: [x + i for i in range(count)])
    held = []
    with torch.no_grad():
        for turn in range(4):
            held.append(graphed(x=torch.full((3, 5), 1000.0 * turn, device="cuda")))
    for turn, outputs in enumerate(held):
        assert len(outputs) == count
        for i, output in enumerate(outputs):
            assert torch.equal(output, torch.full((3, 5), 1000.0 * turn + i, device="cuda")), f"call {turn}, output {i}"
    addresses = [output.data_ptr() for outputs in held for output in outputs]
    assert len(set(addresses)) == len(addresses)
    assert graphed.stats()["replays"] == 3
    assert handed_out(graphed) == min(count, kernels.OUTPUT_CAPACITIES[-1])


LARGE = 16 * kernels.THREADS * copynode._MAX_BLOCKS
"""Bytes that the blocks of a row copy in one round."""


@gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 15, 16, 17, 255, 4097, LARGE // 8 - 1, LARGE + 3])
def test_every_size_and_alignment(dtype, numel):
    offsets = (0, 1, 2, 3, 5, 8)

    def forward(*, x):
        return [(x.to(dtype) + i)[offset : offset + numel] for i, offset in enumerate(offsets)]

    graphed = graphed_of(forward)
    with torch.no_grad():
        for turn in range(3):
            x = torch.randint(1, 100, (numel + 16,), device="cuda")
            held, expected = graphed(x=x), forward(x=x)
            graphed(x=x + 1)
            for output, wanted in zip(held, expected, strict=True):
                assert torch.equal(output, wanted)
                if turn:
                    assert output.storage_offset() == 0
    assert graphed.stats()["replays"] == 5
    assert handed_out(graphed) == len(offsets)


class Odd(nn.Module):
    """Returns what a copy of bytes cannot, or not alone, hand out, among what it can."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))

    def forward(self, x):
        y, z = x * 2, torch.complex(x, x + 1)
        image = (x + 5).reshape(1, 3, 2, 5).to(memory_format=torch.channels_last)
        return {
            "z": [x, x.new_empty(0, 3), (y, y[1:], y.t())],
            "strided": (x * 3)[:, ::2],
            "expanded": (x * 4)[:1].expand(4, -1),
            "conjugated": z.conj(),
            "negated": (z * 2).conj().imag,
            "weight": (self.weight, x + self.weight),
            "twice": [image, image],
            "turned": (x * 5).t(),
            "scalar": x.sum(),
            "bools": x > 0,
            "value": 3,
        }


def flat(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for value in values for tensor in flat(value)]


@gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_odd_outputs_are_as_eager_and_stay_as_they_are(mode):
    module = Odd().cuda()
    graphed = graphed_of(module)
    with mode():
        inputs = [torch.randn(6, 5, device="cuda") for _ in range(4)]
        held = [graphed(x=x) for x in inputs]
        for turn in range(200):
            graphed(x=inputs[turn % 4] * turn)
        for x, outputs in zip(inputs, held, strict=True):
            assert_same(outputs, module(x))
        storages = [{tensor.untyped_storage()._cdata for tensor in flat(outputs)} for outputs in held[1:]]
        assert all(one.isdisjoint(other) for one in storages for other in storages if one is not other)
        for outputs in held[1:]:
            assert outputs["twice"][0] is outputs["twice"][1]
            outputs["z"][2][0].zero_()
            assert outputs["z"][2][1].count_nonzero().item() == 0, "a view of the same output"
    assert graphed.stats()["replays"] == 203
    assert 5 < handed_out(graphed) < len(flat(held[0]))


@gpu
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("sizes", [(7,), (1, 5, 100_000), (3,) * 20, (LARGE,)])
def test_back_to_back_without_waiting(hold, sizes):
    """Memory of outputs that are dropped goes to the calls behind them, while earlier launches are under way."""

    def forward(*, x):
        return tuple(x.expand(size) * (i + 1) - 1 for i, size in enumerate(sizes))

    graphed, wrong = graphed_of(forward), torch.zeros((), device="cuda")
    held = []
    with torch.no_grad():
        for turn in range(203):
            x = torch.full((1,), float(turn), device="cuda")
            outputs = graphed(x=x)
            for i, output in enumerate(outputs):
                wrong += (output != turn * (i + 1) - 1.0).any()
            if hold or turn in (1, 2):
                held.append((turn, outputs))
    assert wrong.item() == 0
    for turn, outputs in held:
        for i, output in enumerate(outputs):
            assert output.unique().tolist() == [turn * (i + 1) - 1.0], f"output {i} of call {turn}"
    assert graphed.stats()["replays"] == 202


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@gpu
def test_nothing_that_fills_uninitialized_memory_gets_into_the_graph(deterministic):
    def forward(*, x):
        y = x * 2
        return [y + i for i in range(70)] + [y, y[1:], x]

    graphed = graphed_of(forward)
    nodes = []
    with torch.no_grad():
        for on in (True, False):
            torch.use_deterministic_algorithms(on)
            graphed.reset()
            held = []
            for turn in range(20):
                x = torch.full((3,), float(turn), device="cuda")
                held.append(graphed(x=x))
                assert_same(held[-1], forward(x=x))
            for turn, outputs in enumerate(held):
                assert_same(outputs, forward(x=torch.full((3,), float(turn), device="cuda")))
            nodes.append(driver.node_count(graph_of(graphed)._graph.raw_cuda_graph()))
    assert nodes[0] == nodes[1]
    assert graphed.stats()["replays"] == 38


@gpu
def test_outputs_that_are_the_inputs():
    graphed = graphed_of(lambda *, x, y: (y, x, x[:], y))
    held, given = [], []
    with torch.no_grad():
        for turn in range(6):
            x, y = (torch.full((1000,), value, device="cuda") for value in (float(turn), -1.0 - turn))
            held.append(graphed(x=x, y=y))
            given.append((x, y))
    for turn, ((y, x, view, again), (given_x, given_y)) in enumerate(zip(held, given, strict=True)):
        assert (x.unique().tolist(), y.unique().tolist()) == ([float(turn)], [-1.0 - turn])
        assert again is y
        assert x.data_ptr() == view.data_ptr()
        if turn:
            assert not {x.data_ptr(), y.data_ptr()} & {given_x.data_ptr(), given_y.data_ptr()}


@gpu
def test_threads_on_streams_of_their_own():
    def forward(*, x):
        y = x
        for _ in range(10):
            y = y * 1.5 - y * 0.5
        return y, x + 1, x[:, :3]

    graphed = graphed_of(forward)
    wrong, failures = [torch.zeros((), device="cuda") for _ in range(3)], []
    with torch.no_grad():
        graphed(x=torch.ones(64, 256, device="cuda"))
    torch.cuda.synchronize()

    def work(number):
        try:
            held = []
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                for turn in range(100):
                    value = 1000.0 * number + turn
                    x = torch.full((64, 256), value, device="cuda")
                    outputs = graphed(x=x)
                    if turn % 10 == 0:
                        held.append((value, outputs))
                    for output, wanted in zip(outputs, (value, value + 1, value), strict=True):
                        wrong[number] += ((output - wanted).abs() > 1e-2 * (1 + value)).any()
                for value, (y, more, part) in held:
                    wrong[number] += (more != value + 1).any() + (part != value).any()
                    wrong[number] += ((y - value).abs() > 1e-2 * (1 + value)).any()
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert failures == []
    assert [count.item() for count in wrong] == [0.0] * 3
    assert graphed.stats()["replays"] == 300


@gpu
def test_a_graph_with_a_loop():
    def forward(*, x, n):
        y, count = while_loop(lambda y, i: i < n, lambda y, i: (y * 2, i + 1), (x, torch.zeros_like(n)))
        return y, count, y + 1

    graphed = graphed_of(forward)
    trips, held = (0, 3, 11, 1, 0, 5), []
    with torch.no_grad():
        for turn, n in enumerate(trips):
            held.append(graphed(x=torch.full((8,), turn + 1.0, device="cuda"), n=torch.tensor(n, device="cuda")))
    for turn, (n, (y, count, more)) in enumerate(zip(trips, held, strict=True)):
        value = (turn + 1.0) * 2.0**n
        assert (y.tolist(), count.item(), more.tolist()) == ([value] * 8, n, [value + 1] * 8)
    assert graphed.stats()["replays"] == len(trips) - 1
    assert handed_out(graphed) > 0


@gpu
def test_lent_outputs_are_copied_by_nobody():
    graphed = graphed_of(lambda *, x: (x + 1, x * 2), clone_outputs=False)
    with torch.no_grad():
        for turn in range(3):
            outputs = graphed(x=torch.full((4,), float(turn), device="cuda"))
            assert [output.tolist() for output in outputs] == [[turn + 1.0] * 4, [turn * 2.0] * 4]
    assert handed_out(graphed) == 0


@gpu
def test_a_weight_among_the_outputs_that_shrinks_takes_no_memory_with_it():
    """The graph copies as many bytes as at its capture, before the host looks at the module."""

    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1 << 20))

        def forward(self, x):
            return x + 1, self.weight

    module = Returning().cuda()
    graphed, x = graphed_of(module), torch.zeros(4, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            graphed(x=x)
        module.half()
        guards = [torch.zeros(1 << 20, device="cuda", dtype=torch.half) for _ in range(32)]
        del guards[::2]  # so that memory for the next outputs comes to lie between two of these
        for _ in range(3):
            assert_same(graphed(x=x), module(x))
    assert [guard.count_nonzero().item() for guard in guards] == [0] * 16
    assert graphed.stats()["captures"] == 2


@gpu
def test_a_wrapper_that_ends_leaves_no_memory_behind():
    def run():
        graphed = graphed_of(lambda *, x: [x + i for i in range(20)])
        x = torch.ones(1 << 20, device="cuda")
        with torch.no_grad():
            for _ in range(3):
                outputs = graphed(x=x)
        graphed.close()
        assert [output[-1].item() for output in outputs] == [1.0 + i for i in range(20)]
        del outputs, x, graphed
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    after = [run() for _ in range(3)]
    assert after[2] <= after[0] + (1 << 20)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_graph_on_another_device_than_the_current_one():
    graphed = CUDAGraphedForward(lambda *, x: [x + i for i in range(70)], device="cuda:1")
    with torch.no_grad():
        for turn in range(4):
            outputs = graphed(x=torch.full((8,), float(turn), device="cuda:1"))
            assert [output.unique().tolist() for output in outputs] == [[turn + float(i)] for i in range(70)]
            assert torch.cuda.current_device() == 0
    assert graphed.stats()["replays"] == 3


# ------------------------------------------------------------------------------------- the graph below


def handing_out(static, forward):
    """A graph that hands out what the forward makes of the static input, as CapturedForward has it."""
    made = CUDAGraph()
    with graph(made):
        storage = torch.UntypedStorage(8 * kernels.OUTPUT_CAPACITIES[-1], device=static.device)
        noted = torch.empty(0, dtype=torch.int64, device=static.device).set_(storage)
        outputs = forward(static)
    made.hand_out(outputs, noted)
    return made, outputs, noted


def run(staging, given, targets):
    nowhere = torch.empty(0, device=given.device)
    staging.run([given], [nowhere if t is None else t for t in targets])


def untouched():
    return torch.full((8,), -1.0, device="cuda")


@gpu
def test_a_launch_without_targets_writes_to_nobodys_tensors():
    static = torch.zeros(8, device="cuda")
    made, (y, z), _ = handing_out(static, lambda x: (x * 2, x + 1))
    staging, one, other = made.staging([static]), untouched(), untouched()

    def given(value):
        return torch.full((8,), value, device="cuda")

    for turn in range(3):
        run(staging, given(1.0 + turn), (one, other))
        assert (one.unique().tolist(), other.unique().tolist()) == ([2.0 + 2 * turn], [2.0 + turn])
        one.fill_(-1.0)
        other.fill_(-1.0)
        static.fill_(7.0)
        made.replay()
        assert (y.unique().tolist(), z.unique().tolist()) == ([14.0], [8.0])
        made.stage_and_launch([static], [given(5.0)])
        assert (y.unique().tolist(), z.unique().tolist()) == ([10.0], [6.0])
        staging.launch([given(6.0)])
        assert (y.unique().tolist(), z.unique().tolist()) == ([12.0], [7.0])
        assert (one.unique().tolist(), other.unique().tolist()) == ([-1.0], [-1.0])
        run(staging, given(3.0), (None, other))
        assert (one.unique().tolist(), other.unique().tolist()) == ([-1.0], [4.0])
        other.fill_(-1.0)
        run(staging, given(3.0), (one, None))
        assert (one.unique().tolist(), other.unique().tolist()) == ([6.0], [-1.0])
        one.fill_(-1.0)


@gpu
@pytest.mark.parametrize("offset", range(17))
def test_targets_at_any_address(offset):
    static = torch.zeros(1000, device="cuda", dtype=torch.uint8)
    made, (y,), _ = handing_out(static, lambda x: (x + 1,))
    staging, wide = made.staging([static]), torch.zeros(1100, device="cuda", dtype=torch.uint8)
    given = torch.randint(1, 200, (1000,), device="cuda", dtype=torch.uint8)
    run(staging, given, (wide[offset:],))
    assert torch.equal(wide[offset : offset + 1000], given + 1)
    assert wide[:offset].count_nonzero().item() == 0, "bytes before the target"
    assert wide[offset + 1000 :].count_nonzero().item() == 0, "bytes behind the target"
    assert torch.equal(y, given + 1)


@gpu
def test_a_branch_at_the_end_of_the_graph_runs_before_outputs_are_handed_out():
    static, made = torch.zeros(8, device="cuda"), CUDAGraph()
    with graph(made):
        storage = torch.UntypedStorage(8 * kernels.OUTPUT_CAPACITIES[-1], device="cuda")
        noted = torch.empty(0, dtype=torch.int64, device="cuda").set_(storage)
        y = static.clone()
        with made.if_node(static.sum() > 0) as branch:
            for _ in range(50):
                y.add_(1)
        with branch.orelse():
            y.sub_(100)
    made.hand_out([y], noted)
    staging = made.staging([static])
    results = []
    for turn in range(100):
        value = float(turn + 1) * (-1) ** turn
        target = untouched()
        run(staging, torch.full((8,), value, device="cuda"), (target,))
        results.append((target, value + 50 if value > 0 else value - 100))
    for target, wanted in results:
        assert target.unique().tolist() == [wanted]


@gpu
def test_an_empty_graph_hands_out_its_inputs():
    static = torch.zeros(8, device="cuda")
    made, _, _ = handing_out(static, lambda x: (x,))
    staging = made.staging([static])
    for value in (1.0, 2.0):
        target = untouched()
        run(staging, torch.full((8,), value, device="cuda"), (target,))
        assert target.unique().tolist() == [value]


@gpu
def test_where_outputs_go_is_noted_as_long_as_the_graph_may_run():
    static = torch.zeros(8, device="cuda")
    made, outputs, noted = handing_out(static, lambda x: (x * 2,))
    staging, alive = made.staging([static]), weakref.ref(noted)
    del noted, outputs
    gc.collect()
    assert alive() is not None
    pool, others = made.pool_id, []
    for turn in range(5):  # other graphs of the pool, which would take its memory if they could
        other = CUDAGraph()
        with graph(other, pool=pool):
            scratch = torch.full((64,), -1, device="cuda", dtype=torch.int64)
        others.append((other, scratch))
        other.replay()
        target = untouched()
        run(staging, torch.full((8,), float(turn), device="cuda"), (target,))
        assert target.unique().tolist() == [2.0 * turn]
    made.reset()
    del staging
    gc.collect()
    assert alive() is None
