"""Graphs as people make them by hand: captured once, their inputs copied, their outputs cloned.

On a CPU the operators that the reference backend records stand in for a device graph, so that all of this runs there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graphreplay import ReferenceGraphedForward

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """The kwargs of a call, and the tensors in them: code written for one forward knows where those are."""

    kwargs: dict[str, Any]
    tensors: list[Tensor]

    @classmethod
    def of(cls, kwargs: dict[str, Any]) -> Call:
        return cls(kwargs, leaves(kwargs))


def leaves(tree: Any) -> list[Tensor]:
    """The tensors in dicts, lists and tuples, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in leaves(part)]


def cloned(tree: Any) -> Any:
    """Dicts, lists and tuples with a clone of each tensor."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: cloned(part) for key, part in tree.items()}
    return type(tree)(cloned(part) for part in tree)


@dataclass(frozen=True)
class Captured:
    """A graph with memory of its own."""

    statics: list[Tensor]
    """What it reads."""
    result: Any
    """What it writes: a tensor, or several in containers."""
    replay: Callable[[], object]


def capture(forward: Forward, kwargs: dict[str, Any], device: torch.device) -> Captured:
    """Warms up and captures the forward on clones of the kwargs."""
    static = cloned(kwargs)
    if device.type == "cpu":
        recorded, result = ReferenceGraphedForward(forward, device=device)._capture_graph(lambda: forward(**static))
        return Captured(leaves(static), result, recorded.replay)
    side, current = _side(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):  # what libraries allocate at their first use must not become memory of the graph
        for _ in range(2):
            forward(**static)
    current.wait_stream(side)
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made, stream=side):
        result = forward(**static)
    return Captured(leaves(static), result, made.replay)


@cache
def _side() -> torch.cuda.Stream:
    """One stream for all captures, so that there is one cuBLAS workspace."""
    return torch.cuda.Stream()


class HandWrittenLoop:
    """The least that a call can do that takes its own inputs and gives its own outputs: no key, one shape, the tensors
    known beforehand."""

    def __init__(self, captured: Captured) -> None:
        self._statics, self._replay, self._result = captured.statics, captured.replay, captured.result
        self._single = isinstance(captured.result, Tensor)

    def __call__(self, tensors: list[Tensor]) -> Any:
        torch._foreach_copy_(self._statics, tensors)
        self._replay()
        return self._result.clone() if self._single else tuple(output.clone() for output in self._result)


class SeedStyleWrapper:
    """What people write by hand: a key over shapes and dtypes, a dict of graphs, one copy for each input, one clone for
    each output, and no checks."""

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward = forward
        self._device = device
        self._graphs: dict[Any, Captured] = {}

    def __call__(self, **kwargs: Any) -> Any:
        key = _key(kwargs)
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._graphs[key] = capture(self._forward, kwargs, self._device)
        for static, x in zip(captured.statics, leaves(kwargs), strict=True):
            static.copy_(x)
        captured.replay()
        return cloned(captured.result)


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if isinstance(value, dict):
        return tuple((name, _key(part)) for name, part in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(_key(part) for part in value)
    return value
