"""Process state that changes what a forward computes, though no kwarg shows it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_FP32_BACKENDS = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv"))

# Switches that choose kernels, each read by one C call. Not the order of attention kernels: torch itself changes it at
# the first attention on a device, which would waste the first graph of each module.
_SWITCHES: tuple[Callable[[], Any], ...] = (
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    *(partial(torch._C._get_fp32_precision_getter, backend, op) for backend, op in _FP32_BACKENDS),
    torch._C._get_mkldnn_enabled,
    torch._C._get_mkldnn_deterministic,
    torch._C._get_onednn_allow_tf32,  # None but on Intel GPUs
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
    torch._C._get_blas_preferred_backend,
    torch._C._get_linalg_preferred_backend,
    torch.backends.mha.get_fastpath_enabled,
)


def ambient_state(device_type: str) -> tuple[Any, ...]:
    """A key over grad and inference mode, autocast, default dtype and device, and the switches that choose kernels
    (determinism, precision, attention, libraries).

    Two calls under equal states run the same kernels on the same inputs.
    """
    autocast = torch.is_autocast_enabled(device_type)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast and (torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()),
        torch.get_default_device() if torch._C._len_torch_function_stack() else None,  # it is a mode
        *map(call, _SWITCHES),
    )


_NAMES = ("grad mode", "inference mode", "autocast", "the default device")


def ambient_difference(was: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """Which part of the process state differs between two states."""
    position = next(i for i, (a, b) in enumerate(zip(was, now, strict=True)) if a != b)
    if position < len(_NAMES):
        return f"{_NAMES[position]} is another"
    switch = _SWITCHES[position - len(_NAMES)]
    name = switch.args[0] + " " + switch.args[1] + " precision" if isinstance(switch, partial) else switch.__name__
    return f"process switch {name.strip('_').removeprefix('get_')} is {now[position]}"


def eager_only() -> str | None:
    """Why a call under the current process state must not be captured or replayed, or None."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing the call"
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
