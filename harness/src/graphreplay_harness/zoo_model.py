"""How a model of the zoo is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    """A module that others wrote, how it is called, and what is expected of it."""

    name: str
    made_of: str
    """The library's classes, in words, for the table."""
    build: Callable[[], Any]
    """Makes the module, small and on the CPU. Imports its library itself, so that one may be missing."""
    inputs: Callable[..., dict[str, Any]]
    """Draws the kwargs of a call from the numbers of a shape, on torch's default device."""
    shapes: tuple[tuple[int, ...], ...]
    eager: str = ""
    """A part of the reason why it runs eagerly; empty: it graphs."""
    note: str = ""
    """What a reader should know of the call or the reason, for the table."""
    training: bool = False
    """Called in training mode, without gradients."""
    eager_on_gpus: str = ""
    """A part of the reason on a GPU, if it is another one there, or if it runs eagerly there alone."""

    def why_eager(self, device_type: str) -> str:
        """A part of the reason why it runs eagerly there; empty: it graphs."""
        return self.eager if device_type == "cpu" else self.eager_on_gpus or self.eager

    def expected(self, device_type: str) -> str:
        return "eager" if self.why_eager(device_type) else "graphed"


class Method(nn.Module):
    """A method of a module other than its forward."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module = module
        self.name = name

    def forward(self, **kwargs: Any) -> Any:
        return getattr(self.module, self.name)(**kwargs)


def tokens(batch: int, length: int, vocabulary: int = 97) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def padding(batch: int, length: int) -> Tensor:
    """A mask of the usual two dimensions, int64, as a tokenizer makes it: 1 for tokens, 0 for the padding after them.

    How much is padding differs from call to call, as a graph must not freeze it.
    """
    lengths = torch.randint(1, length, (batch, 1))
    return (torch.arange(length) < lengths).long()


def ready_mask(batch: int, length: int, *, causal: bool = False) -> Tensor:
    """The same mask in four dimensions, boolean: True where a query may look at a key."""
    mask = padding(batch, length)[:, None, None, :].bool().expand(batch, 1, length, length)
    return mask.tril() if causal else mask.contiguous()
