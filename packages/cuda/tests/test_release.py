"""Letting go of graphs, without a device: what is freed when, and where an error goes."""

import os
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from graphreplay_cuda import captured, driver, release, streams
from graphreplay_cuda.pools import PoolHandle


@pytest.fixture
def told(monkeypatch):
    """What happens, in order. No capture is under way."""
    told = []

    @contextmanager
    def relaxed():
        told.append("relaxed")
        try:
            yield
        finally:
            told.append("strict")

    monkeypatch.setattr(driver, "relaxed", relaxed)
    monkeypatch.setattr(release, "is_capturing_here", lambda: False)
    monkeypatch.setattr(release, "_deferred", [])
    return told


def failing():
    raise torch.AcceleratorError("CUDA error: the device is gone\nCompile with advice")


def test_a_deferred_graph_that_cannot_be_freed_is_logged_and_the_others_go(told, caplog):
    waiting = (lambda: True, lambda: told.append("too early"))
    release._deferred += [(lambda: False, failing), waiting, (lambda: False, lambda: told.append("freed"))]
    release.free_deferred()
    assert told[-3:] == ["relaxed", "freed", "strict"]
    assert release._deferred == [waiting]
    assert [record.getMessage() for record in caplog.records] == [
        "a graph could not be freed: AcceleratorError: CUDA error: the device is gone"
    ]
    assert caplog.records[0].name == "graphreplay"


def test_an_error_of_the_graph_itself_is_the_callers(told, caplog):
    release._deferred.append((lambda: False, lambda: told.append("the one before")))
    with pytest.raises(RuntimeError, match="the device is gone"):
        release.release(None, os.getpid(), lambda: False, failing)
    assert told[:3] == ["relaxed", "the one before", "strict"]
    assert (release._deferred, caplog.records) == ([], [])


@pytest.mark.parametrize(("capturing", "blocked"), [(True, False), (False, True)])
def test_what_would_break_a_capture_waits(told, monkeypatch, capturing, blocked):
    now = {"capturing": capturing, "blocked": blocked}
    monkeypatch.setattr(release, "is_capturing_here", lambda: now["capturing"])
    release.release(None, os.getpid(), lambda: now["blocked"], lambda: told.append("freed"))
    assert told == []
    now.update(capturing=False, blocked=False)
    release.free_deferred()
    assert told == ["relaxed", "freed", "strict"]
    assert release._deferred == []


def test_an_empty_pool_gives_its_memory_back_without_breaking_captures_of_other_threads(told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("emptied"))
    state = captured.PoolState.__new__(captured.PoolState)
    state.handle = PoolHandle((0, 7))
    state.handle.graphs = 1
    state.release()
    assert told == []
    state.handle.graphs = 0
    state.release()
    assert told == ["relaxed", "emptied", "strict"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    state.release()
    assert told == ["relaxed", "emptied", "strict"]


def test_a_graph_may_go_while_another_one_of_its_pool_goes():
    """The collector finds it in the middle of freeing the other one, in the same thread."""
    pool, told = PoolHandle((0, 7)), []
    for _ in range(2):
        pool.enter()
        pool.capture_over()

    def free():
        pool.leave(lambda: told.append("inner"))
        told.append("outer")

    thread = threading.Thread(target=pool.leave, args=(free,), daemon=True)
    thread.start()
    thread.join(30)
    assert (told, pool.graphs) == (["inner", "outer"], 0)


def test_a_graph_that_leaves_while_another_one_enters_is_freed_after_its_capture(told):
    """torch does not count that one from the beginning, and would drop the pool with the last one that it counts."""
    pool, same = PoolHandle((0, 7)), PoolHandle((0, 7))
    pool.enter()
    pool.capture_over()
    assert same.enter() == (0, 7)
    thread = threading.Thread(target=pool.leave, args=(lambda: told.append("freed"),), daemon=True)
    thread.start()
    thread.join(30)
    assert (told, pool.graphs) == ([], 1)
    same.capture_over()
    assert (told, pool.graphs, same.graphs) == (["relaxed", "freed", "strict"], 0, 1)


def test_a_graph_that_leaves_late_and_cannot_be_freed_is_logged(told, caplog):
    pool = PoolHandle((0, 7))
    pool.enter()
    pool.capture_over()
    pool.enter()
    pool.leave(failing)
    assert caplog.records == []
    pool.capture_over()
    assert "a graph could not be freed: AcceleratorError: CUDA error: the device is gone" in caplog.text
    assert pool.graphs == 1


def test_a_capture_takes_its_stream_for_itself():
    stream, other = (SimpleNamespace(device=SimpleNamespace(index=0), cuda_stream=raw) for raw in (-7, -8))
    assert streams.take(stream)
    assert not streams.take(stream)
    assert streams.take(other)
    for one in (stream, other, other):
        streams.let_go(one)
    assert streams.take(stream)
    streams.let_go(stream)


def test_a_stream_that_is_captured_again_is_not_waited_for(told, monkeypatch):
    capturing = [False, True]
    done = SimpleNamespace(record=lambda stream: told.append(stream), synchronize=lambda: told.append("waited"))
    monkeypatch.setattr(driver, "is_capturing", lambda raw: capturing.pop(0))
    monkeypatch.setattr(torch.cuda, "Event", lambda: done)
    stream = SimpleNamespace(cuda_stream=-7)
    streams.wait_for(stream)
    assert told == ["relaxed", stream, "waited", "strict"]
    streams.wait_for(stream)
    assert told[4:] == ["relaxed", "strict"]
