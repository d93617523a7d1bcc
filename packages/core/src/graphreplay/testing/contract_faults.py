"""Contract: something fails at any step of a call.

| kind | outcome | test |
| --- | --- | --- |
| any hook, allocation or copy fails once, in any call | as eager, nothing left behind | test_a_fault_at_any_step |
| a replay fails that may have written something | the error; eager from then on | test_a_fault_behind_writes_* |
| what a capture wrote cannot be put back | StateLostError | test_state_that_is_lost_* |

The steps are not listed by hand: a first run without a fault records them, and then each of them fails in a run of its
own.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from graphreplay import capture, entry, snapshot, storage, verify
from graphreplay.errors import StateLostError
from graphreplay.hooks import BackendHooks
from graphreplay.testing.contract_twin import ContractBase, assert_same, generator_states

HOOKS = sorted(
    name
    for name, hook in vars(BackendHooks).items()
    if callable(hook) and name.startswith("_") and not name.startswith("__") and name != "_graphs_supported"
)
"""Every hook that a call comes by; derived, so that a new one is not forgotten."""

STEPS: dict[str, tuple[object, str]] = {
    "clone the inputs": (capture, "clone_static"),
    "clone the inputs of a comparison": (verify, "clone_static"),
    "save what is written": (snapshot.Snapshot, "add"),
    "put it back": (snapshot.Snapshot, "restore"),
    "allocate copies": (storage.CopyPlan, "allocate"),
    "copy": (storage.CopyPlan, "copy"),
    "copy what is not dense": (storage.CopyPlan, "copy_rest"),
    "make the entry": (entry.Entry, "__init__"),
    "hand the outputs out": (entry.Entry, "hand_out"),
    "free": (entry.Entry, "free"),
}
"""What allocates or copies between the hooks; and what each entry replays by."""

MAY_RAISE = {"_is_capturing", "put it back"}
"""Before the call has begun to run; and where no call can be right."""

BEHIND_WRITES = {"launch", "copy", "copy what is not dense", "hand the outputs out", "rebuild"}
"""Where a replay may have written what an eager call would write again."""


class InjectedFault(torch.OutOfMemoryError):
    """What a step fails with."""


class Steps:
    """Counts the steps that calls come by, and lets one of them fail."""

    def __init__(self, cls: type, fail_at: int | None = None) -> None:
        self.seen: list[str] = []
        self._fail_at = fail_at
        self._cls = cls

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, (owner, attribute) in {**STEPS, **{hook: (self._cls, hook) for hook in HOOKS}}.items():
                function = getattr(owner, attribute)
                if name == "make the entry":
                    function = self._with_replay(function)
                stack.enter_context(mock.patch.object(owner, attribute, self._step(name, function)))
            yield

    def _with_replay(self, init: Callable[..., None]) -> Callable[..., None]:
        def make(made: entry.Entry, *args: Any, **kwargs: Any) -> None:
            init(made, *args, **kwargs)
            for name in ("allocate", "launch", "rebuild"):
                setattr(made, name, self._step(name, getattr(made, name)))

        return make

    def _step(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            if len(self.seen) - 1 == self._fail_at:
                error = StateLostError if name == "put it back" else InjectedFault
                raise error(f"injected at {name}")
            return function(*args, **kwargs)

        return step


class Stepping(nn.Module):
    """Counts its calls, draws numbers, and reads its input through a view."""

    steps: Tensor

    def __init__(self, writes: bool, shares: bool) -> None:
        super().__init__()
        self.writes = writes
        self.shares = shares
        self.linear = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(2))

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        if self.writes:
            self.steps.add_(1)
            y = y + torch.rand_like(y)
        return {"y": y, "view": y[:1]} if self.shares else {"y": y}


class FaultContract(ContractBase):
    """Faults injected at every step."""

    def session(self, steps: Steps, *, writes: bool, shares: bool = False, verify: str = "off") -> list[str]:
        """Five calls and the end, each beside a plain module, then another wrapper's calls; what was raised."""
        torch.manual_seed(0)
        module, plain = Stepping(writes, shares), Stepping(writes, shares)
        plain.load_state_dict(module.state_dict())
        graphed, plain = self.wrap(module, verify=verify), plain.to(self.device)
        raised = []
        with torch.inference_mode():
            for call, count in enumerate([3, 3, 3, 4, 3]):
                x = self.x(count, seed=call)
                torch.manual_seed(call)
                wanted = plain(x=x)
                drawn = generator_states(self.device)
                torch.manual_seed(call)
                try:
                    with steps.watched():
                        got = graphed(x=x)
                except (InjectedFault, StateLostError) as error:
                    raised.append(str(error))
                    module.load_state_dict(plain.state_dict())
                    continue
                assert_same(got, wanted, f"output of call {call}")
                assert_same(dict(module.state_dict()), dict(plain.state_dict()), f"state after call {call}")
                if self.device == "cpu":
                    assert_same(generator_states(self.device), drawn, f"generators after call {call}")
            with steps.watched():
                graphed.close()
            assert gc.isenabled()
            other = self.wrap(nn.Linear(8, 8))
            for _ in range(2):
                assert_same(other(input=self.x()), other.module(self.x()))
            assert (other.captures, other.stats()["replays"]) == (1, 1), other.disabled_reason
        return raised

    @pytest.mark.parametrize("verify", ["off", "always"])
    @pytest.mark.parametrize("shares", [False, True])
    @pytest.mark.parametrize("writes", [False, True])
    def test_a_fault_at_any_step(self, writes: bool, shares: bool, verify: str) -> None:
        clean = Steps(self.cls)
        assert self.session(clean, writes=writes, shares=shares, verify=verify) == []
        expected = {"_capture_graph", "_take_turn", "allocate", "launch", "hand the outputs out", "rebuild", "copy"}
        assert expected <= set(clean.seen)
        replays, on_the_road = clean.seen.count("launch"), clean.seen.count("hand the outputs out")
        assert replays - on_the_road == (0 if shares or verify == "always" else 2)  # by the short cut
        allowed = MAY_RAISE | BEHIND_WRITES if writes else MAY_RAISE
        for step, name in enumerate(clean.seen):
            raised = self.session(Steps(self.cls, step), writes=writes, shares=shares, verify=verify)
            assert raised in ([], [f"injected at {name}"]) if name in allowed else raised == [], f"step {step}, {name}"

    def test_a_fault_behind_writes_is_raised(self) -> None:
        clean = Steps(self.cls)
        self.session(clean, writes=True)
        for step, name in enumerate(clean.seen):
            if name in ("launch", "hand the outputs out"):
                assert self.session(Steps(self.cls, step), writes=True) == [f"injected at {name}"]

    @pytest.mark.parametrize("shares", [False, True])
    def test_a_fault_behind_writes_keeps_nothing_alive(self, shares: bool) -> None:
        """By the road, and by the short cut."""
        graphed = self.wrap(Stepping(writes=True, shares=shares))
        alive = weakref.ref(graphed)
        gc.disable()
        try:
            with torch.inference_mode():
                for _ in range(3):
                    graphed(x=self.x())
                graphed._cache.newest.launch = mock.Mock(side_effect=InjectedFault)
                with pytest.raises(InjectedFault):
                    graphed(x=self.x())
            del graphed
            assert alive() is None
        finally:
            gc.enable()

    def test_state_that_is_lost_is_told(self) -> None:
        clean = Steps(self.cls)
        self.session(clean, writes=True)
        step = clean.seen.index("put it back")
        assert self.session(Steps(self.cls, step), writes=True) == ["injected at put it back"]
