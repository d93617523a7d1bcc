"""Streams that captures run on. torch's own come from a pool of 32 that wraps around: two captures would then share a
stream, and with it a cuBLAS workspace that both of their graphs write at once."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import suppress

import torch

from graphreplay_cuda import driver

_lock = threading.Lock()
_dedicated: dict[int, torch.cuda.Stream] = {}
"""Where captures of a device run that name no stream."""

_bodies: dict[tuple[int, int], torch.cuda.Stream] = {}
"""Where bodies run, by device and raw parent stream: bodies of one parent come one after another."""

_lent: dict[int, list[torch.cuda.Stream]] = defaultdict(list)
"""Streams of memory pools that are gone, for the next ones. A stream's workspace is never freed, so none is wasted."""

_taken: set[tuple[int, int]] = set()
"""Streams that a capture runs on, by device and raw stream."""


def dedicated_stream(index: int) -> torch.cuda.Stream:
    """The side stream of a device for captures that name none."""
    with _lock:
        if index not in _dedicated:
            _dedicated[index] = _new(index)
        return _dedicated[index]


def borrow_stream(index: int) -> torch.cuda.Stream:
    """A stream of a device that nobody else captures on until ``give_back``."""
    with _lock:
        free = _lent[index]
        return free.pop() if free else _new(index)


def give_back(stream: torch.cuda.Stream) -> None:
    """Ends the use of a borrowed stream."""
    _lent[stream.device.index].append(stream)


def take(stream: torch.cuda.Stream) -> bool:
    """Takes a stream for one capture, until ``let_go``; returns False where another one has it. The driver tells only
    whether a stream is being captured right now, and a capture needs it for a moment before and after that."""
    key = _key(stream)
    with _lock:
        if key in _taken:
            return False
        _taken.add(key)
        return True


def let_go(stream: torch.cuda.Stream) -> None:
    """Ends the use of a stream that a capture took."""
    _taken.discard(_key(stream))  # without the lock, which the collector may find held by its own thread


def follow_current(stream: torch.cuda.Stream) -> None:
    """Orders a stream behind what the current one of its device holds, if nobody captures that."""
    current = torch.cuda.current_stream(stream.device)
    if current.cuda_stream == 0 or not driver.is_capturing(current.cuda_stream):
        stream.wait_stream(current)


def wait_for(stream: torch.cuda.Stream) -> None:
    """Has the host wait for what a stream holds, if nobody captures it: the wait would break the capture. An error of
    that work comes up again at whatever uses the device next."""
    with suppress(RuntimeError), driver.relaxed():
        if not driver.is_capturing(stream.cuda_stream):
            done = torch.cuda.Event()  # no wait that torch.cuda.set_sync_debug_mode would tell the user of
            done.record(stream)
            done.synchronize()


def body_stream(parent: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream for bodies below a parent stream."""
    with _lock:
        key = _key(parent)
        if key not in _bodies:
            _bodies[key] = _new(parent.device.index)
        return _bodies[key]


def give_workspace(stream: torch.cuda.Stream) -> None:
    """Has cuBLAS allocate the workspace of a stream for this thread now, where it has none. Inside a capture it would
    become memory of one graph, and all later ones on the stream would use it."""
    with torch.cuda.stream(stream):
        torch.cuda.current_blas_handle()


def _key(stream: torch.cuda.Stream) -> tuple[int, int]:
    return stream.device.index, stream.cuda_stream


def named(raw: int, device: torch.device) -> torch.cuda.Stream:
    """The stream of a device that has this raw handle."""
    return torch.cuda.ExternalStream(raw, device=device) if raw else torch.cuda.default_stream(device)


def _new(index: int) -> torch.cuda.Stream:
    with torch.cuda.device(index):
        driver.ensure_context()
        return torch.cuda.ExternalStream(driver.new_stream(), device=index)
