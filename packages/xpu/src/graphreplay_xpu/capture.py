"""A capture on XPU, by ``capture_begin`` and ``capture_end``.

Not by ``torch.xpu.graph``: it begins with ``torch.xpu.synchronize()`` and ``torch.xpu.empty_cache()``, which both wait
for the whole device. After a replay such a wait has crashed on some cards, while waiting for one stream or one event
has not. Nor is it needed, since the warm-up's stream and memory are those of the capture.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload

from graphreplay import CaptureError
from graphreplay.opmode import OpMode, tensor_args, written_args
from graphreplay_xpu.captured import CapturedForward, kept_graphs
from graphreplay_xpu.pools import PoolState, one_at_a_time, wait_for

_EMPTY = "The XPU Graph is empty"
"""How torch's warning of a graph without work begins."""


def capture(forward: Callable[[], Any], pool: PoolState) -> tuple[CapturedForward, Any]:
    """Runs ``forward`` once under capture on the pool's stream, with its memory in the pool.

    Returns:
        The graph, and the forward's outputs, which each replay overwrites.

    Raises:
        Exception: the forward's own error, or CaptureError where it did what a capture forbids, or where its work has
            not reached the graph. The current stream and the random generator are as before.
    """
    captured, memory, stream = torch.xpu.XPUGraph(), pool.memory, pool.capture_stream
    with ExitStack() as unless_kept:
        with one_at_a_time, ExitStack() as at_end, torch.xpu.stream(stream):
            # As it begins, torch writes the seed of the random generator to memory that every replay reads, and writes
            # anew on its own stream; which it must not find overwritten from here.
            at_end.callback(wait_for, stream)
            with memory.enter() as handle:
                unless_kept.callback(memory.leave, captured.reset)
                _begin(captured, pool, handle)
            before = torch.xpu.memory_reserved(pool.device)
            try:
                outputs = forward()
            except BaseException as failure:
                try:
                    _end(captured, pool, handle)
                except Exception as error:
                    failure.add_note(f"and {error}")
                raise
            grown = torch.xpu.memory_reserved(pool.device) - before
            empty = _end(captured, pool, handle)
        lost = _first_launch(forward, pool) if empty else None
        if lost is not None:
            raise CaptureError(f"the graph is empty, though the forward runs {lost}: its work went past the capture")
        unless_kept.pop_all()
    # What the pool grew by. Later captures reuse it, so they count less; the sum is what the pool holds.
    return CapturedForward(captured, memory, pool.device, max(0, grown)), outputs


def _begin(captured: torch.xpu.XPUGraph, pool: PoolState, handle: Any) -> None:
    """Begins a capture.

    Raises:
        CaptureError: torch could not begin it. Later captures of the pool run elsewhere.
    """
    try:
        captured.capture_begin(pool=handle)
    except BaseException as error:
        _failed(error, "begin", captured, pool, handle)


def _end(captured: torch.xpu.XPUGraph, pool: PoolState, handle: Any) -> bool:
    """Ends a capture; returns whether the graph is empty.

    Raises:
        CaptureError: torch could not end it. Later captures of the pool run elsewhere.
    """
    torch.xpu.set_stream(pool.capture_stream)  # whatever stream was left current
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            captured.capture_end()
        except BaseException as error:
            _failed(error, "end", captured, pool, handle)
    empty = False
    for warning in told:
        if str(warning.message).startswith(_EMPTY):
            empty = True
        else:  # not ours
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return empty


def _failed(error: BaseException, what: str, captured: torch.xpu.XPUGraph, pool: PoolState, handle: Any) -> NoReturn:
    """Undoes what ``capture_begin`` or ``capture_end`` left behind, and raises its error, as a CaptureError if it is
    torch's."""
    left = _mend(captured, pool, handle)
    if isinstance(error, RuntimeError):
        reason = f"torch could not {what} it: {_first_line(error)}"
        raise CaptureError("; ".join(filter(None, (reason, left)))) from error
    if left:
        error.add_note(left)
    raise error


def _mend(captured: torch.xpu.XPUGraph, pool: PoolState, handle: Any) -> str | None:
    """Undoes what torch leaves behind where ``capture_begin`` or ``capture_end`` raised: a stream that may still be
    recorded, memory that still goes to the pool, and a random generator that believes in a capture.

    Returns:
        What could not be undone, or None.
    """
    _abandon(captured, pool, handle)
    trivial, own = torch.xpu.XPUGraph(), torch.xpu.graph_pool_handle()
    try:
        with torch.xpu.stream(pool.capture_stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_EMPTY)
            trivial.capture_begin(pool=own)
            trivial.capture_end()  # which sets the generator right
            trivial.reset()
        wait_for(pool.capture_stream)
    except BaseException as error:
        _abandon(trivial, pool, own)
        if not isinstance(error, RuntimeError):
            raise
        return f"the random generator may still be in it: {_first_line(error)}"
    return None


def _abandon(captured: torch.xpu.XPUGraph, pool: PoolState, handle: Any) -> None:
    """Has torch send no more memory to a graph that it could not capture, and later captures run elsewhere."""
    kept_graphs.append(captured)  # torch's allocators may still ask it which streams are its own
    with suppress(RuntimeError):  # where torch did so itself
        torch._C._xpu_endAllocateToPool(pool.device.index, handle)
        torch._C._xpu_releasePool(pool.device.index, handle)
    pool.renew()


def _first_launch(forward: Callable[[], Any], pool: PoolState) -> str | None:
    """The first operator of the forward that computes something, or None: it may return its inputs and constants."""
    launches = _Launches()
    with pool.side(), launches:
        forward()
    return launches.first


class _Launches(OpMode):
    """Notes the first operator that makes or writes elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def on_op(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = op(*args, **kwargs)
        if self.first is None and torch.Tag.inplace_view not in op.tags:
            known = {tensor.untyped_storage()._cdata for tensor in tensor_args(args, kwargs)}
            made = [t for t in tensor_args((result,), {}) if t.untyped_storage()._cdata not in known]
            if any(tensor.numel() for tensor in (*made, *written_args(op, args, kwargs))):
                self.first = str(op)
        return result


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
