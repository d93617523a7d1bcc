"""Memory pools of graphs, under names that outlive torch's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch

from graphreplay import NotCopyableError
from graphreplay_cuda.errors import GraphStateError
from graphreplay_cuda.release import free_late

_lock = threading.RLock()
"""Reentrant: graphs are let go from any thread, and by the collector in the middle of letting another one go."""

_under_way: dict[tuple[int, int], list[Callable[[], None]]] = {}
"""Pools that a capture takes memory from, by torch's numbers, and what frees the graphs that left meanwhile.

torch ends the routing of memory by the pool's number alone, so it would take one capture for the other. And it counts a
graph from some point of its ``capture_begin`` on: one that left before that might be the last one, with which it drops
the pool.
"""


class PoolHandle(tuple[int, int]):
    """Names a memory pool that CUDAGraphs share.

    It is torch's number of the pool as well, as long as a graph is in it: torch drops a pool with its last graph and
    refuses its number from then on, and CUDAGraph then opens another one under the same handle.
    """

    def __init__(self, _: tuple[int, int]) -> None:
        self._number: tuple[int, int] = (self[0], self[1])
        self._gone = False
        self.graphs = 0
        """How many CUDAGraphs are in the pool."""

    def enter(self) -> tuple[int, int]:
        """torch's number of the pool, for one more graph, whose capture begins.

        Raises:
            GraphStateError: another capture into the pool is under way.
        """
        late: list[Callable[[], None]] = []
        with _lock:
            if _under_way.setdefault(self._number, late) is not late:
                raise GraphStateError("a capture into this pool is under way already; end it, or take another pool")
            # From here on no graph leaves, so that what is found now holds until torch counts the new one.
            if self._gone:
                del _under_way[self._number]
                self._number, self._gone = torch.cuda.graph_pool_handle(), False
                _under_way[self._number] = late
            self.graphs += 1
            return self._number

    def capture_over(self) -> None:
        """The capture that ``enter`` began has ended; the graph is still in the pool. Those that left it meanwhile are
        freed."""
        with _lock:
            late = _under_way.pop(self._number, [])
        if late:
            free_late(late)

    def leave(self, free: Callable[[], None]) -> None:
        """Frees a graph by ``free()``, with which it leaves the pool; while a capture into the pool is under way, at
        the end of that."""
        with _lock:
            late = _under_way.get(self._number)
            if late is not None:
                late.append(partial(self.leave, free))
                return
            try:
                free()
            finally:
                self.graphs -= 1
                self._gone = self.graphs == 0

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotCopyableError("a pool handle names a pool of this process; pass on the handle itself")
