"""Reading constructor arguments."""

from __future__ import annotations

from typing import Any

import torch

from graphreplay.errors import ConfigurationError, UnknownDeviceError
from graphreplay.pool import GraphPool

VERIFY = ("off", "first", "always")
"""Which replays are compared with eager: none, the first one of each graph, or all."""


def parse_device(device: torch.device | str) -> torch.device:
    """``torch.device(device)``, or an UnknownDeviceError."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnknownDeviceError(f"{device!r} is no device that torch knows; write cuda, cuda:0 or cpu") from error


def check_deadline(deadline: Any) -> None:
    """Raises ConfigurationError unless the deadline is a number of seconds above 0."""
    if type(deadline) not in (int, float) or not 0 < deadline < float("inf"):
        raise ConfigurationError(f"deadline must be a number of seconds above 0, not {deadline!r}")


def check_verify(verify: Any, ranks: list[int] | None) -> None:
    """Raises ConfigurationError unless this is a way to verify that the ranks can go."""
    if verify not in VERIFY:
        raise ConfigurationError(f"verify must be one of {', '.join(map(repr, VERIFY))}, not {verify!r}")
    if verify != "off" and ranks is not None and len(ranks) > 1:
        raise ConfigurationError(
            f"verify={verify!r} runs the forward once more, collectives and all, at replays that the other ranks need "
            "not have; verify on one rank"
        )


def check_flags(**flags: Any) -> None:
    """Raises ConfigurationError unless these are True or False."""
    for name, value in flags.items():
        if type(value) is not bool:
            raise ConfigurationError(f"{name} must be True or False, not {value!r}")


def check_arguments(module: Any, capture_context: Any, pool: Any, **bounds: Any) -> None:
    """Raises ConfigurationError for an argument of GraphedForward that cannot be honoured.

    Args:
        bounds: ints of at least 1, by name.
    """
    if not callable(module):
        raise ConfigurationError(f"module must be callable, not a {type(module).__name__}")
    for name, value in bounds.items():
        if type(value) is not int or value < 1:
            raise ConfigurationError(
                f"{name} must be an int of at least 1, not {value!r}; enabled=False turns graphs off"
            )
    if pool is not None and not isinstance(pool, GraphPool):
        raise ConfigurationError(f"pool must be a GraphPool, not a {type(pool).__name__}")
    is_context = hasattr(capture_context, "__enter__") and not isinstance(capture_context, type)
    if capture_context is not None and (is_context or not callable(capture_context)):
        raise ConfigurationError(
            "capture_context must be a callable that makes a context manager: torch.no_grad, and not torch.no_grad()"
        )
