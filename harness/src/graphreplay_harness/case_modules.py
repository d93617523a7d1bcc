"""The forwards of the cases, small enough to tell what ran: one without collectives and one with two."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn


class Plain(nn.Module):
    """Two linear layers, no collectives."""

    def __init__(self, group: dist.ProcessGroup, dim: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, *, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out


class SharedMean(nn.Module):
    """Two linear layers, after each of which every token takes in the mean of all tokens on all ranks. How many tokens
    a rank has is its own business."""

    between = "second"
    """The submodule that starts between the two collectives."""

    def __init__(self, group: dist.ProcessGroup, dim: int = 8) -> None:
        super().__init__()
        self.group = group
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, *, x: Tensor) -> Tensor:
        return self._shared(self.second(self._shared(self.first(x)).relu()))

    def _shared(self, x: Tensor) -> Tensor:
        total = x.mean(1, keepdim=True)
        dist.all_reduce(total, group=self.group)
        return x + total
