"""Memory pools of graphs, under names that outlive torch's."""

from __future__ import annotations

import threading

import torch


class PoolHandle(tuple[int, int]):
    """Names a memory pool, for CUDAGraph and for torch alike.

    torch drops a pool with its last graph and refuses its number from then on; CUDAGraph then opens another one under
    the same handle.
    """

    def __init__(self, _: tuple[int, int]) -> None:
        self._number: tuple[int, int] = (self[0], self[1])
        self._graphs = 0
        self._gone = False
        self._lock = threading.Lock()  # graphs are let go from any thread

    def enter(self) -> tuple[int, int]:
        """torch's number of the pool, for one more graph."""
        with self._lock:
            if self._gone:
                self._number, self._gone = torch.cuda.graph_pool_handle(), False
            self._graphs += 1
            return self._number

    def leave(self) -> None:
        """One graph is gone."""
        with self._lock:
            self._graphs -= 1
            self._gone = self._graphs == 0

    @property
    def graphs(self) -> int:
        """How many CUDAGraphs are in the pool."""
        return self._graphs
