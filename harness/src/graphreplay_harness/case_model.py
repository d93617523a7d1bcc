"""What a case of several ranks is: a forward, the calls of each rank, what goes wrong where, and how it may end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch.distributed as dist
from torch import nn

Shape = tuple[int, ...]
ModuleFactory = Callable[[dist.ProcessGroup], nn.Module]
"""Makes the forward of one rank, with a kwarg ``x``. The ranks seed alike before."""


class Fault(StrEnum):
    """What goes wrong."""

    NONE = "none"
    RAISE = "raise"
    ALWAYS = "always"
    """As RAISE, and again at each further time that a call comes by."""
    HOST_SYNC = "host-sync"
    MEMORY = "out-of-memory"
    DELAY = "delay"
    DEATH = "death"
    SHAPE = "shape"
    """One call has another shape than the same call of the other ranks."""
    CAPACITY = "capacity"
    """The wrapper keeps fewer graphs than those of the other ranks."""
    HANG = "hang"
    WRONG = "wrong"
    """From then on the forward returns something else."""


class Place(StrEnum):
    """Where it goes wrong: at the first time that a call comes by, and only then but for Fault.ALWAYS."""

    EAGER = "eager"
    """Before the call's own forward."""
    CLONE = "clone"
    CONTEXT_ENTER = "context-enter"
    PROBE = "probe"
    """Inside the host-sync probe, before its forward."""
    WARM_UP = "warm-up"
    """Before the first forward of a warm-up."""
    BETWEEN = "between"
    """Between two collectives of a warm-up."""
    CAPTURE = "capture"
    """Inside the capture, before its forward."""
    BETWEEN_IN_CAPTURE = "between-in-capture"
    """Between two collectives of a capture that runs them."""
    INSTANTIATE = "instantiate"
    """When all of the forward is captured."""
    CONTEXT_EXIT = "context-exit"
    REPLAY = "replay"
    EVICTION = "eviction"
    CLOSE = "close"


class Outcome(StrEnum):
    """How a rank ended; beside these, ``error:`` with the name of what a call raised."""

    GRAPHED = "graphed"
    """Graphs were captured, and no call was refused one."""
    REFUSED = "refused"
    """Some calls ran eagerly for a reason."""
    DISABLED = "disabled"
    EAGER = "eager"
    """The wrapper was off from the start, or nothing was captured."""
    WRONG = "wrong"
    """A result is not that of the plain module."""
    DIED = "died"
    """The process ended where the case says so."""
    CRASHED = "crashed"
    """It ended anywhere else."""
    HANG = "hang"
    """It did not end within the deadline of the case."""
    BROKEN = "broken"
    """It failed before any call."""
    LINGERS = "lingers"
    """It ended, and its process stayed."""
    LOST = "lost"
    """Its supervisor told nothing."""


@dataclass(frozen=True)
class Expected:
    """How one rank may end."""

    outcomes: frozenset[str]
    says: str = ""
    """What the reason must contain."""

    def met(self, outcome: str, reason: str) -> bool:
        return outcome in self.outcomes and self.says in reason


@dataclass(frozen=True)
class Case:
    """One run of all ranks. Tuples by rank have one item for each."""

    name: str
    module: ModuleFactory
    calls: tuple[tuple[Shape, ...], ...]
    """Shapes of ``x`` by rank."""
    expected: tuple[Expected, ...]
    """By rank."""
    fault: Fault = Fault.NONE
    place: Place = Place.EAGER
    ranks: tuple[int, ...] = ()
    """Where the fault is."""
    between: str = ""
    """The submodule of the forward that starts between two collectives, or none."""
    grouped: bool = True
    """Whether the wrapper is told the group."""
    max_entries: tuple[int, ...] = ()
    """By rank; without any, as many as there are calls."""
    delay: float = 0.3
    """Seconds of Fault.DELAY."""
    agree_within: float = 20.0
    """The wrapper's own deadline, in seconds. Short only where it has to pass: a rank of a busy machine may stall."""
    deadline: float = 30.0
    """Seconds from when a rank is ready to call until it has ended."""

    @property
    def silent(self) -> bool:
        """Whether the fault lies in what a rank is given, and not in something that happens."""
        return self.fault in (Fault.NONE, Fault.SHAPE, Fault.CAPACITY)

    def entries_of(self, rank: int) -> int:
        return self.max_entries[rank] if self.max_entries else max(1, len(self.calls[rank]))
