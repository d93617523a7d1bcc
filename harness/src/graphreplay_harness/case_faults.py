"""Brings faults about, in the process of one rank: hooks on the module, a subclass of the backend, patches. None of it
touches the code under test in any other process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from graphreplay import GraphedForward, capture
from graphreplay.entry import Entry, Graph, Launch
from graphreplay_harness.case_model import Case, Fault, Place

DEATH_STATUS = 77
"""Exit status of a process that a case lets die."""

PLACES = (
    Place.CLONE,
    Place.CONTEXT_ENTER,
    Place.PROBE,
    Place.WARM_UP,
    Place.BETWEEN,
    Place.CAPTURE,
    Place.BETWEEN_IN_CAPTURE,
    Place.INSTANTIATE,
    Place.CONTEXT_EXIT,
    Place.REPLAY,
    Place.EVICTION,
    Place.CLOSE,
)
"""Those of the matrix."""

FAULTS = (
    Fault.RAISE, Fault.ALWAYS, Fault.HOST_SYNC, Fault.MEMORY, Fault.DELAY, Fault.DEATH, Fault.SHAPE, Fault.CAPACITY,
)  # fmt: skip
"""Those of the matrix."""

_ONLY_BETWEEN_IN_CAPTURE = (Fault.RAISE, Fault.MEMORY)
"""The other faults are between collectives as well, of a warm-up."""

_ONLY_AT: dict[Fault, tuple[frozenset[Place], str]] = {
    Fault.ALWAYS: (frozenset({Place.WARM_UP}), "it is every forward from the first warm-up on that fails"),
    Fault.HOST_SYNC: (
        frozenset({Place.PROBE, Place.WARM_UP, Place.BETWEEN, Place.CAPTURE}),
        "only the probe and the capture mind who waits for the device",
    ),
    Fault.MEMORY: (frozenset(PLACES) - {Place.EVICTION, Place.CLOSE}, "what frees memory asks for none"),
    Fault.SHAPE: (frozenset({Place.REPLAY}), "it is a call that differs, where the other ranks replay"),
    Fault.CAPACITY: (frozenset({Place.EVICTION}), "it is a bound that differs, and shows where a graph is evicted"),
}
_NOT_ON_ALL: dict[Fault, str] = {
    Fault.DELAY: "when all are late, nobody is",
    Fault.DEATH: "nobody is left to see it",
    Fault.SHAPE: "what is the same on all ranks does not differ",
    Fault.CAPACITY: "what is the same on all ranks does not differ",
}


def why_not(fault: Fault, place: Place, ranks: tuple[int, ...], world: int) -> str | None:
    """Why there is no such case, or None if there is."""
    places, reason = _ONLY_AT.get(fault, (None, ""))
    if places is not None and place not in places:
        return reason
    if place is Place.BETWEEN_IN_CAPTURE and fault not in _ONLY_BETWEEN_IN_CAPTURE:
        return "between collectives a capture that runs them is like a warm-up"
    if len(ranks) == world:
        return "there are no other ranks" if world == 1 and fault in _NOT_ON_ALL else _NOT_ON_ALL.get(fault)
    return None


def combinations(world: int) -> Iterator[tuple[Fault, Place, tuple[int, ...], str | None]]:
    """The matrix: every fault at every place on the first rank, the last one, and all; and why there is no such case,
    or None."""
    some = {(0,), (world - 1,), tuple(range(world))}
    for fault in FAULTS:
        for place in PLACES:
            for ranks in sorted(some, key=lambda each: (len(each), each)):
                yield fault, place, ranks, why_not(fault, place, ranks, world)


class InjectedFault(RuntimeError):
    """The fault of a case."""


class Faults:
    """The fault of a case on this rank, if it is to have one. Nothing happens before ``arm()``."""

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        self.fired = False
        self._case = case
        self._device = device
        self._waiting = False
        self._mine = rank in case.ranks
        self._wrong = False
        self._recording = False
        self._closing = False

    def arm(self) -> None:
        """From now on the fault happens when its place is reached."""
        self._waiting = self._mine

    def reach(self, place: Place) -> None:
        """A call has come to this place."""
        if self._waiting and place is self._case.place:
            self._waiting, self.fired = self._case.fault is Fault.ALWAYS, True
            self._happen()

    def _happen(self) -> None:
        what = f"injected {self._case.fault} at {self._case.place}"
        match self._case.fault:
            case Fault.RAISE | Fault.ALWAYS:
                raise InjectedFault(what)
            case Fault.HOST_SYNC:
                torch.ones((), device=self._device).item()
            case Fault.MEMORY:
                raise torch.OutOfMemoryError(what)
            case Fault.DELAY:
                time.sleep(self._case.delay)
            case Fault.DEATH:
                os._exit(DEATH_STATUS)
            case Fault.HANG:
                while True:
                    time.sleep(1)
            case Fault.WRONG:
                self._wrong = True

    # --------------------------------------------------------------------------------------------- places

    def watch(self, module: nn.Module) -> None:
        """Notices when the module starts, and when it is between two collectives."""
        module.register_forward_pre_hook(self._started)
        module.register_forward_hook(self._ended)
        if self._case.between:
            module.get_submodule(self._case.between).register_forward_pre_hook(self._between)

    def _started(self, *_: object) -> None:
        if not capture.capturing_here():
            self.reach(Place.EAGER)
        else:
            self.reach(Place.CAPTURE if self._recording else Place.WARM_UP)

    def _between(self, *_: object) -> None:
        if capture.capturing_here():
            self.reach(Place.BETWEEN_IN_CAPTURE if self._recording else Place.BETWEEN)

    def _ended(self, _module: nn.Module, _args: object, output: Any) -> Any:
        return output + 1 if self._wrong else None

    @contextmanager
    def capture_context(self) -> Iterator[None]:
        """For the wrapper's argument of that name."""
        self.reach(Place.CONTEXT_ENTER)
        yield
        self.reach(Place.CONTEXT_EXIT)

    def backend(self, cls: type[GraphedForward]) -> type[GraphedForward]:
        """The backend's class with places in its hooks."""
        faults = self

        def _capture_graph(self: GraphedForward, forward: Callable[[], Any]) -> tuple[Any, Any]:
            faults._recording = True
            try:
                graph, outputs = cls._capture_graph(self, forward)
            finally:
                faults._recording = False
            try:
                faults.reach(Place.INSTANTIATE)
            except Exception:
                graph.reset()
                raise
            return _Launched(graph, faults), outputs

        @contextmanager
        def _sync_probe(self: GraphedForward) -> Iterator[None]:
            with cls._sync_probe(self):
                faults.reach(Place.PROBE)
                yield

        def close(self: GraphedForward) -> None:
            faults._closing = True
            faults.reach(Place.CLOSE)
            cls.close(self)

        return type(f"Faulty{cls.__name__}", (cls,), {f.__name__: f for f in (_capture_graph, _sync_probe, close)})

    def patches(self) -> AbstractContextManager[object]:
        """Puts places into what is no hook. The wrapper is to be built inside."""

        def before(place: Place, function: Callable[..., Any]) -> Callable[..., Any]:
            def patched(*args: Any, **kwargs: Any) -> Any:
                if not (place is Place.EVICTION and self._closing):  # closing frees all graphs
                    self.reach(place)
                return function(*args, **kwargs)

            return patched

        stack = ExitStack()
        for owner, name, place in (
            (capture, "clone_static", Place.CLONE),
            (Entry, "free", Place.EVICTION),
        ):
            stack.enter_context(mock.patch.object(owner, name, before(place, getattr(owner, name))))
        return stack


class _Launched:
    """A graph with a place before each of its launches."""

    def __init__(self, graph: Graph, faults: Faults) -> None:
        self.nbytes = graph.nbytes
        self.reset = graph.reset
        self._graph = graph
        self._faults = faults

    def staging(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Launch:
        launch, faults = self._graph.staging(inputs, outputs), self._faults

        def reaching(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            faults.reach(Place.REPLAY)
            launch(inputs, outputs)

        return reaching
