"""Graphs of GraphedForward: how they run, and how they are let go."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from graphreplay.entry import Launch, launch_between
from graphreplay_xpu.pools import PoolMemory, is_capturing

kept_graphs: list[torch.xpu.XPUGraph] = []
"""Graphs that must not be destroyed: torch still points to them, their replays could not be waited for, or this
is a forked child without a device."""


class CapturedForward:
    """The graph of one forward.

    Args:
        captured: the graph, whose memory is in ``memory``.
        device: where it was captured.
        nbytes: what it added to its pool.
    """

    def __init__(self, captured: torch.xpu.XPUGraph, memory: PoolMemory, device: torch.device, nbytes: int) -> None:
        self.nbytes = nbytes
        self._graph: torch.xpu.XPUGraph | None = captured
        self._memory = memory
        self._device = device
        self._process = os.getpid()
        self._last_stream: torch.xpu.Stream | None = None
        self._replayed = torch.xpu.Event()

    def staging(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Launch:
        return launch_between(self._replay, inputs, outputs)

    def _replay(self) -> None:
        assert self._graph is not None
        stream = torch.xpu.current_stream(self._device)
        self._graph.replay()
        self._replayed.record(stream)
        self._last_stream = stream

    def reset(self) -> None:
        """Waits for replays in flight, on their stream alone, and frees the graph."""
        graph, self._graph = self._graph, None
        if graph is None or sys.is_finalizing():
            return
        if self._process != os.getpid():
            kept_graphs.append(graph)
            return
        self._memory.leave(lambda: self._free(graph))

    def _free(self, graph: torch.xpu.XPUGraph) -> None:
        stream = self._last_stream
        if stream is not None:
            try:
                if not is_capturing(stream):
                    self._replayed.record(stream)  # once more: what a call copied out came after its graph's replay
                self._replayed.synchronize()
            except BaseException:
                kept_graphs.append(graph)  # a replay may still run, and its destructor would not wait either
                raise
        graph.reset()
