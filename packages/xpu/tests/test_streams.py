"""Streams, turns, and the freeing of graphs, on the emulated torch.xpu."""

import os
import threading

import pytest
import torch
import xpu_emulation
from emulated_forward import EmulatedForward
from xpu_calls import X, on_streams, wrap
from xpu_emulation import Stream, XPUGraph

from graphreplay.testing import zoo
from graphreplay_xpu.capture import capture
from graphreplay_xpu.pools import PoolState

pytestmark = pytest.mark.usefixtures("no_grad")


# --------------------------------------------------------------------------------- streams and turns


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
