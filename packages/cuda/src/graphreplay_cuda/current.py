"""Which CUDAGraph capture the calling thread is in."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from graphreplay_cuda.capture import Capture


class _Here(threading.local):
    capture: Capture | None = None


_here = _Here()


def current_capture() -> Capture | None:
    """The CUDAGraph capture of the calling thread that is under way, if any."""
    return _here.capture


def set_current_capture(capture: Capture | None) -> None:
    """Notes that a capture has begun, or that the last one is over."""
    _here.capture = capture


def is_capturing_here() -> bool:
    """Whether the calling thread is in some capture, of CUDAGraph or on its current stream."""
    return _here.capture is not None or torch.cuda.is_current_stream_capturing()
