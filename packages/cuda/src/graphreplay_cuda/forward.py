"""The CUDA hooks of GraphedForward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphreplay import BackendUnavailableError, GraphedForward
from graphreplay_cuda import driver, native, streams
from graphreplay_cuda.arguments import why_no_cuda
from graphreplay_cuda.captured import CapturedForward, PoolState, capture


class CUDAGraphedForward(GraphedForward):
    """GraphedForward on CUDA graphs. Arguments, calls and errors are those of GraphedForward."""

    looks_of = staticmethod(native.looks_of)
    sight_of = staticmethod(native.sight_of)

    @classmethod
    def resolve_device(cls, device: torch.device) -> torch.device:
        if device.type != "cuda":
            return device
        why = why_no_cuda()
        if why is not None:
            raise BackendUnavailableError(f"{device} is not here: {why}")
        index = torch.cuda.current_device() if device.index is None else device.index
        count = torch.cuda.device_count()
        if index >= count:
            raise BackendUnavailableError(f"{device} is not here: this machine has {count} CUDA devices")
        return torch.device("cuda", index)

    def _graphs_supported(self) -> str | None:
        if self.device.type != "cuda":
            return f"CUDA graphs run on a CUDA device, not on {self.device}"
        native.warn_if_missing()
        return None

    @contextmanager
    def _warmup_stream(self) -> Iterator[None]:
        side, current = self._pool_state.capture_stream, torch.cuda.current_stream(self.device)
        side.wait_stream(current)
        streams.give_workspace(side)  # here, or the warm-up would have them allocated anywhere
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            current.wait_stream(side)

    def _capture_graph(self, forward: Callable[[], Any]) -> tuple[CapturedForward, Any]:
        return capture(forward, self._pool_state)

    def _is_capturing(self) -> bool:
        state: PoolState | None = self.pool.backend
        if state is None:
            return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        raw, launches = torch._C._cuda_getCurrentRawStream(self.device.index), state.launches
        if torch._C._cuda_isCurrentStreamCapturing() or (raw and driver.is_capturing(raw)):  # of whichever device
            return True
        return raw != launches.last and launches.is_blocked()

    def _take_turn(self) -> None:
        self._pool_state.launches.take_turn()

    def _has_turn(self) -> bool:
        state: PoolState | None = self.pool.backend
        if state is None:
            return False
        launches, index = state.launches, state.device.index
        return (
            torch._C._cuda_getCurrentRawStream(index) == launches.last
            and torch._C._cuda_getDevice() == index
            and not torch._C._cuda_isCurrentStreamCapturing()  # which is asked of the current device
        )

    def _release_memory(self) -> None:
        if self.pool.backend is not None:
            self._pool_state.release()

    @contextmanager
    def _range(self, phase: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(f"{self.name}: {phase}")
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    @property
    def _pool_state(self) -> PoolState:
        state = self.pool.backend
        if state is None:
            state = self.pool.backend = PoolState(self.device)
        assert isinstance(state, PoolState)
        return state
