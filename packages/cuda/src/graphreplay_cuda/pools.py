"""Memory pools of graphs, under names that outlive torch's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

import torch

from graphreplay import NotCopyableError
from graphreplay_cuda.errors import GraphStateError

_lock = threading.Lock()
_under_way: set[tuple[int, int]] = set()
"""Pools that a capture takes memory from. torch ends the routing of memory by the pool's number alone, so it would take
one capture for the other."""


class PoolHandle(tuple[int, int]):
    """Names a memory pool that CUDAGraphs share.

    It is torch's number of the pool as well, as long as a graph is in it: torch drops a pool with its last graph and
    refuses its number from then on, and CUDAGraph then opens another one under the same handle.
    """

    def __init__(self, _: tuple[int, int]) -> None:
        self._number: tuple[int, int] = (self[0], self[1])
        self._gone = False
        # Graphs are let go from any thread, and by the collector in the middle of letting another one go.
        self._lock = threading.RLock()
        self.graphs = 0
        """How many CUDAGraphs are in the pool."""

    def enter(self) -> tuple[int, int]:
        """torch's number of the pool, for one more graph, whose capture begins.

        Raises:
            GraphStateError: another capture into the pool is under way.
        """
        with self._lock:
            if self._gone:
                self._number, self._gone = torch.cuda.graph_pool_handle(), False
            with _lock:
                if self._number in _under_way:
                    raise GraphStateError("a capture into this pool is under way already; end it, or take another pool")
                _under_way.add(self._number)
            self.graphs += 1
            return self._number

    def capture_over(self) -> None:
        """The capture that ``enter`` began has ended; the graph is still in the pool."""
        with _lock:
            _under_way.discard(self._number)

    def leave(self, free: Callable[[], None]) -> None:
        """Frees a graph by ``free()``, with which it leaves the pool."""
        with self._lock:
            try:
                free()
            finally:
                self.graphs -= 1
                self._gone = self.graphs == 0

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotCopyableError("a pool handle names a pool of this process; pass on the handle itself")
