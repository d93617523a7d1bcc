"""Comparing kwargs trees leaf by leaf: an account of tree equality that shares no code with the library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class NoOperators(TorchDispatchMode):
    """Fails on every operator: within it nothing is allocated, copied or read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran")


def children(node: Any) -> list[tuple[Any, Any]]:
    """The named children of a container in the order in which it holds them; empty for a leaf."""
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, list) or (isinstance(node, tuple) and not isinstance(node, torch.Size)):
        return list(enumerate(node))
    if is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in fields(node)]
    return []


def tensor_leaves(node: Any) -> Iterator[Tensor]:
    """The tensors of a tree, in the order in which its containers hold them."""
    if isinstance(node, Tensor):
        yield node
    for _, child in children(node):
        yield from tensor_leaves(child)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The values of a tensor, bit by bit, in the order of its elements."""
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
    dense.copy_(tensor.detach().reshape(-1))
    return bytes(dense.view(torch.uint8).tolist())


def same_value(a: Any, b: Any) -> bool:
    """Whether two leaves that are no tensors are equal in exact type and value, the sign of zero included."""
    return type(a) is type(b) and (a is b or (repr(a) == repr(b) and (a == b or (a != a and b != b))))


def same_structure(a: Any, b: Any, *, values: bool = False, order: bool = False) -> bool:
    """Whether one graph can serve both trees: all but the values of tensors and the order of plain dicts is equal.

    Args:
        values: the values of tensors count too, bit by bit.
        order: the order of plain dicts counts too.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        layouts = [(t.shape, t.stride(), t.dtype, t.device) for t in (a, b)]
        return layouts[0] == layouts[1] and (not values or tensor_bytes(a) == tensor_bytes(b))
    if type(a) is not type(b):
        return False
    ours, theirs = children(a), children(b)
    if not ours and not theirs:
        return _is_empty(a) or same_value(a, b)
    if type(a) is dict and not order:
        ours, theirs = sorted(ours, key=_by_key), sorted(theirs, key=_by_key)
    return len(ours) == len(theirs) and all(
        _same_key(i, j) and same_structure(x, y, values=values, order=order)
        for (i, x), (j, y) in zip(ours, theirs, strict=True)
    )


def sharing(tree: Any) -> list[tuple[int, int]]:
    """For each tensor of a tree, the first tensor over the same storage, and its distance from that one in bytes."""
    first: dict[int, tuple[int, int]] = {}
    pattern = []
    for position, tensor in enumerate(tensor_leaves(tree)):
        offset = int(tensor.storage_offset() * tensor.element_size())
        start, origin = first.setdefault(tensor.untyped_storage()._cdata, (position, offset))
        pattern.append((start, offset - origin))
    return pattern


def _is_empty(node: Any) -> bool:
    return isinstance(node, dict | list) or (isinstance(node, tuple) and not isinstance(node, torch.Size))


def _by_key(item: tuple[Any, Any]) -> str:
    return f"{type(item[0]).__qualname__} {item[0]!r}"


def _same_key(a: Any, b: Any) -> bool:
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(map(_same_key, a, b))
    return same_value(a, b)
