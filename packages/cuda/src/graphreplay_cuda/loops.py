"""A loop whose end the device decides on, as a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphreplay import CaptureError, TreeMismatchError, UnsupportedLeafError
from graphreplay.capture import capturing_here
from graphreplay.hostsync import host_sync_allowed
from graphreplay.signature import describe_difference, differences, flatten, is_tensor_node
from graphreplay.storage import storage_ids
from graphreplay.tree import replace_tensors, tensors
from graphreplay_cuda.blocks import WhileNode
from graphreplay_cuda.capture import Capture, current_capture
from graphreplay_cuda.conditional import check_predicate

Carried = TypeVar("Carried", bound=tuple[Any, ...])


def while_loop(cond: Callable[..., Tensor], body: Callable[..., Any], carried: Carried) -> Carried:
    """Runs ``carried = body(*carried)`` as long as ``cond(*carried)`` is True.

    Inside a CUDAGraph capture this is one while node: ``cond`` and ``body`` run once each (``cond`` twice), and each
    replay iterates as often as the device finds. Elsewhere it is a Python loop that reads the predicate on the host, so
    the same code runs eagerly; so it does when GraphedForward warms up, where ``body`` runs once at least.

    Args:
        cond: from the carried values to one bool on their device.
        body: from the carried values to as many new ones of the same structure, shapes and dtypes. What it writes in
            place stays written.
        carried: the values to begin with, a tuple of tensors or of trees that hold tensors; they are not changed.

    Returns:
        The carried values after the last iteration, in tensors of their own. In a capture those are static: each replay
        overwrites them.

    Raises:
        UnsupportedLeafError: ``carried`` is no tuple, or a leaf may hide a tensor (a TypeError).
        TreeMismatchError: ``body`` returns values of another structure; the path names the first difference.
        PredicateError: ``cond`` returns something other than one bool on the device.
        ConditionalBodyError: the body did what none can, such as drawing random numbers.
        CaptureError: called inside a capture that no CUDAGraph began.
    """
    capture = current_capture()
    state = _own(carried)
    if capture is not None:
        return _as_node(capture, cond, body, state)
    on_device = any(leaf.is_cuda for leaf in tensors(state, "carried"))
    if on_device and torch.cuda.is_current_stream_capturing():
        raise CaptureError("while_loop inside a capture that no CUDAGraph began; capture with graphreplay_cuda.graph")
    warming_up = on_device and capturing_here()
    again = _read(cond(*state), warming_up)
    if warming_up and not again:
        body(*_own(state))  # the capture takes it in, so whatever it needs must have run before
    while again:
        new = body(*state)
        _check_structure(state, new)
        state = _own(new)
        again = _read(cond(*state), warming_up)
    return state


def _as_node(capture: Capture, cond: Callable[..., Tensor], body: Callable[..., Any], state: Carried) -> Carried:
    into = tensors(state, "carried")
    storages = set(storage_ids(into))
    with WhileNode(capture, cond(*state)) as loop:
        new = body(*state)
        _check_structure(state, new)
        source = tensors(new, "carried")
        # A new value may be an old one under another name, as in a swap, so all are read before any is written.
        pairs = zip(into, source, storage_ids(source), strict=True)
        values = [v.clone() if v is not old and storage in storages else v for old, v, storage in pairs]
        for old, value in zip(into, values, strict=True):
            if old is not value:
                old.copy_(value)
        loop.set(cond(*state))
    return state


def _own(carried: Carried) -> Carried:
    """The same values, each tensor in memory of its own: what is carried under two names is two values."""
    if not isinstance(carried, tuple):
        raise UnsupportedLeafError("carried", f"a tuple of values is carried, not {type(carried).__name__}")
    leaves = tensors(carried, "carried")
    own: Carried = replace_tensors(carried, iter([leaf.clone() for leaf in leaves]))
    return own


def _read(predicate: Tensor, warming_up: bool) -> bool:
    check_predicate(predicate, getattr(predicate, "device", torch.device("cpu")))
    if not warming_up:
        return bool(predicate)
    with host_sync_allowed():
        return bool(predicate)


def _check_structure(state: Any, new: Any) -> None:
    was, _ = flatten(state, "carried")
    now, _ = flatten(new, "carried")
    for path, old, changed in differences(was, now, "carried"):
        # A copy converts strides; all else would change what the loop carries.
        movable = is_tensor_node(old) and is_tensor_node(changed) and (old[0], *old[2:]) == (changed[0], *changed[2:])
        if not movable:
            raise TreeMismatchError(path, f"the loop's body changes it: {describe_difference(old, changed)}")
