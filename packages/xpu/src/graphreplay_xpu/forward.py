"""The XPU hooks of GraphedForward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphreplay import BackendUnavailableError, GraphedForward
from graphreplay_xpu.capture import capture
from graphreplay_xpu.captured import CapturedForward
from graphreplay_xpu.pools import PoolState


class XPUGraphedForward(GraphedForward):
    """GraphedForward on XPU graphs. Arguments, calls and errors are those of GraphedForward; ``nvtx`` marks nothing."""

    why_no_collectives = "XPU graphs hold none: one that was captured has been seen to spoil the eager ones after it"

    @classmethod
    def resolve_device(cls, device: torch.device) -> torch.device:
        if device.type != "xpu":
            return device
        if not hasattr(torch.xpu, "XPUGraph"):
            raise BackendUnavailableError(
                f"{device} has no graphs here: PyTorch {torch.__version__} has no torch.xpu.XPUGraph, 2.11 and later do"
            )
        if not torch.xpu.is_available():
            built = torch.version.xpu is not None
            why = (
                "no usable Intel GPU or driver"
                if built
                else "this PyTorch is built without XPU; install a build with it"
            )
            raise BackendUnavailableError(f"{device} is not here: {why}")
        index = torch.xpu.current_device() if device.index is None else device.index
        count = torch.xpu.device_count()
        if index >= count:
            raise BackendUnavailableError(f"{device} is not here: this machine has {count} XPU devices")
        return torch.device("xpu", index)

    def _graphs_supported(self) -> str | None:
        if self.device.type != "xpu":
            return f"XPU graphs run on an XPU device, not on {self.device}"
        return None

    def _warmup_stream(self) -> AbstractContextManager[None]:
        return self._pool_state.side()

    def _capture_graph(self, forward: Callable[[], Any]) -> tuple[CapturedForward, Any]:
        return capture(forward, self._pool_state)

    def _is_capturing(self) -> bool:
        if self.device.type != "xpu":
            return False
        return torch.xpu.is_current_stream_capturing() or (self.pool.backend is not None and self._pool_state.blocked)

    def _take_turn(self) -> None:
        state, current = self._pool_state, torch.xpu.current_stream(self.device)
        if current != state.last_stream:
            current.wait_stream(state.last_stream)
            state.last_stream = current

    def _has_turn(self) -> bool:
        state = self.pool.backend
        if state is None or torch.xpu.is_current_stream_capturing():
            return False
        return bool(torch.xpu.current_stream(self.device) == state.last_stream)

    # _release_memory stays as it is: torch.xpu.empty_cache() waits for the whole device (see capture.py). Memory of
    # dropped graphs stays with torch's allocator, which gives it back when it runs short.

    @property
    def _pool_state(self) -> PoolState:
        state = self.pool.backend
        if state is None:
            state = self.pool.backend = PoolState(self.device)
        assert isinstance(state, PoolState)
        return state
