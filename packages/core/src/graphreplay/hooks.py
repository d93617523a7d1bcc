"""The seam between the road and a platform: what a backend overrides, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from graphreplay.entry import Graph
from graphreplay.hostsync import HostSyncProbe
from graphreplay.looks import LooksOf, SightOf, looks_of, sight_of
from graphreplay.pool import GraphPool


class BackendHooks:
    """``_graphs_supported``, ``_warmup_stream`` and ``_capture_graph`` come from the platform; the rest has defaults.
    As they stand they describe a platform without graphs."""

    module: Callable[..., Any]
    """The forward that is wrapped."""
    device: torch.device
    name: str
    pool: GraphPool

    looks_of: LooksOf = staticmethod(looks_of)
    """How to tell soon whether tensors look like others."""

    sight_of: SightOf = staticmethod(sight_of)
    """How to tell soon whether a module is as it was."""

    captures_run: bool = False
    """Whether ``_capture_graph`` computes, and runs collectives, while it captures."""

    why_no_collectives: str | None = None
    """Why graphs of this platform hold no collectives, or None where they do. Forwards that run some, on however many
    ranks, then run eagerly for this reason on all ranks alike."""

    @classmethod
    def resolve_device(cls, device: torch.device) -> torch.device:
        """The device with its index filled in.

        Raises:
            BackendUnavailableError: this machine has no such device.
        """
        return device

    def _graphs_supported(self) -> str | None:
        """Why this device cannot capture, or None if it can."""
        return 'no backend serves this machine; get_graphed_forward_cls("cpu") is the reference backend for CPUs'

    def _warmup_stream(self) -> AbstractContextManager[None]:
        """Runs its body where captures run, ordered after the work before it and before the work after it."""
        raise NotImplementedError

    def _sync_probe(self) -> AbstractContextManager[None]:
        """Makes an operator in its body that waits for the device raise HostSyncError, in this thread alone."""
        return HostSyncProbe(self.device.type)

    def _capture_graph(self, forward: Callable[[], Any]) -> tuple[Graph, Any]:
        """Runs ``forward`` once under capture.

        Returns:
            The graph, and the forward's outputs: static tensors that each replay overwrites.

        Raises:
            Exception: the capture failed; the platform is as it was before.
        """
        raise NotImplementedError

    def _is_capturing(self) -> bool:
        """Whether someone else captures the current stream, or one that a graph would have to wait for."""
        return False

    def _take_turn(self) -> None:
        """Orders the coming work on the current stream after the last work on the pool, whichever stream ran it. Called
        with the pool's lock held."""

    def _has_turn(self) -> bool:
        """Whether neither ``_is_capturing`` nor ``_take_turn`` has anything to say or do. Called with the pool's lock
        held, by each call that replays like the one before: True lets it pass by both of them. False is always right,
        and sends such calls down the whole road."""
        return False

    def _release_memory(self) -> None:
        """Gives memory back that graphs of the pool held and none holds any more. Called after many were dropped."""

    def _range(self, phase: str) -> AbstractContextManager[Any]:
        """A profiler range around one phase of a call; used on request only."""
        return nullcontext()
