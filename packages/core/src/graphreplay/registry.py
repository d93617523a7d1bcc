"""Which class graphs forwards on which device: found through the entry points of the installed packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import torch

from graphreplay.arguments import parse_device
from graphreplay.errors import BackendNotInstalledError, BackendUnavailableError, UnknownDeviceError
from graphreplay.forward import GraphedForward

GROUP = "graphreplay.backends"
"""Entry-point group: the name is a device type, the object a subclass of GraphedForward."""

_PACKAGES = {"cpu": "graphreplay-core", "cuda": "graphreplay-cuda", "xpu": "graphreplay-xpu"}


def get_graphed_forward_cls(device: torch.device | str | None = None) -> type[GraphedForward]:
    """The class that graphs forwards on a device.

    Args:
        device: "cuda", "cuda:1", a ``torch.device``, or "cpu" for the reference backend. None picks the accelerator of
            this machine; without one, or where no backend exists for it, the answer is ``GraphedForward`` itself, which
            captures nothing: calls are plain forwards.

    Raises:
        UnknownDeviceError: no backend exists for this device type.
        BackendNotInstalledError: one exists in a package that is not installed; the message names the package.
        BackendUnavailableError: it is installed, but this machine has no such device; the message says why.
    """
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type not in {*_PACKAGES, *_installed()}:
            return GraphedForward
        device = accelerator.type
    parsed = parse_device(device)
    installed = _installed()
    if parsed.type not in installed:
        if parsed.type not in _PACKAGES:
            raise UnknownDeviceError(
                f"no graphreplay backend for device type {parsed.type!r}; there are {', '.join(sorted(_PACKAGES))}"
            )
        package = _PACKAGES[parsed.type]
        raise BackendNotInstalledError(
            f"device {device!s} needs {package}, which is not installed; install it from where graphreplay-core came "
            f"(in a clone: pip install ./packages/{package.removeprefix('graphreplay-')})"
        )
    try:
        cls: type[GraphedForward] = installed[parsed.type].load()
    except ImportError as error:
        raise BackendUnavailableError(f"the backend for {device!s} cannot be imported: {error}") from error
    cls.resolve_device(parsed)
    return cls


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}
