"""The parts of a capture: process state around it, contexts, and how failures are told."""

import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphreplay import ReferenceGraphedForward, capture
from graphreplay.capture import body_error_wins, capturing_here, describe, quiet_capture
from graphreplay.errors import HostSyncError
from graphreplay.snapshot import Snapshot

CPU = torch.device("cpu")


def test_quiet_capture_keeps_process_state():
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    with quiet_capture(CPU):
        assert capturing_here()
        assert not gc.isenabled()
        assert not torch.is_autocast_cache_enabled()
        torch.rand(5)
    assert not capturing_here()
    assert gc.isenabled()
    assert torch.is_autocast_cache_enabled()
    assert torch.equal(torch.rand(3), expected)


def test_quiet_capture_restores_after_an_error_what_was_before():
    gc.disable()
    torch.set_autocast_cache_enabled(False)
    try:
        with pytest.raises(KeyboardInterrupt), quiet_capture(CPU):
            raise KeyboardInterrupt
        assert not gc.isenabled()
        assert not torch.is_autocast_cache_enabled()
        assert not capturing_here()
    finally:
        gc.enable()
        torch.set_autocast_cache_enabled(True)


def test_captures_of_threads_leave_the_generators_alone():
    state = torch.get_rng_state()
    graphed = [ReferenceGraphedForward(lambda *, x: x + torch.rand_like(x), device="cpu") for _ in range(4)]

    def capture(wrapper):
        with torch.no_grad():
            for count in range(1, 12):
                wrapper.prepare(x=torch.ones(count))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(capture, graphed))
    assert torch.equal(torch.get_rng_state(), state)
    assert [wrapper.disabled_reason for wrapper in graphed] == [None] * 4
    assert [wrapper.captures for wrapper in graphed] == [11] * 4


@pytest.mark.parametrize("ahead", [False, True])
def test_a_forward_that_waits_for_a_capture_of_another_thread_goes_on(monkeypatch, ahead):
    monkeypatch.setattr(capture, "TURN_LIMIT", 0.05)
    inner = ReferenceGraphedForward(lambda *, x: x + 1, device="cpu")
    lengths = iter(range(1, 100))

    def forward(*, x):
        with torch.no_grad():
            worker.submit(inner, x=torch.ones(next(lengths))).result(60)
        return x * 2

    outer = ReferenceGraphedForward(forward, device="cpu")
    with ThreadPoolExecutor(1) as worker, torch.no_grad():
        if ahead:
            outer.prepare(x=torch.ones(2))
        assert [outer(x=torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    assert (outer.disabled_reason, inner.disabled_reason) == (None, None)


def keeps_its_input(module, x):
    module.last = x


def moves_its_weight(module, x):
    module.weight.data = module.weight.data.clone()


def moves_its_input(module, x):
    x.data = x.data.clone()


def seeds(module, x):
    torch.manual_seed(1)
    torch.rand(1)


def waits(module, x):
    x.sum().item()


def looks_for_positions(module, x):
    x.nonzero()


class Does(torch.nn.Linear):
    """Does something that no graph can."""

    def __init__(self, what):
        super().__init__(2, 2)
        self.what = (what,)

    def forward(self, x):
        self.what[0](self, x)
        return x + 1


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (waits, "host wait"),
        (looks_for_positions, "host wait"),
        (keeps_its_input, "changes attribute last"),
        (moves_its_weight, "moves weight"),
        (moves_its_input, "moves a kwarg"),
        (seeds, "seeds a random generator"),
    ],
)
def test_refusals_keep_no_wrapper_alive(what, reason, prepared):
    gc.collect()
    gc.disable()
    try:
        wrapper = ReferenceGraphedForward(Does(what), device="cpu")
        with torch.no_grad():
            (wrapper.prepare if prepared else wrapper)(x=torch.ones(2))
        assert reason in wrapper.disabled_reason
        gone = weakref.ref(wrapper)
        del wrapper
        assert gone() is None
    finally:
        gc.enable()


