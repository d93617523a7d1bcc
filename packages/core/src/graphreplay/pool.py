"""Memory and turns that the graphs of one or more wrappers share."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet

import torch

from graphreplay.errors import ConfigurationError

_pools: WeakSet[GraphPool] = WeakSet()


def _free_locks() -> None:
    """In the child of a fork, where no thread is left that could let go of a lock."""
    for pool in _pools:
        pool.lock = threading.RLock()


os.register_at_fork(after_in_child=_free_locks)


class GraphPool:
    """One pool of graph memory. Wrappers that are never in flight at once (an encoder and a DiT, say) may share one.

    Graphs of a pool reuse each other's intermediate memory, so they run one after another: the pool's lock and its
    backend see to that, from any thread and any stream. Pass ``pool=GraphPool()`` to each wrapper; all must be on the
    same device. Without it every wrapper has a pool of its own.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _pools.add(self)
        self.device: torch.device | None = None
        self.ranks: list[int] | None = None
        self.backend: Any = None
        """What the backend keeps here: its pool handle, its capture stream, who ran last."""
        self.lends = False
        """Whether callers may hold memory of graphs, which any replay may overwrite: from then on nothing can run
        eagerly that has been replayed, since its kwargs may be gone."""

    def bind(self, device: torch.device, ranks: list[int] | None = None) -> None:
        """Ties the pool to a device, and to the ranks of a group.

        Raises:
            ConfigurationError: it is tied to others already. Wrappers of one pool take turns; on two groups, those of
                two ranks could wait for each other's turn for ever.
        """
        with self.lock:
            if self.device not in (None, device):
                raise ConfigurationError(f"this pool belongs to {self.device}; make another one for {device}")
            if ranks is not None and self.ranks not in (None, ranks):
                raise ConfigurationError(f"this pool belongs to the ranks {self.ranks}; make another one for {ranks}")
            self.device = device
            self.ranks = ranks if self.ranks is None else self.ranks
