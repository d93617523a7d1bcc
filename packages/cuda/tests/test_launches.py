"""The order of launches, without a GPU: streams are numbers here."""

import threading
from types import SimpleNamespace

import pytest
import torch

from graphreplay.testing.contract_twin import in_child
from graphreplay_cuda import CUDAGraphedForward, driver, launches, streams
from graphreplay_cuda.errors import GraphStateError
from graphreplay_cuda.launches import Launches


@pytest.fixture
def machine(monkeypatch):
    """A machine whose current stream is ``raw``, with the streams that are being captured."""
    state = SimpleNamespace(raw=1, device=0, captured=set(), waits=[])

    class Stream:
        def __init__(self, raw):
            self.raw = raw

        def wait_stream(self, other):
            state.waits.append((self.raw, other.raw))

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state.raw, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(state.raw))
    monkeypatch.setattr(streams, "named", lambda raw, device: Stream(raw))
    monkeypatch.setattr(driver, "is_capturing", lambda raw: raw in state.captured)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: state.raw in state.captured, raising=False)
    assert launches.driver is driver
    return state


def test_a_stream_waits_for_the_one_that_launched_before_it(machine):
    order = Launches(torch.device("cuda", 0))
    for raw in (1, 1, 2, 2, 0, 1):
        machine.raw = raw
        order.take_turn()
    assert machine.waits == [(2, 1), (0, 2), (1, 0)]
    assert order.last == 1


def test_nothing_waits_for_a_stream_that_is_being_captured(machine):
    order = Launches(torch.device("cuda", 0))
    order.take_turn()
    machine.captured.add(1)
    assert order.is_blocked()
    machine.raw = 2
    with pytest.raises(GraphStateError, match="stream of the launch before is being captured"):
        order.take_turn()
    assert (order.last, machine.waits) == (1, [])
    machine.captured.clear()
    order.take_turn()
    assert (order.last, machine.waits, order.is_blocked()) == (2, [(2, 1)], False)


@pytest.mark.parametrize(("raw", "refused"), [(0, False), (1, True)])
def test_launches_inside_a_capture_are_refused(machine, raw, refused):
    machine.raw = raw
    machine.captured.update({0, 1})
    order = Launches(torch.device("cuda", 0))
    if not refused:  # the legacy default stream is never captured
        order.refuse_capture("replay")
        return
    with pytest.raises(GraphStateError, match=r"^replay inside a capture"):
        order.refuse_capture("replay")
    order.last = 2
    with pytest.raises(GraphStateError, match=r"^a launch inside a capture"):
        order.take_turn()
    assert order.last == 2


def test_whose_turn_it_is(machine):
    order = Launches(torch.device("cuda", 0))
    wrapper = SimpleNamespace(pool=SimpleNamespace(backend=None))

    def has_turn():
        return CUDAGraphedForward._has_turn(wrapper)

    assert not has_turn(), "there is no graph yet"
    wrapper.pool.backend = SimpleNamespace(launches=order, device=order.device)
    assert not has_turn(), "nobody has launched"
    order.take_turn()
    assert has_turn()
    for name, value in (("raw", 2), ("device", 1), ("captured", {1})):
        before = getattr(machine, name)
        setattr(machine, name, value)
        assert not has_turn(), name
        setattr(machine, name, before)
    assert has_turn()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the process has threads
def test_a_child_of_a_fork_finds_the_lock_free():
    order, holding, done = Launches(torch.device("cuda", 0)), threading.Event(), threading.Event()

    def hold():
        with order.lock:
            holding.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    holding.wait()
    try:

        def child():
            assert order.lock.acquire(timeout=5)

        assert in_child(child) == 0
        assert not order.lock.acquire(blocking=False)
    finally:
        done.set()
        holder.join()