def test_host_numbers_of_a_capture_that_failed_are_put_back():
    def forward(*, x):
        return x * random.random() * x.sum().item()

    graphed = ReferenceGraphedForward(forward, device="cpu")
    random.seed(7)
    with torch.no_grad():
        got = [graphed(x=torch.ones(1)).item() for _ in range(3)]
    random.seed(7)
    assert got == pytest.approx([random.random() for _ in range(3)])


def test_host_numbers_of_a_preparation_are_put_back():
    graphed = ReferenceGraphedForward(lambda *, x: x * random.random(), device="cpu")
    state = random.getstate()
    with torch.no_grad():
        assert not graphed.prepare(x=torch.ones(1))
    assert random.getstate() == state
    assert any("draws from random" in reason for reason in graphed.stats()["miss_reasons"])


def test_a_preparation_that_waits_in_vain_says_so(monkeypatch):
    monkeypatch.setattr(capture, "TURN_LIMIT_AHEAD", 0.05)
    graphed = ReferenceGraphedForward(lambda *, x: x + 1, device="cpu")
    inside, leave = threading.Event(), threading.Event()

    def other():
        with quiet_capture(CPU):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(30)
    with torch.no_grad():
        assert not graphed.prepare(x=torch.ones(1))
        leave.set()
        thread.join()
        assert graphed.prepare(x=torch.ones(1))
    reasons = graphed.stats()["miss_reasons"]
    assert reasons["not prepared: another thread captures; a later call may be captured"] == 1


def test_an_interrupted_restore_is_finished():
    first, second = torch.zeros(2), torch.zeros(2)
    snapshot = Snapshot([first, second])
    first += 1
    second += 1
    copies = []

    class Interrupts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                copies.append(func)
                if len(copies) == 2:
                    raise KeyboardInterrupt
            return func(*args, **(kwargs or {}))

    with pytest.raises(KeyboardInterrupt), Interrupts():
        snapshot.restore()
    assert (first.tolist(), second.tolist()) == ([0.0, 0.0], [0.0, 0.0])


def test_quiet_captures_of_two_threads_overlap():
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def other():
        with quiet_capture(CPU, alone=False):
            inside.set()
            leave.wait(20)
            seen.append((capturing_here(), gc.isenabled()))

    thread = threading.Thread(target=other)
    with quiet_capture(CPU, alone=False):
        thread.start()
        assert inside.wait(20)
    assert not capturing_here(), "captures of other threads are not ours"
    leave.set()
    thread.join()
    assert seen == [(True, False)], "the collector is off until the last capture has ended"
    assert gc.isenabled()


class Context:
    def __init__(self, *, enter=None, leave=None, swallow=False):
        self.enter, self.leave, self.swallow = enter, leave, swallow
        self.left_with = []

    def __enter__(self):
        if self.enter:
            raise self.enter

    def __exit__(self, kind, error, traceback):
        self.left_with.append(error)
        if self.leave:
            raise self.leave
        return self.swallow


def test_body_error_wins_over_the_exit_and_tells_of_it():
    context = Context(leave=OSError("while leaving"))
    with pytest.raises(ValueError, match="mine") as caught, body_error_wins(lambda: context):
        raise ValueError("mine")
    assert context.left_with == [caught.value]
    assert any("while leaving" in note for note in caught.value.__notes__)


def test_body_error_is_not_swallowed():
    with pytest.raises(ValueError, match="mine"), body_error_wins(lambda: Context(swallow=True)):
        raise ValueError("mine")


@pytest.mark.parametrize("which", ["enter", "leave"])
def test_context_error_is_raised(which):
    context = Context(**{which: OSError("theirs")})
    with pytest.raises(OSError, match="theirs"), body_error_wins(lambda: context):
        pass
    assert context.left_with == ([] if which == "enter" else [None])


def test_errors_as_reasons():
    def model():
        return [][1]

    with pytest.raises(IndexError) as caught:
        model()
    line = model.__code__.co_firstlineno + 1
    assert describe(caught.value) == f"IndexError: list index out of range (raised at {__file__}:{line} in model)"
    assert describe(HostSyncError("speaks for itself")) == "speaks for itself"
