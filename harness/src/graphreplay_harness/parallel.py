"""Modules whose forward talks to other ranks, for tests of graphs that hold collectives. For inference only: gradients
do not pass through the collectives.

Every rank builds the same weights from the same seed, as many as one rank alone would; what a rank does not need, it
drops afterwards. Nothing waits for the device on the host, and no Python decision depends on a tensor's values.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention


class UlyssesAttention(nn.Module):
    """Self-attention over a sequence of which each rank holds a piece.

    One all-to-all trades pieces of the sequence for heads, so that each rank attends over the whole sequence with
    heads / ranks of the heads, and a second one trades back. Every rank holds all weights.
    """

    def __init__(self, dim: int, heads: int, group: dist.ProcessGroup | None = None) -> None:
        """Without a group this is the only rank, and there are no collectives. Heads must divide among the ranks."""
        super().__init__()
        self.group = group
        self.rank, self.ranks = _place(group)
        if dim % heads or heads % self.ranks:
            raise ValueError(f"a width of {dim} among {heads} heads among {self.ranks} ranks does not come out even")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, *, x: Tensor, lengths: tuple[int, ...] | None = None) -> Tensor:
        """Attends from this rank's piece to the whole sequence.

        Args:
            x: [batch, local, dim], this rank's piece; the pieces follow each other in the order of the ranks.
            lengths: how long each rank's piece is, the same on every rank; None: all are as long as this one.

        Returns:
            [batch, local, dim].
        """
        batch, local, dim = x.shape
        equal = (local,) * self.ranks
        if lengths is None:
            lengths = equal
        if len(lengths) != self.ranks or lengths[self.rank] != local:
            raise ValueError(f"rank {self.rank} of {self.ranks} has a piece of {local}, but lengths={lengths}")
        few = self.heads // self.ranks
        width = dim // self.heads

        # What goes to one rank has to lie together: the heads' owners come first, then the sequence.
        qkv = self.qkv(x).view(batch, local, 3, self.ranks, few, width).permute(3, 1, 0, 2, 4, 5)
        qkv = self._exchange(qkv.reshape(self.ranks * local, batch, 3, few, width), equal, lengths)
        q, k, v = qkv.permute(2, 1, 3, 0, 4)  # from [sequence, batch, 3, few, width] to [batch, few, sequence, width]
        y = scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3)

        y = self._exchange(y, lengths, equal).view(self.ranks, local, batch, few, width)
        merged: Tensor = self.out(y.permute(2, 1, 0, 3, 4).reshape(batch, local, dim))
        return merged

    def _exchange(self, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
        """Sends this many rows to each rank, and returns those that each rank sends here, in the order of the ranks.

        Args:
            rows: [sum(send), ...], with any strides.

        Returns:
            [sum(receive), ...], contiguous.
        """
        rows = rows.contiguous()
        if self.group is None:
            return rows
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows, list(receive), list(send), group=self.group)
        return received


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(dim, hidden)
        self.second = nn.Linear(hidden, dim)

    def forward(self, *, x: Tensor) -> Tensor:
        """From [..., dim] to [..., dim], each position by itself."""
        y: Tensor = self.second(gelu(self.first(x)))
        return y


def shard_of(full: MLP, rank: int, ranks: int) -> MLP:
    """The rank's equal share of the hidden units, with weights of its own.

    The second bias belongs to no hidden unit: each share has all of it, and whoever adds the shares up adds it once.
    """
    dim, hidden = full.first.in_features, full.first.out_features
    if hidden % ranks:
        raise ValueError(f"{hidden} hidden units do not divide among {ranks} ranks")
    with torch.device("meta"):  # no draws from the random generators
        shard = MLP(dim, hidden // ranks)
    mine = slice(rank * hidden // ranks, (rank + 1) * hidden // ranks)
    weights = full.state_dict()
    cut = {
        "first.weight": weights["first.weight"][mine],
        "first.bias": weights["first.bias"][mine],
        "second.weight": weights["second.weight"][:, mine],
        "second.bias": weights["second.bias"],
    }
    copies = {name: weight.clone(memory_format=torch.contiguous_format) for name, weight in cut.items()}
    shard.load_state_dict(copies, assign=True)
    return shard


class ParallelMLP(nn.Module):
    """An MLP whose hidden units are spread over the ranks: column-parallel, row-parallel, then a sum over the ranks.

    Every rank has to be given the same input. It takes no pieces of a sequence, as Block has them: the sum would mix
    positions that have nothing to do with each other.
    """

    def __init__(self, dim: int, hidden: int, group: dist.ProcessGroup | None = None) -> None:
        """Without a group this is the only rank, and there are no collectives."""
        super().__init__()
        self.group = group
        self.shard = shard_of(MLP(dim, hidden), *_place(group))

    def forward(self, *, x: Tensor) -> Tensor:
        """From [..., dim] to [..., dim], both the same on every rank."""
        y = linear(gelu(self.shard.first(x)), self.shard.second.weight)
        if self.group is not None:
            dist.all_reduce(y, group=self.group)
        return y + self.shard.second.bias


class Block(nn.Module):
    """A transformer block on this rank's piece of a sequence: attention and an MLP, each normed before and added on.

    The MLP is the plain one, with all weights on every rank: it works on each position by itself, and needs nothing of
    other pieces. A ParallelMLP would need the same positions on every rank.
    """

    def __init__(self, dim: int, heads: int, hidden: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = UlyssesAttention(dim, heads, group)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = MLP(dim, hidden)

    def forward(self, *, x: Tensor, lengths: tuple[int, ...] | None = None) -> Tensor:
        """From [batch, local, dim] to [batch, local, dim]; lengths as in UlyssesAttention."""
        x = x + self.attention(x=self.attention_norm(x), lengths=lengths)
        y: Tensor = x + self.mlp(x=self.mlp_norm(x))
        return y


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in the group, and how many there are."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
