"""Process state that changes what a forward computes, though no kwarg shows it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_Reader: TypeAlias = Callable[[], Any]


def _precision(backend: str, op: str) -> _Reader:
    return partial(torch._C._get_fp32_precision_getter, backend, op)


# Switches that choose kernels, each read by one C call. Not the order of attention kernels: torch itself changes it at
# the first attention on a device, which would waste the first graph of each module. Nor the preferred libraries for
# products and linear algebra: reading those costs as much as all of these.
_SWITCHES: tuple[_Reader, ...] = (
    torch.get_default_dtype,
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_algorithms_warn_only,
    _precision("cuda", "matmul"),
    _precision("cuda", "conv"),
    _precision("cuda", "rnn"),
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch._C._get_cublas_allow_fp16_accumulation,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_math_sdp_allow_fp16_bf16_reduction,
    partial(vars(torch.backends.mha).__getitem__, "_is_fastpath_enabled"),  # its getter is two Python calls
)
_SWITCHES_OFF_CUDA: tuple[_Reader, ...] = (
    _precision("mkldnn", "matmul"),
    _precision("mkldnn", "conv"),
    torch._C._get_mkldnn_enabled,
    torch._C._get_mkldnn_deterministic,
    torch._C._get_onednn_allow_tf32,  # None but on Intel GPUs
)
"""Of libraries that run nothing on CUDA devices. The CPU backend, a reference for devices, reads all of them."""

State: TypeAlias = tuple[Any, ...]
"""Of the process and the calling thread: the numbers of dispatch and function modes, grad and inference mode, and the
switches."""


class Ambient:
    """Reads what of the process, and of the calling thread, changes what a forward computes on a kind of device."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        # Where autocast is off, a forward that turns it on without a dtype takes this one.
        of_device: tuple[_Reader, ...] = (partial(torch.get_autocast_dtype, device_type),)
        of_device += () if device_type == "cuda" else _SWITCHES_OFF_CUDA
        self._switches = _SWITCHES + of_device
        self.readers = (
            torch._C._len_torch_dispatch_stack,
            torch._C._len_torch_function_stack,
            torch.is_grad_enabled,
            torch.is_inference_mode_enabled,
            *self._switches,
        )

    def read(self) -> State:
        """The part that every call reads. What else counts shows in ``autocast``, and in what tensors look like: see
        ``looks_of``."""
        return tuple(map(call, self.readers))

    def autocast(self) -> tuple[torch.dtype, bool] | None:
        """The dtype of autocast and whether it caches weights, or None where it is off."""
        if not torch.is_autocast_enabled(self._device_type):
            return None
        return torch.get_autocast_dtype(self._device_type), torch.is_autocast_cache_enabled()

    def key(self, state: State) -> tuple[Any, ...]:
        """What counts of the state now, as part of a key: grad and inference mode, autocast, the default device, and
        the switches that choose kernels (dtype, determinism, precision, attention).

        Two calls under equal keys run the same kernels on the same inputs.
        """
        _, function_modes, grad, inference, *switches = state
        device = torch.get_default_device() if function_modes else None  # it is a mode
        return (grad, inference, self.autocast(), device, *switches)

    def difference(self, was: tuple[Any, ...], now: tuple[Any, ...]) -> str:
        """Which part differs between two keys."""
        position = next(i for i, (a, b) in enumerate(zip(was, now, strict=True)) if a != b)
        if position < len(_NAMES):
            return f"{_NAMES[position]} is another"
        switch = self._switches[position - len(_NAMES)]
        if isinstance(switch, partial):
            kind = {2: " precision", 1: " autocast dtype"}[len(switch.args)]
            name = switch.args[0] if switch.args[0].startswith("_") else " ".join(switch.args) + kind
        else:
            name = switch.__name__
        return f"process switch {name.strip('_').removeprefix('get_')} is {now[position]}"


_NAMES = ("grad mode", "inference mode", "autocast", "the default device")


def eager_only() -> str | None:
    """Why a call under the current process state must not be captured or replayed, or None."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit is tracing the call"
    if torch._C._len_torch_dispatch_stack():
        return "a torch dispatch mode is active, and a replay would hide every operator from it"
    if torch._C._len_torch_function_stack() and not all(
        isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()
    ):
        return "a torch function mode is active, and a replay would hide every call from it"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active, and a replay would drop the tangents"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a functorch transform (vmap, grad) is active"
    return None
