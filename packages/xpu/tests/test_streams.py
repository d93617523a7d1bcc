"""Streams, turns, and the freeing of graphs, on the emulated torch.xpu."""

import gc
import threading

import pytest
import torch
import xpu_emulation
from emulated_forward import EmulatedForward
from xpu_calls import X, on_streams, wrap
from xpu_emulation import Stream, XPUGraph

from graphreplay.testing import zoo
from graphreplay.testing.contract_twin import in_child
from graphreplay_xpu import capture as capturing
from graphreplay_xpu.capture import capture
from graphreplay_xpu.pools import PoolMemory, PoolState, one_at_a_time

pytestmark = pytest.mark.usefixtures("no_grad")


# --------------------------------------------------------------------------------- streams and turns


def test_replays_of_any_pool_find_no_seed_to_come_from_a_capture(machine):
    """They share the memory of the seed with all graphs of the device."""
    first = wrap()
    on_streams(first)
    second = wrap()
    second(x=X)
    on_streams(first)
    assert (first.captures, second.captures, first.disabled_reason) == (1, 1, None)
    (seeding, tick) = machine.seeded[0]
    assert machine.host[seeding] >= tick


@pytest.mark.filterwarnings("ignore:The XPU Graph is empty")
@pytest.mark.parametrize("fault", ["begin", "end", "finalize", "lose"])
def test_captures_that_fail_leave_no_seed_to_come(fault, machine, kept):
    first = wrap()
    first(x=X)
    machine.faults = {fault}
    assert wrap()(x=X) is not None
    on_streams(first)
    assert first.disabled_reason is None


def test_without_waiting_for_a_capture_a_replay_would_meet_its_seed(machine, monkeypatch):
    monkeypatch.setattr(capturing, "wait_for", lambda stream: None)
    graphed = wrap()
    on_streams(graphed)
    assert "that may meet the seed which a capture on (0, 2) writes" in graphed.disabled_reason


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
    graphed = wrap(forward, warmup_iters=2)
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
                with one_at_a_time:  # a replay may not meet the seed that a capture beside it writes
                    graph.staging([], [])([], [])
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


def test_a_wrapper_of_another_device_than_the_current_one(machine):
    """Its captures, turns, replays and frees go by its own device's streams."""
    graphed = wrap(index=1)
    own = Stream(1)
    with xpu_emulation.stream(own):
        graphed(x=X)
    before = own.work()
    for seed in range(3):
        assert torch.equal(graphed(x=zoo.rows(3, seed)), zoo.rows(3, seed) * 2 + 1)
    assert xpu_emulation.current_device() == 0
    assert (graphed.captures, graphed.stats()["replays"]) == (1, 3)
    (graph,) = machine.graphs
    state = graphed.pool.backend
    assert (state.device, state.capture_stream.key[0], state.last_stream.key) == (torch.device("xpu", 1), 1, (1, 0))
    assert list(graph._replays) == [(1, 0)]
    assert machine.queues[1, 0].seen[own.key] >= before - 1, "its turn came after what the stream before had"
    assert graphed.stats()["bytes"] == graph._work.nbytes + X.nbytes
    graphed.close()
    assert (len(machine.graphs), machine.synced) == (0, 1)
    assert {key[0] for key in machine.host} == {1}
    assert all(not queue.seen for key, queue in machine.queues.items() if key[0] == 0), "device 0 has seen nothing"


def test_warm_ups_of_another_device_wait_for_its_current_stream(machine):
    state = PoolState(torch.device("xpu", 1))
    current = xpu_emulation.current_stream(1)
    before = current.work()
    with state.side():
        inside = xpu_emulation.current_stream().work()
    assert state.capture_stream.queue.seen[current.key] >= before
    assert current.queue.seen[state.capture_stream.key] >= inside


@pytest.mark.parametrize("number", [0, 1], ids=["its current stream", "another of its streams"])
def test_a_foreign_capture_on_another_device_is_not_disturbed(number, machine):
    graphed, foreign, own = wrap(index=1), XPUGraph(), Stream(key=(1, number))
    with xpu_emulation.stream(own):
        graphed(x=X)
        graphed(x=X)
        foreign.capture_begin()
    result = graphed(x=X)
    with xpu_emulation.stream(own):
        foreign.capture_end()
    foreign.reset()
    assert torch.equal(result, X * 2 + 1)
    assert graphed.stats()["eager_reasons"] == {"called inside another capture": 1}


def test_the_forwards_own_error_is_not_replaced_by_that_of_a_wait(machine, monkeypatch):
    def lost(stream, other):
        raise RuntimeError("device lost")

    state = PoolState(torch.device("xpu", 0))
    with pytest.raises(ValueError, match="its own") as caught, state.side():
        monkeypatch.setattr(Stream, "wait_stream", lost)
        raise ValueError("its own")
    assert caught.value.__notes__ == ["and RuntimeError: device lost"]
    monkeypatch.undo()


def test_a_wait_that_fails_after_a_forward_is_told(machine, monkeypatch):
    def lost(stream, other):
        raise RuntimeError("device lost")

    state = PoolState(torch.device("xpu", 0))
    with pytest.raises(RuntimeError, match="device lost"), monkeypatch.context() as patch, state.side():
        patch.setattr(Stream, "wait_stream", lost)


