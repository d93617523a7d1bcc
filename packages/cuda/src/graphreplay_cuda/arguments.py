"""Checks of arguments that need no device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphreplay import BackendUnavailableError, ConfigurationError
from graphreplay_cuda.errors import PredicateError
from graphreplay_cuda.pools import PoolHandle

MODES = ("global", "thread_local", "relaxed")


def check_mode(mode: object) -> None:
    """Refuses an unknown capture error mode.

    Raises:
        ConfigurationError: it is none of MODES.
    """
    if mode not in MODES:
        raise ConfigurationError(f"capture_error_mode is one of {', '.join(MODES)}, not {mode!r}")


def check_stream(stream: object, *, for_replay: bool = False) -> None:
    """Refuses what is no stream, and for a capture the legacy default stream.

    Raises:
        ConfigurationError: with the reason.
    """
    if stream is None:
        return
    if not isinstance(stream, torch.cuda.Stream):
        raise ConfigurationError(f"stream is a torch.cuda.Stream or None, not {type(stream).__name__}")
    if not for_replay and stream.cuda_stream == 0:
        raise ConfigurationError(
            "the legacy default stream cannot be captured, since it waits for all other streams; pass a "
            "torch.cuda.Stream(), or None for a side stream"
        )


def check_pool(pool: Any) -> PoolHandle | None:
    """The handle of a pool given as a number, a handle, or a graph of torch.

    Raises:
        ConfigurationError: it is none of these.
    """
    if pool is None or isinstance(pool, PoolHandle):
        return pool
    if isinstance(pool, torch.cuda.CUDAGraph):
        try:
            pool = pool.pool()
        except RuntimeError as error:
            raise ConfigurationError("this torch.cuda.CUDAGraph has no pool yet; capture into it first") from error
    if isinstance(pool, tuple) and len(pool) == 2 and all(isinstance(part, int) for part in pool):
        return PoolHandle(pool)
    raise ConfigurationError(
        f"pool is None, a handle of graph_pool_handle(), a pool_id or a CUDAGraph, not {type(pool).__name__}"
    )


def check_predicate(predicate: Tensor, device: torch.device | None) -> None:
    """Refuses what a conditional node cannot read.

    Args:
        device: where the predicate must be; None: anywhere.

    Raises:
        PredicateError: it is not a tensor of one bool there.
    """
    if not isinstance(predicate, Tensor):
        raise PredicateError(f"a predicate is a tensor, not {type(predicate).__name__}")
    if type(predicate) is not Tensor or predicate.layout != torch.strided:
        raise PredicateError("a predicate is a plain strided tensor")
    if predicate.dtype != torch.bool:
        raise PredicateError(f"a predicate is of dtype bool, not {predicate.dtype}; compare, or call .bool()")
    if predicate.numel() != 1:
        raise PredicateError(f"a predicate is one element, not of shape {tuple(predicate.shape)}; reduce it by any()")
    if device is not None and predicate.device != device:
        raise PredicateError(f"a predicate for a graph on {device} is there, not on {predicate.device}")


def why_no_cuda() -> str | None:
    """Why this process has no CUDA device, or None if it has."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA; install a build with it"
    return "no usable NVIDIA GPU or driver"


def require_device() -> None:
    """Refuses a machine without a CUDA device.

    Raises:
        BackendUnavailableError: with the reason.
    """
    why = why_no_cuda()
    if why is not None:
        raise BackendUnavailableError(f"CUDA graphs need a CUDA device: {why}")
