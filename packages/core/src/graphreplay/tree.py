"""Trees of kwargs and outputs: walking, collecting and replacing what they hold.

Three kinds of node exist:

* a tensor (``torch.Tensor`` or ``nn.Parameter``, no other subclass);
* a value: something with an exact type and a stable, hashable token (values.py);
* a container of such nodes (containers.py).

Anything else is refused, since it may hide a tensor or change without showing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from graphreplay.containers import container_of
from graphreplay.errors import UnsupportedLeafError
from graphreplay.storage import is_freed
from graphreplay.values import ONLY_STR, Refused, leaf_token

MAX_DEPTH = 64
"""Containers nest no deeper than this, so that a cycle ends in an error and not in a recursion crash."""

MAX_CONTAINERS = 100_000
"""A tree holds no more containers than this, so that subtrees shared many times over end in an error too."""

TENSOR_TYPES = frozenset({Tensor, Parameter})


def walk(tree: Any, root: str = "kwargs") -> Iterator[tuple[str, Any]]:
    """Yields every leaf with its path, tensors and values alike, in the order of all other functions here.

    Raises:
        UnsupportedLeafError: at the first node that is refused, with its path.
    """
    return _visit(tree, root, 0, [MAX_CONTAINERS])


# Functions of the module and not closures: one that names itself is a cycle, which keeps tensors until a collection.
def _visit(obj: Any, path: str, depth: int, budget: list[int]) -> Iterator[tuple[str, Any]]:
    try:
        container = container_of(type(obj))
        if container is None:
            _check_leaf(obj)
            yield path, obj
            return
        budget[0] -= 1
        check_size(depth, budget[0])
        _, names, values = container.children(obj)
    except Refused as refusal:
        raise UnsupportedLeafError(path, str(refusal)) from None
    for name, value in zip(range(len(values)) if names is None else names, values, strict=True):
        yield from _visit(value, path + container.accessor(name), depth + 1, budget)


def check_size(depth: int, containers_left: int) -> None:
    if depth >= MAX_DEPTH:
        raise Refused(f"nested deeper than {MAX_DEPTH} containers; does the tree contain itself?")
    if containers_left < 0:
        raise Refused(f"the tree holds more than {MAX_CONTAINERS} containers")


def _check_leaf(obj: Any) -> None:
    if type(obj) in TENSOR_TYPES:
        _check_tensor(obj)
    else:
        leaf_token(obj)


def _check_tensor(tensor: Tensor) -> None:
    if tensor.is_nested:
        raise Refused("a nested tensor; pass a padded tensor, or values and offsets")
    if tensor.layout is not torch.strided:
        raise Refused(f"a tensor of layout {tensor.layout}; only strided tensors have a static copy")
    if tensor.is_quantized:
        raise Refused("a quantized tensor; pass its integer values and scale")
    if not tensor.is_meta and is_freed(tensor):
        raise Refused("a tensor whose storage was resized to nothing; bring its values back first")
    if tensor.is_meta:
        raise Refused("a meta tensor; it has no values to copy")


def tensors(tree: Any, root: str = "kwargs") -> list[Tensor]:
    """The tensor leaves, in the order of ``walk``. Raises UnsupportedLeafError as ``walk`` does."""
    return [leaf for _, leaf in walk(tree, root) if type(leaf) in TENSOR_TYPES]


def path_of(leaf: Any, tree: Any, root: str = "kwargs") -> str:
    """The path of a leaf that is known to be in the tree."""
    return next(path for path, other in walk(tree, root) if other is leaf)


def replace_tensors(tree: Any, new: Iterator[Tensor], *, share_records: bool = True) -> Any:
    """The tree rebuilt with each tensor leaf taken from ``new``, in the order of ``walk``.

    Args:
        share_records: pass dataclasses without tensors on as the same objects, and do not rebuild them.
    """
    return _replace(tree, _Feed(new), share_records)


class _Feed:
    """Hands tensors out and counts them."""

    def __init__(self, tensors: Iterator[Tensor]) -> None:
        self._tensors = tensors
        self.taken = 0

    def next(self) -> Tensor:
        self.taken += 1
        return next(self._tensors)


def _replace(obj: Any, feed: _Feed, share_records: bool) -> Any:
    cls = type(obj)
    if cls in TENSOR_TYPES:
        return feed.next()
    container = container_of(cls)
    if container is None:
        return obj
    _, _, values = container.children(obj)
    before = feed.taken
    rebuilt = [_replace(value, feed, share_records) for value in values]
    return obj if share_records and container.is_record and feed.taken == before else container.rebuild(obj, rebuilt)


def rebuilder(tree: Any) -> Callable[[Sequence[Tensor]], Any]:
    """``replace_tensors(tree, iter(new), share_records=False)`` as a function of ``new``, for many calls: of the trees
    that most forwards return, a tensor or a flat container of tensors, a constructor call is left of it."""
    cls = type(tree)
    if cls in TENSOR_TYPES:
        return itemgetter(0)
    if cls in (list, tuple) and set(map(type, tree)) <= TENSOR_TYPES:
        build: Callable[[Sequence[Tensor]], Any] = cls
        return build
    if cls is dict and set(map(type, tree)) == ONLY_STR and set(map(type, tree.values())) <= TENSOR_TYPES:
        names = tuple(sorted(tree))  # the order of walk
        if names == tuple(tree):
            return lambda new: dict(zip(names, new, strict=True))
    return lambda new: replace_tensors(tree, iter(new), share_records=False)


def check_rebuilt(rebuilt: Any, leaves: Sequence[Tensor], root: str = "kwargs") -> None:
    """Raises UnsupportedLeafError if a tree that was rebuilt with these tensors holds others: some classes change what
    they are given."""
    found = list(walk(rebuilt, root))
    for (path, leaf), given in zip(((p, x) for p, x in found if type(x) in TENSOR_TYPES), leaves, strict=False):
        if leaf is not given:
            raise UnsupportedLeafError(path, "a container around it changes what it is built with")
