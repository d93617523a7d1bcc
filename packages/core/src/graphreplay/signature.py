"""The key of a call: equal for two kwargs trees exactly if one graph can serve both.

Tensors count by shape, strides, dtype and device; values by exact type and value; containers by exact type and names.
Tensor values, ``requires_grad`` and the sharing of storage among tensors are left to others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from graphreplay.containers import Container, container_of
from graphreplay.errors import UnsupportedLeafError
from graphreplay.tree import MAX_CONTAINERS, MAX_DEPTH, check_size, walk
from graphreplay.values import PLAIN_TYPES, Refused, Token, leaf_token, name_tokens, source_of, value_token


class Signature(tuple[Any, ...]):
    """A hashable key. Compare and hash it, or give two of them to ``explain``; its layout is private.

    Nodes are ``(shape, strides, dtype, device)`` for a tensor, ``(type, value…)`` for a value, and
    ``(type, names, children[, insertion order])`` for a container.
    """

    __slots__ = ()


class _Flattening:
    """Collects tensor leaves while a key is built."""

    __slots__ = ("containers_left", "leaves", "on_device", "ordered_below")

    def __init__(self, ordered_below: int, on_device: bool) -> None:
        self.leaves: list[Tensor] = []
        self.ordered_below = ordered_below
        self.on_device = on_device
        self.containers_left = MAX_CONTAINERS

    def node(self, obj: Any, depth: int) -> Token:
        return self.nodes((obj,), depth)[0]

    def nodes(self, values: Iterable[Any], depth: int) -> list[Token]:
        # The one loop that every call of a graphed forward runs over its kwargs: leaves are handled in place.
        nodes: list[Token] = []
        add, leaf, strided, on_device = nodes.append, self.leaves.append, torch.strided, self.on_device
        for obj in values:
            cls = type(obj)
            if cls is Tensor or cls is Parameter:
                if obj.layout is not strided:
                    raise Refused(f"a tensor of layout {obj.layout} has no strides to key")
                if on_device and is_host_scalar(obj):
                    add((Tensor, (obj.dtype, value_token(obj.item()))))
                    continue
                leaf(obj)
                add((obj.shape, obj.stride(), obj.dtype, obj.device))
            elif cls in PLAIN_TYPES or (cls is float and obj and obj == obj):
                add((cls, obj))
            else:
                container = container_of(cls)
                add(leaf_token(obj) if container is None else self.container(container, obj, depth))
        return nodes

    def container(self, container: Container, obj: Any, depth: int) -> Token:
        self.containers_left -= 1
        check_size(depth, self.containers_left)
        names, tokens, values = container.children(obj)
        children = tuple(self.nodes(values, depth + 1))
        if depth >= self.ordered_below and type(obj) is dict:
            keys = tuple(obj)
            inserted = keys if tokens is names else name_tokens(keys)
            if inserted != tokens:
                return (dict, tokens, children, inserted)
        return (type(obj), tokens, children)


def is_host_scalar(tensor: Tensor) -> bool:
    """Whether a tensor, among the inputs of a device, is a number that operators read on the host."""
    return tensor.is_cpu and tensor.dim() == 0


def flatten(
    tree: Any, root: str = "kwargs", *, ordered_below: int = MAX_DEPTH, on_device: bool = False
) -> tuple[Signature, list[Tensor]]:
    """The key of a tree and its tensor leaves, in the order of ``tree.walk``.

    Args:
        ordered_below: from this depth on (0: the tree itself) the insertion order of dicts is keyed too, since a
            forward that iterates over one can see it.
        on_device: the tree is for a device other than the CPU, so CPU scalars are keyed by value and are no leaves: a
            kernel takes their value at launch, which a graph would freeze.

    Raises:
        UnsupportedLeafError: a node has no stable key; the error names its path.
    """
    flattening = _Flattening(ordered_below, on_device)
    try:
        return Signature(flattening.node(tree, 0)), flattening.leaves
    except (Refused, RuntimeError) as error:
        # Sparse and nested tensors raise a RuntimeError when asked for strides. The slow walk finds the path.
        for _ in walk(tree, root):
            pass
        raise UnsupportedLeafError(root, str(error)) from error


def kwargs_signature(tree: Any) -> Signature:
    """The hashable key of a kwargs tree.

    Two trees have equal keys exactly if they have the same containers (by exact type), the same names (dicts in any
    insertion order), the same values (by exact type and value; 0.0 and -0.0 differ, one NaN equals the next) and
    tensors of the same shape, strides, dtype and device. Tensor values do not count, and an ``nn.Parameter`` counts
    as a plain tensor. Quantized and meta tensors have a key too, though ``clone_static`` refuses them.

    Raises:
        UnsupportedLeafError: a node may hide a tensor or has no stable value; the error names its path.
    """
    return flatten(tree)[0]


def explain(a: Any, b: Any, root: str = "kwargs") -> str | None:
    """The first leaf in which two kwargs trees (or their signatures) differ, or None if one graph serves both.

    Returns:
        A line such as ``kwargs["x"]: shape (1, 207, 64) became (1, 198, 64)``.

    Raises:
        UnsupportedLeafError: as ``kwargs_signature``.
    """
    found = differences(_signed(a), _signed(b), root)
    return next((f"{path}: {describe_difference(was, now)}" for path, was, now in found), None)


def _signed(tree: Any) -> Signature:
    return tree if type(tree) is Signature else kwargs_signature(tree)


def differences(a: Token, b: Token, path: str = "kwargs") -> Iterator[tuple[str, Token, Token]]:
    """Every place in which two signatures differ: its path, and the nodes of both."""
    if a == b:
        return
    if _is_container(a) and _is_container(b) and a[:2] == b[:2] and a[3:] == b[3:] and len(a[2]) == len(b[2]):
        for name, was, now in zip(_child_names(a), a[2], b[2], strict=True):
            yield from differences(was, now, path + name)
        return
    yield path, a, b


def describe_difference(was: Token, now: Token) -> str:
    """What changed between two nodes of signatures that differ."""
    if is_tensor_node(was) and is_tensor_node(now):
        labels = ("shape", "strides", "dtype", "device")
        changes = [(label, a, b) for label, a, b in zip(labels, was, now, strict=True) if a != b]
        if changes[0][0] == "shape":  # which changes the strides as well
            changes = [change for change in changes if change[0] != "strides"]
        return ", ".join(f"{label} {_show(a)} became {_show(b)}" for label, a, b in changes)
    if _is_container(was) and _is_container(now) and was[0] is now[0]:
        before, after = _child_names(was), _child_names(now)
        gone, new = [n for n in before if n not in after], [n for n in after if n not in before]
        changed = [f"lost {', '.join(gone)}"] * bool(gone) + [f"gained {', '.join(new)}"] * bool(new)
        return f"{was[0].__name__} {' and '.join(changed) or 'has the same names in another order or type'}"
    return f"{_describe(was)} became {_describe(now)}"


def is_tensor_node(node: Token) -> bool:
    """Whether a node stands for a tensor: then it is (shape, strides, dtype, device)."""
    return not isinstance(node[0], type)


def is_value_node(node: Token) -> bool:
    """Whether a node stands for a value: then it is its token."""
    return not is_tensor_node(node) and not _is_container(node)


def _is_container(node: Token) -> bool:
    return len(node) >= 3 and isinstance(node[2], tuple) and not is_tensor_node(node)


def _child_names(node: Token) -> list[str]:
    container = container_of(node[0])
    assert container is not None
    names = range(len(node[2])) if node[1] is None else node[1]
    return [container.accessor(name) for name in names]


def _describe(node: Token) -> str:
    if is_tensor_node(node):
        shape, _, dtype, device = node
        return f"a tensor {_show(shape)} of {dtype} on {device}"
    if _is_container(node):
        return f"a {node[0].__name__} of {len(node[2])}"
    if node[0] is Tensor:
        dtype, token = node[1]
        return f"a CPU scalar {_text(token)} of {dtype}"
    name, text = node[0].__name__, _text(node)
    return text if node[0] is type(None) or name in text else f"{name} {text}"


def _text(token: Token) -> str:
    """A value in a few words; explaining must never raise, however large or odd the value is."""
    try:
        text = source_of(token)
    except Exception:
        return f"a {token[0].__name__} without a text"
    return text if len(text) <= 200 else f"{text[:200]}…"


def _show(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, tuple) else str(value)