# -------------------------------------------------------------------------------------------- freeing


def in_a_cycle(graphed):
    cycle = [graphed]
    cycle.append(cycle)


@pytest.mark.timeout(60)
def test_the_collector_may_meet_another_graph_while_one_is_freed(machine, monkeypatch):
    first = wrap()
    second = wrap(pool=first.pool)
    for graphed in (first, second):
        graphed(x=X)
        graphed(x=X)
    real = xpu_emulation.Event.synchronize

    def collect(event):
        monkeypatch.setattr(xpu_emulation.Event, "synchronize", real)
        gc.collect()
        return real(event)

    gc.disable()
    try:
        in_a_cycle(second)
        del second, graphed
        monkeypatch.setattr(xpu_emulation.Event, "synchronize", collect)
        first.close()
    finally:
        gc.enable()
    assert machine.graphs == set()
    assert first.pool.backend.memory._graphs == 0


@pytest.mark.timeout(120)
def test_the_collector_may_run_anywhere_while_a_graph_is_freed(machine):
    """By its own trigger, after so many objects."""
    before, freed = gc.get_threshold(), 0
    gc.collect()
    gc.freeze()  # what is there already, which takes long to look through
    try:
        for count in range(40):
            first = wrap()
            second = wrap(pool=first.pool)
            for graphed in (first, second):
                graphed(x=X)
                graphed(x=X)
            memory = first.pool.backend.memory
            gc.collect()
            gc.disable()
            in_a_cycle(second)
            del second, graphed
            gc.set_threshold(gc.get_count()[0] + count, 10, 10)
            gc.enable()
            first.close()
            gc.disable()
            gc.set_threshold(*before)
            freed += not machine.graphs
            gc.collect()
            assert machine.graphs == set()
            assert memory._graphs == 0
    finally:
        gc.set_threshold(*before)
        gc.enable()
        gc.unfreeze()
    assert freed, "the collector never ran in there"


@pytest.mark.parametrize("where", ["in this thread", "in another thread"])
def test_the_last_graph_of_a_pool_may_leave_as_a_capture_into_it_begins(where, machine, monkeypatch):
    """torch does not count the new graph yet: it would drop the pool under it."""
    graphed = wrap()
    graphed(x=X)
    (handle,) = machine.pools
    leaving = [graphed]
    later = wrap(pool=graphed.pool)
    del graphed
    real = XPUGraph.capture_begin

    def begin(graph, pool=None):
        if leaving:
            drop = leaving.clear
            if "another" in where:
                thread = threading.Thread(target=drop)
                thread.start()
                thread.join(30)
            else:
                drop()
        real(graph, pool)

    monkeypatch.setattr(XPUGraph, "capture_begin", begin)
    for seed in range(3):
        assert torch.equal(later(x=zoo.rows(3, seed)), zoo.rows(3, seed) * 2 + 1)
    assert leaving == []
    assert (later.captures, later.disabled_reason) == (1, None)
    assert {key: len(graphs) for key, graphs in machine.pools.items()} == {handle: 1}
    assert later.pool.backend.memory._graphs == 1


def test_a_graph_that_cannot_be_freed_as_a_capture_begins_is_told(machine, caplog):
    memory = PoolMemory()

    def fail():
        raise RuntimeError("device lost")

    with memory.enter(), memory.enter():
        memory.leave(fail)
    assert "a graph could not be freed: RuntimeError: device lost" in caplog.text
    assert memory._graphs == 1


@pytest.mark.timeout(30)
def test_a_graph_may_leave_while_its_thread_counts_another_one(machine):
    """The collector may run under the lock too."""
    memory, freed = PoolMemory(), []

    class Collecting(list):
        def append(self, free):
            super().append(free)
            if len(self) == 1:
                memory.leave(lambda: freed.append("met by the collector"))

    with memory.enter(), memory.enter():
        memory._late = Collecting()
        memory.leave(lambda: freed.append("let go"))
    assert freed == ["let go", "met by the collector"]
    assert memory._graphs == 0


def test_a_graph_may_be_freed_while_its_memory_is_entered(machine):
    memory = PoolMemory()
    with memory.enter() as first:
        pass

    def free():
        with memory.enter() as other:
            assert other != first, "torch is about to drop the pool that this graph was in"

    memory.leave(free)
    assert memory._graphs == 1


def test_a_graph_whose_replay_cannot_be_waited_for_is_kept(machine, monkeypatch, kept, caplog):
    graphed = wrap()
    on_streams(graphed)

    def lost(event):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(xpu_emulation.Event, "synchronize", lost)
        graphed.close()
    assert "a graph could not be freed: RuntimeError: device lost" in caplog.text
    assert machine.graphs == set(kept)
    assert len(kept) == 1
    assert graphed.pool.backend.memory._graphs == 0, "the next capture opens another pool"


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


def test_what_a_call_copied_out_is_waited_for_too(machine):
    graphed, own = wrap(), Stream()
    with xpu_emulation.stream(own):
        graphed(x=X)
        graphed(x=X)
        copied = own.work()
    graphed.close()
    assert machine.host[own.key] >= copied


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

    def child():
        nonlocal graphed
        del graphed
        assert len(kept) == 1
        assert machine.synced == 0

    assert in_child(child) == 0
    assert kept == []
