"""Memory and turns that the graphs of one or more wrappers share."""

from __future__ import annotations

from typing import Any

import torch

from graphreplay.errors import ConfigurationError
from graphreplay.locks import Locked


class GraphPool(Locked):
    """One pool of graph memory. Wrappers that are never in flight at once (an encoder and a DiT, say) may share one.

    Graphs of a pool reuse each other's intermediate memory, so they run one after another: the pool's lock and its
    backend see to that, from any thread and any stream. Pass ``pool=GraphPool()`` to each wrapper; all must be on the
    same device. Without it every wrapper has a pool of its own.
    """

    def __init__(self) -> None:
        super().__init__()
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
