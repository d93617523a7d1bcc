"""Reading a device argument."""

from __future__ import annotations

import torch

from graphreplay.errors import UnknownDeviceError


def parse_device(device: torch.device | str) -> torch.device:
    """``torch.device(device)``, or an UnknownDeviceError."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnknownDeviceError(f"{device!r} is no device that torch knows; write cuda, cuda:0 or cpu") from error
