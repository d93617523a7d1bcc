"""Static copies of kwargs: the tensors whose addresses a graph keeps, and how the next call's values reach them."""

from __future__ import annotations

from typing import Any

import torch

from graphreplay.errors import TreeMismatchError
from graphreplay.signature import describe_difference, differences, flatten, is_tensor_node
from graphreplay.storage import CopyPlan, sharing_pattern, storage_ids
from graphreplay.tree import check_rebuilt, path_of, replace_tensors, tensors


def clone_static(tree: Any, root: str = "kwargs") -> Any:
    """A copy of a kwargs tree whose tensors have storage of their own.

    Shapes, strides, dtypes, devices and the sharing of storage among the tree's tensors stay as they are; parameters
    become plain tensors, and no copy requires grad. Containers are rebuilt as the exact type; values and dataclasses
    without tensors are passed on as the same objects. The copies are ordinary tensors also under inference mode, so
    that ``copy_into`` works anywhere.

    Raises:
        UnsupportedLeafError: a leaf may hide a tensor or cannot be copied. The error names its path, and nothing was
            copied.
    """
    leaves = tensors(tree, root)
    with torch.inference_mode(False), torch.no_grad():
        copies = CopyPlan(leaves).clone(leaves)
    static = replace_tensors(tree, iter(copies))
    check_rebuilt(static, copies, root)
    return static


def copy_into(static: Any, current: Any, root: str = "kwargs") -> int:
    """Copies the tensor values of ``current`` onto ``static``, in place.

    Args:
        static: a tree from ``clone_static``.
        current: a tree of the same structure. Strides and devices of its tensors may differ.

    Returns:
        How many tensors were copied.

    Raises:
        TreeMismatchError: the trees differ in a container, a name, a value, a shape or a dtype, or in which tensors
            share storage and how. The error names the first such place, and nothing was copied.
        UnsupportedLeafError: a leaf of ``current`` may hide a tensor.
    """
    tensors(current, root)  # refuses leaves that have a key but no values to copy
    static_key, into = flatten(static, root)
    current_key, source = flatten(current, root)
    for path, was, now in differences(static_key, current_key, root):
        # A copy converts strides and devices; all else would change what the static tree means.
        movable = is_tensor_node(was) and is_tensor_node(now) and was[0] == now[0] and was[2] == now[2]
        if not movable:
            raise TreeMismatchError(path, describe_difference(was, now))
    if sharing_pattern(into, storage_ids(into)) != sharing_pattern(source, storage_ids(source)):
        raise TreeMismatchError(root, "other tensors share storage than in the static tree")
    plan = CopyPlan(into)
    if plan.has_regions and static_key != current_key:
        raise TreeMismatchError(root, "tensors that share or overlap must keep their strides")
    position = plan.uncopyable(source)
    if position is not None:
        raise TreeMismatchError(
            path_of(source[position], current, root),
            "lazily conjugated or negated while sharing or overlapping storage, unlike in the static tree; "
            "call .resolve_conj().resolve_neg() on it first",
        )
    with torch.no_grad():
        plan.copy(into, source)
    return len(into)
