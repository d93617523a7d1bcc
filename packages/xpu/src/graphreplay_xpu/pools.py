"""What a GraphPool keeps on an XPU device: memory, and the stream that its captures run on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

one_at_a_time = threading.RLock()
"""Held by whoever warms up or captures. Captures of one process share the state of the random generator, and torch
hands out 32 streams in turn, so that two pools may have the same one: what one of them warms up with would go into the
graph that the other one captures."""


class PoolMemory:
    """torch's memory pool under the graphs of a GraphPool. torch drops a pool with its last graph, so that the next one
    opens another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # graphs are let go from any thread
        self._graphs = 0
        self._handle: Any = None  # torch has a type of its own for it

    def enter(self) -> Any:
        """torch's handle of the pool, for one more graph, whose capture begins."""
        with self._lock:
            if self._graphs == 0:
                self._handle = torch.xpu.graph_pool_handle()
            self._graphs += 1
            return self._handle

    def leave(self, free: Callable[[], None]) -> None:
        """Frees a graph by ``free()``, with which it leaves the pool."""
        with self._lock:
            try:
                free()
            finally:
                self._graphs -= 1


class PoolState:
    """What a GraphPool keeps for this backend."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.renew()
        self.last_stream = torch.xpu.current_stream(device)
        """Where the pool's latest work was put."""

    def renew(self) -> None:
        """Has later captures run on another stream and in other memory."""
        self.memory = PoolMemory()
        # Warm-ups run here too, so that whatever libraries allocate at a stream's first use is no memory of a graph.
        self.capture_stream = torch.xpu.Stream(self.device)

    @contextmanager
    def side(self) -> Iterator[None]:
        """Runs its body on the capture stream, ordered after the work before it and before the work after it."""
        with one_at_a_time:
            side, current = self.capture_stream, torch.xpu.current_stream(self.device)
            side.wait_stream(current)
            try:
                with torch.xpu.stream(side):
                    yield
            finally:
                current.wait_stream(side)

    @property
    def blocked(self) -> bool:
        """Whether someone else captures the stream of the latest work, so that nothing can wait for it."""
        return torch.xpu.current_stream(self.device) != self.last_stream and is_capturing(self.last_stream)


def is_capturing(stream: torch.xpu.Stream) -> bool:
    """Whether a stream is being captured."""
    with torch.xpu.stream(stream):
        return torch.xpu.is_current_stream_capturing()
