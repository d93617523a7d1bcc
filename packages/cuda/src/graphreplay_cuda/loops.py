"""A loop whose end the device decides on, as a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from graphreplay import CaptureError, TreeMismatchError, UnsupportedLeafError
from graphreplay.capture import capturing_here
from graphreplay.hostsync import host_sync_allowed
from graphreplay.signature import describe_difference, differences, flatten, is_tensor_node, is_value_node
from graphreplay.storage import extent
from graphreplay.tree import replace_tensors, tensors
from graphreplay_cuda.arguments import check_predicate
from graphreplay_cuda.blocks import WhileNode
from graphreplay_cuda.capture import Capture
from graphreplay_cuda.current import current_capture
from graphreplay_cuda.errors import ConditionalBodyError, PredicateError

Carried = TypeVar("Carried", bound=tuple[Any, ...])


def while_loop(cond: Callable[..., Tensor], body: Callable[..., Any], carried: Carried) -> Carried:
    """Runs ``carried = body(*carried)`` as long as ``cond(*carried)`` is True.

    Inside a CUDAGraph capture this is one while node: ``body`` runs once and ``cond`` twice, and each replay iterates
    as often as the device finds. Elsewhere it is a Python loop that reads the predicate on the host, so the same code
    runs eagerly, gradients included; so it does when CUDAGraphedForward warms up, where ``body`` runs once at least.
    Graphs of the reference backend cannot hold it: a forward that calls it on the CPU runs eagerly there.

    Args:
        cond: from the carried values to one bool on their device.
        body: from the carried values to a tuple of as many new ones, of the same structure, shapes, dtypes and devices.
            What it writes in place stays written.
        carried: the values to begin with, a tuple of tensors or of trees that hold tensors; they are not changed. One
            tensor in two places is two values.

    Returns:
        The carried values after the last iteration, in tensors of their own. In a capture those are static: each replay
        overwrites them.

    Raises:
        UnsupportedLeafError: ``carried`` is no tuple, or a leaf may hide a tensor (a TypeError).
        TreeMismatchError: ``body`` returns values of another structure; the path names the first difference.
        PredicateError: ``cond`` returns something other than one bool on the device.
        ConditionalBodyError: the captured body did what none can, such as drawing random numbers or asking for
            gradients.
        CaptureError: called inside a capture that no CUDAGraph began.
    """
    loop = _Loop(cond, body, carried)
    capture = current_capture()
    if capture is not None:
        return loop.capture(capture)
    if loop.on_device and torch.cuda.is_current_stream_capturing():
        raise CaptureError("while_loop inside a capture that no CUDAGraph began; capture with graphreplay_cuda.graph")
    if not loop.on_device and capturing_here():
        raise UnsupportedLeafError("forward", "it runs a while_loop on the CPU, which only graphs on CUDA can hold")
    return loop.run(at_least_once=capturing_here())


class _Loop(Generic[Carried]):
    """The two functions, and what they carry."""

    def __init__(self, cond: Callable[..., Tensor], body: Callable[..., Any], carried: Carried) -> None:
        if not isinstance(carried, tuple):
            raise UnsupportedLeafError("carried", f"a tuple of values is carried, not {type(carried).__name__}")
        self._cond, self._body, self._carried = cond, body, carried
        self._signature, _ = flatten(carried, "carried")
        # Each in memory of its own, whatever shares storage in what is given.
        self._first = [leaf.clone() for leaf in tensors(carried, "carried")]
        self.on_device = any(leaf.is_cuda for leaf in self._first)

    def run(self, *, at_least_once: bool) -> Carried:
        """Iterates in Python."""
        state = self._first
        again = self._read(state)
        if at_least_once and not again:
            self._next([leaf.clone() for leaf in state])  # a capture takes it in, so whatever it needs must have run
        while again:
            state = [value.clone() for value in self._next(state)]
            again = self._read(state)
        return self._tree(state)

    def capture(self, capture: Capture) -> Carried:
        """Adds a while node to a capture."""
        state = self._first
        with WhileNode(capture, self._decide(state)) as node:
            new = self._next(state)
            if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in (*state, *new)):
                raise ConditionalBodyError("gradients do not pass through a captured while_loop; use torch.no_grad()")
            # A new value may be an old one under another name, as in a swap, so all are read before any is written.
            pairs = zip(state, new, strict=True)
            kept = [value.clone() if _shares(value, old, state) else value for old, value in pairs]
            for old, value in zip(state, kept, strict=True):
                if old is not value:
                    old.copy_(value)
            node.set(self._decide(state))
        return self._tree(state)

    def _tree(self, leaves: list[Tensor]) -> Carried:
        # Containers of their own for each call, so that one that changes them changes nothing else.
        tree: Carried = replace_tensors(self._carried, iter(leaves))
        return tree

    def _decide(self, leaves: list[Tensor]) -> Tensor:
        predicate = self._cond(*self._tree(leaves))
        try:
            check_predicate(predicate, None)
        except PredicateError as error:
            raise PredicateError(f"cond of a while_loop: {error}") from None
        return predicate

    def _read(self, leaves: list[Tensor]) -> bool:
        predicate = self._decide(leaves)
        if not capturing_here():
            return bool(predicate)
        with host_sync_allowed():
            return bool(predicate)

    def _next(self, leaves: list[Tensor]) -> list[Tensor]:
        new = self._body(*self._tree(leaves))
        signature, _ = flatten(new, "carried")
        for path, old, changed in differences(self._signature, signature, "carried"):
            if not (is_tensor_node(old) and is_tensor_node(changed) and _but_strides(old) == _but_strides(changed)):
                hint = "; carry numbers that change as tensors" if is_value_node(old) and is_value_node(changed) else ""
                hint = "; return a tuple, as (y,)" if path == "carried" else hint
                what = describe_difference(old, changed)
                raise TreeMismatchError(path, f"the body of a while_loop changes it: {what}{hint}")
        return tensors(new, "carried")


def _but_strides(node: Any) -> tuple[Any, ...]:
    return (node[0], *node[2:])


def _shares(value: Tensor, own: Tensor, state: list[Tensor]) -> bool:
    """Whether a new value is, or may be, memory of the state other than its own slot as it stands."""
    start, end = value.data_ptr(), value.data_ptr() + extent(value)
    return value is not own and any(
        start < old.data_ptr() + extent(old) and old.data_ptr() < end for old in state if old.device == value.device
    )
