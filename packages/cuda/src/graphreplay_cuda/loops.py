"""A loop whose end the device decides on, as a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphreplay import CaptureError, TreeMismatchError, clone_static
from graphreplay.capture import capturing_here
from graphreplay.hostsync import host_sync_allowed
from graphreplay.signature import describe_difference, differences, flatten, is_tensor_node
from graphreplay.storage import storage_ids
from graphreplay.tree import tensors
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
        TreeMismatchError: ``body`` returns values of another structure; the path names the first difference.
        PredicateError: ``cond`` returns something other than one bool on the device.
        ConditionalBodyError: the body did what none can, such as drawing random numbers.
        CaptureError: called inside a capture that no CUDAGraph began.
    """
    capture = current_capture()
    if capture is not None:
        return _as_node(capture, cond, body, carried)
    state = _own(carried)
    leaves = tensors(state)
    device = leaves[0].device if leaves else torch.device("cpu")
    warming_up = device.type == "cuda" and capturing_here()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CaptureError("while_loop inside a capture that no CUDAGraph began; capture with graphreplay_cuda.graph")
    again = _read(cond(*state), device, warming_up)
    if warming_up and not again:
        body(*_own(state))  # the capture takes it in, so whatever it needs must have run before
    while again:
        _assign(state, body(*state))
        again = _read(cond(*state), device, warming_up)
    return state


def _as_node(capture: Capture, cond: Callable[..., Tensor], body: Callable[..., Any], carried: Carried) -> Carried:
    state = _own(carried)
    with WhileNode(capture, cond(*state)) as loop:
        _assign(state, body(*state))
        loop.set(cond(*state))
    return state


def _own(carried: Carried) -> Carried:
    if not isinstance(carried, tuple):
        raise TypeError(f"carried is a tuple of values, not {type(carried).__name__}")
    own: Carried = clone_static(carried, "carried")
    return own


def _read(predicate: Tensor, device: torch.device, warming_up: bool) -> bool:
    check_predicate(predicate, device)
    if not warming_up:
        return bool(predicate)
    with host_sync_allowed():
        return bool(predicate)


def _assign(state: tuple[Any, ...], new: Any) -> None:
    """Copies new values onto the state. A new value may be an old one under another name, as in a swap."""
    was, into = flatten(state, "carried")
    now, source = flatten(new, "carried")
    for path, old, changed in differences(was, now, "carried"):
        if not _movable(old, changed):
            raise TreeMismatchError(path, f"the loop's body changes it: {describe_difference(old, changed)}")
    old_storages = set(storage_ids(into))
    values = [
        value.clone() if value is not target and storage in old_storages else value
        for target, value, storage in zip(into, source, storage_ids(source), strict=True)
    ]
    for target, value in zip(into, values, strict=True):
        if target is not value:
            target.copy_(value)


def _movable(old: Any, new: Any) -> bool:
    return bool(is_tensor_node(old) and is_tensor_node(new) and old[0] == new[0] and old[2] == new[2])
