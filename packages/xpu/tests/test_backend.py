"""What is particular to XPU: devices, failed captures, streams, freeing; on the emulated torch.xpu."""

import os
import threading
from importlib.metadata import EntryPoint

import pytest
import torch
import torch.distributed as dist
import xpu_emulation
from emulated_forward import EmulatedForward
from xpu_emulation import Stream, XPUGraph

import graphreplay
from graphreplay import registry
from graphreplay.testing import zoo
from graphreplay_xpu import XPUGraphedForward
from graphreplay_xpu import captured as captured_module
from graphreplay_xpu.capture import capture
from graphreplay_xpu.pools import PoolState

X = zoo.rows(3)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Graphs that were kept from destruction in this test."""
    graphs = []
    monkeypatch.setattr(captured_module, "kept_graphs", graphs)
    monkeypatch.setattr("graphreplay_xpu.capture.kept_graphs", graphs)
    return graphs


def wrap(forward=lambda *, x: x * 2 + 1, **options):
    return EmulatedForward(forward, device="cpu", **options)


def assert_graphed(graphed, expected=lambda x: x * 2 + 1):
    for seed in range(3):
        assert torch.equal(graphed(x=zoo.rows(3, seed)), expected(zoo.rows(3, seed)))
    assert (graphed.captures, graphed.stats()["replays"]) == (1, 2)


# -------------------------------------------------------------------------------------------- devices


def test_other_devices_run_plainly():
    graphed = XPUGraphedForward(lambda *, x: x + 1, device="cpu")
    assert graphed(x=torch.ones(2)).tolist() == [2.0, 2.0]
    assert graphed.disabled_reason == "XPU graphs run on an XPU device, not on cpu"


@pytest.mark.skipif(torch.xpu.is_available(), reason="this machine has an XPU")
def test_without_a_device_the_error_says_why(monkeypatch):
    with pytest.raises(graphreplay.BackendUnavailableError, match=r"^xpu is not here: (this PyTorch|no usable)"):
        XPUGraphedForward(lambda *, x: x, device="xpu")
    monkeypatch.setattr(torch.version, "xpu", "20260101")
    with pytest.raises(
        graphreplay.BackendUnavailableError, match=r"^xpu:1 is not here: no usable Intel GPU or driver$"
    ):
        XPUGraphedForward(lambda *, x: x, device="xpu:1")


def test_a_torch_without_xpu_graphs_is_named(machine, monkeypatch):
    monkeypatch.delattr(torch.xpu, "XPUGraph")
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(graphreplay.BackendUnavailableError, match=r"PyTorch 2\.10\.1 has no torch\.xpu\.XPUGraph"):
        XPUGraphedForward(lambda *, x: x, device="xpu")


def test_the_index_is_filled_in(machine):
    assert XPUGraphedForward.resolve_device(torch.device("xpu")) == torch.device("xpu", 0)
    with xpu_emulation.stream(Stream(1)):
        assert XPUGraphedForward.resolve_device(torch.device("xpu")) == torch.device("xpu", 1)
    with pytest.raises(graphreplay.BackendUnavailableError, match="xpu:2 is not here: this machine has 2 XPU devices"):
        XPUGraphedForward.resolve_device(torch.device("xpu", 2))


def test_the_registry_takes_this_backend(machine, monkeypatch):
    entry = EntryPoint("xpu", "graphreplay_xpu:XPUGraphedForward", registry.GROUP)
    monkeypatch.setattr(registry, "_installed", lambda: {"xpu": entry})
    assert graphreplay.get_graphed_forward_cls("xpu:1") is XPUGraphedForward


def test_another_device_has_streams_of_its_own(machine):
    state = XPUGraphedForward(lambda *, x: x, device="xpu:1")._pool_state
    assert (state.device, state.capture_stream.key, state.last_stream.key) == (torch.device("xpu", 1), (1, 1), (1, 0))


# ------------------------------------------------------------------------------------ failed captures


def fault_inside(act):
    def forward(*, x):
        y = x * 2 + 1 + torch.rand_like(x) * 0
        if xpu_emulation.is_current_stream_capturing():
            act(y)
        return y

    return forward


def leave_another_stream(y):
    xpu_emulation.set_stream(Stream())
    raise ValueError("planned")


INSIDE = {
    "raise": (lambda y: (_ for _ in ()).throw(ValueError("planned")), "planned"),
    "read": (lambda y: y.sum().item(), "makes the host wait"),
    "wait": (lambda y: xpu_emulation.current_stream().record_event().synchronize(), "wait method cannot be used"),
    "stream": (leave_another_stream, "planned"),
    "memory": (lambda y: torch.ones(1 << 16), "OutOfMemoryError: XPU out of memory"),
    "capture": (lambda y: XPUGraph().capture_begin(), "already in the recording state"),
}


def assert_left_as_before(graphed, machine, kept):
    assert (graphed.captures, graphed.num_graphs) == (0, 0)
    assert xpu_emulation.current_stream().key == (0, 0)
    assert not machine.generator_captures
    assert not machine.routed
    assert machine.graphs <= set(kept)
    assert_graphed(wrap(pool=graphed.pool))
    assert_graphed(wrap())


@pytest.mark.parametrize("fault", INSIDE)
def test_a_fault_inside_a_capture_leaves_the_device_as_it_was(fault, machine, kept):
    act, reason = INSIDE[fault]
    machine.limit = 1 << 16
    graphed = wrap(fault_inside(act))
    torch.manual_seed(3)
    torch.rand_like(X)
    after_one_call = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(graphed(x=X), X * 2 + 1)
    assert reason in graphed.disabled_reason
    assert torch.equal(torch.get_rng_state(), after_one_call)
    assert kept == []
    assert_left_as_before(graphed, machine, kept)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("begin", "torch could not begin it: begin_recording failed"),
        ("end", "torch could not end it: end_recording failed"),
        ("finalize", "torch could not end it: finalize failed"),
        ("lose", "the graph is empty, though the forward runs aten.mul.Tensor: its work went past the capture"),
    ],
)
def test_a_capture_that_torch_fails_leaves_the_device_as_it_was(fault, reason, machine, kept):
    machine.faults = {fault}
    graphed = wrap()
    assert torch.equal(graphed(x=X), X * 2 + 1)
    assert graphed.disabled_reason == f"capture failed: {reason}"
    assert machine.faults == set()
    state = graphed.pool.backend
    assert len(kept) == (fault != "lose")
    assert state.capture_stream.key == ((0, 1) if fault == "lose" else (0, 2)), "a stream that may be recorded is left"
    assert_left_as_before(graphed, machine, kept)


def test_a_fault_and_a_capture_that_cannot_end(machine, kept):
    machine.faults = {"end"}
    graphed = wrap(fault_inside(INSIDE["raise"][0]))
    assert torch.equal(graphed(x=X), X * 2 + 1)
    assert "planned" in graphed.disabled_reason
    assert len(kept) == 1
    assert_left_as_before(graphed, machine, kept)


def test_an_empty_graph_of_a_forward_that_computes_nothing_is_kept(machine):
    graphed = wrap(lambda *, x: (x.t(), x[1:]))
    for seed in range(3):
        x = zoo.rows(3, seed)
        assert all(map(torch.equal, graphed(x=x), (x.t(), x[1:])))
    assert (graphed.captures, graphed.stats()["replays"]) == (1, 2)


def test_collectives_run_eagerly_and_say_why(machine, tmp_path):
    def forward(*, x):
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        graphed = wrap(forward, group=dist.group.WORLD)
        for _ in range(3):
            assert torch.equal(graphed(x=X), X * 2 + 1)
    finally:
        dist.destroy_process_group()
    assert graphed.captures == 0
    assert "the forward runs collectives: XPU graphs hold none" in graphed.disabled_reason
    assert graphed.stats()["eager_reasons"] == {graphed.disabled_reason: 2}


# --------------------------------------------------------------------------------- streams and turns


def on_streams(graphed, count=4):
    for seed in range(count):
        with xpu_emulation.stream(Stream()):
            assert torch.equal(graphed(x=zoo.rows(3, seed)), zoo.rows(3, seed) * 2 + 1)


def test_replays_on_many_streams_are_ordered(machine):
    graphed = wrap()
    on_streams(graphed)
    other = wrap(pool=graphed.pool)
    on_streams(other)
    assert (graphed.stats()["replays"], other.stats()["replays"]) == (3, 3)


def test_without_its_turn_a_replay_would_race(machine):
    class Hasty(EmulatedForward):
        def _take_turn(self):
            pass

    graphed = Hasty(lambda *, x: x * 2 + 1, device="cpu")
    on_streams(graphed)
    assert "a replay on (0, 4) that does not wait for the last one of its pool, on (0, 3)" in graphed.disabled_reason


def test_warm_ups_run_on_the_captures_stream_between_what_comes_before_and_after(machine):
    streams = []

    def forward(*, x):
        stream = xpu_emulation.current_stream()
        streams.append((stream.key, stream.queue.recording is not None))
        return x + stream.work() * 0

    caller = Stream()
    graphed = wrap(forward)
    before = caller.work()
    with xpu_emulation.stream(caller):
        graphed(x=X)
    own, side = caller.key, graphed.pool.backend.capture_stream
    assert streams == [(own, False), (side.key, False), (side.key, False), (side.key, True)]
    assert side.queue.seen[own] > before
    assert caller.queue.seen[side.key] >= 2, "the caller goes on after both warm-ups"


def test_warm_ups_and_captures_of_pools_on_one_stream_take_turns(machine, monkeypatch):
    monkeypatch.setattr(xpu_emulation, "STREAMS", 1)
    inside, most, results, failures = [], [], {}, []
    pause, start = threading.Event(), threading.Barrier(4)

    def body(number):
        inside.append(number)
        pause.wait(0.005)
        most.append(len(inside))
        inside.remove(number)
        return X * number

    def run(number):
        try:
            state = PoolState(torch.device("xpu", 0))
            assert state.capture_stream.key == (0, 1)
            start.wait()
            with torch.no_grad():
                with state.side():
                    body(number)
                graph, y = capture(lambda: body(number), state)
                y.zero_()
                graph.staging([])([])
                results[number] = y
                graph.reset()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert most == [1] * 8
    assert all(torch.equal(results[number], X * number) for number in range(1, 5))


@pytest.mark.parametrize("where", ["on the current stream", "on the pool's last stream"])
def test_a_foreign_capture_is_not_disturbed(where, machine):
    graphed = wrap()
    foreign, own = XPUGraph(), Stream()
    with xpu_emulation.stream(own):
        graphed(x=X)
        graphed(x=X)
        foreign.capture_begin()
    with xpu_emulation.stream(own if "current" in where else Stream()):
        result = graphed(x=X)
    with xpu_emulation.stream(own):
        foreign.capture_end()
    foreign.reset()
    assert torch.equal(result, X * 2 + 1)
    assert graphed.stats()["eager_reasons"] == {"called inside another capture": 1}
    assert (graphed.captures, graphed.stats()["replays"]) == (1, 1)


# -------------------------------------------------------------------------------------------- freeing


@pytest.mark.parametrize("end", ["close", "reset", "disable", "evict", "drop"])
def test_graphs_are_freed_after_their_replays(end, machine):
    graphed = wrap()
    on_streams(graphed)
    assert (len(machine.graphs), machine.synced) == (1, 0), "calls wait for nothing"
    if end == "drop":
        del graphed
    elif end == "evict":
        assert graphed.evict(x=X)
    else:
        graphed.disable("the end") if end == "disable" else getattr(graphed, end)()
    assert (len(machine.graphs), machine.synced) == (0, 1)


def test_without_waiting_a_graph_would_be_freed_under_its_replay(machine, monkeypatch, caplog):
    graphed = wrap()
    on_streams(graphed)
    with monkeypatch.context() as patch:
        patch.setattr(xpu_emulation.Event, "synchronize", lambda event: None)
        graphed.close()
    assert "a graph could not be freed: Race: a graph freed while it may run on" in caplog.text
    (graph,) = machine.graphs
    machine.host = dict.fromkeys(machine.queues, 1 << 30)
    graph.reset()


def test_graphs_that_never_ran_wait_for_nothing(machine):
    graphed = wrap()
    graphed(x=X)
    graphed.close()
    assert (len(machine.graphs), machine.synced) == (0, 0)


def test_a_graph_freed_while_its_stream_is_captured_waits_for_its_replay(machine):
    graphed, foreign, own = wrap(), XPUGraph(), Stream()
    with xpu_emulation.stream(own):
        graphed(x=X)
        graphed(x=X)
        foreign.capture_begin()
        y = X * 2
        graphed.close()
        foreign.capture_end()
    foreign.reset()
    assert torch.equal(y, X * 2)
    assert (len(machine.graphs), machine.synced) == (0, 1)


def test_a_pool_serves_again_after_its_last_graph_is_gone(machine):
    graphed = wrap()
    for round_ in range(1, 4):
        graphed(x=X)
        assert torch.equal(graphed(x=X), X * 2 + 1)
        assert graphed.captures == round_
        assert graphed.evict(x=X) if round_ == 2 else graphed.reset() is None
    assert len(machine.gone) == 3


def test_graphs_of_a_pool_share_its_memory(machine):
    graphed = wrap()
    graphed(x=X)
    graphed(x=zoo.rows(5))
    assert [len(graphs) for graphs in machine.pools.values()] == [2]
    assert graphed.stats()["bytes"] == 2 * 4 * 8 * (3 + 5) + 4 * 8 * (3 + 5)  # two operators' results, and the input


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_keeps_its_graphs(machine, kept):
    graphed = wrap()
    on_streams(graphed)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            del graphed
            code = 0 if len(kept) == 1 and machine.synced == 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kept == []


# ------------------------------------------------------------------------------------- the emulation


def test_the_emulated_graph_refuses_what_a_real_one_does(machine):
    graph, other = XPUGraph(), XPUGraph()
    with pytest.raises(RuntimeError, match="without a capture"):
        graph.capture_end()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with xpu_emulation.stream(Stream()):
        graph.capture_begin(pool=xpu_emulation.graph_pool_handle())
        with pytest.raises(RuntimeError, match="already in the recording state"):
            other.capture_begin()
        with xpu_emulation.stream(Stream()), pytest.raises(RuntimeError, match="same stream"):
            graph.capture_end()
        y = X * 2
        graph.capture_end()
    with pytest.raises(RuntimeError, match="already owns"):
        graph.capture_begin()
    y.zero_()
    graph.replay()
    assert torch.equal(y, X * 2)
    xpu_emulation.current_stream().record_event().synchronize()
    graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with pytest.raises(RuntimeError, match="dropped with its last graph"):
        graph.capture_begin(pool=graph._pool)
    with pytest.raises(AssertionError, match="device-wide wait"):
        torch.xpu.synchronize()
    machine.routed.clear()
    machine.generator_captures = False
