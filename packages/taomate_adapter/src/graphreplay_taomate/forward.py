"""The class that TaoMate constructs: the platform's own graphed forward, captured without the AdaLN memo."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

import graphreplay
from graphreplay.arguments import parse_device
from graphreplay_taomate import adaln

logger = logging.getLogger("graphreplay")


class PlainForward(graphreplay.GraphedForward):
    """What stands in where no backend serves: its calls are plain forwards, and it says why."""

    def _graphs_supported(self) -> str | None:
        return _why_plain(self.device)


class GraphedForward(graphreplay.GraphedForward):
    """The graphed forward of the platform that ``device`` names, with TaoMate's arguments.

    An instance is of this class and of the platform's own, such as ``graphreplay_cuda.CUDAGraphedForward``: it gets a
    class that is made for both, so that ``isinstance`` holds for either, and ``type(graphed) is GraphedForward`` does
    not. Calls, properties and errors are those of ``graphreplay.GraphedForward``. Captures run in
    ``capture_context(module)``, so that the graph holds the AdaLN projections themselves.

    Where nothing can capture, ``enabled`` is False, calls are plain forwards, and ``disabled_reason`` says why: on a
    CPU, and, with a warning in the log, where the platform's package is missing (the reason names it), cannot be
    imported, or does not exist.

    Args:
        module: an ``nn.Module`` or any callable that takes keywords only.
        device: where the module and its tensor kwargs live.
        max_entries: how many graphs to keep, at least 1.
        warmup_iters: forwards before a capture beside the call's own, at least 1.
        group: the process group whose collectives the forward runs.
        name: how logs and errors call this wrapper; the module's class by default.
        enabled: False makes every call a plain forward.
        capture_context: makes a further context manager around captures. It is entered before the memo is bypassed,
            and left after, so that it may replace the memo.
        reference: capture on a CPU too, by the reference backend, which is right and no faster than eager.
        others: the other arguments of ``graphreplay.GraphedForward``, such as ``pool``, ``check_module`` and
            ``clone_outputs``.

    Raises:
        ConfigurationError: an argument is out of range (a ValueError).
        UnknownDeviceError: torch knows no such device type.
        BackendUnavailableError: this machine has no such device.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        *,
        device: torch.device | str,
        max_entries: int = 16,
        warmup_iters: int = 2,
        group: torch.distributed.ProcessGroup | None = None,
        name: str | None = None,
        enabled: bool = True,
        capture_context: Callable[[], AbstractContextManager[Any]] | None = None,
        reference: bool = False,
        **others: Any,
    ) -> None:
        # Here, and not in a __new__, whose arguments help() would show. What follows runs as the platform's class.
        self.__class__ = _combined(type(self), _backend(parse_device(device), reference))
        context: Any = capture_context
        if capture_context is None:
            context = partial(adaln.capture_context, module)
        elif callable(capture_context):  # anything else is the core's to refuse
            context = partial(_both, capture_context, module)
        super().__init__(
            module,
            device=device,
            max_entries=max_entries,
            warmup_iters=warmup_iters,
            group=group,
            name=name,
            enabled=enabled,
            capture_context=context,
            **others,
        )
        if (
            isinstance(self, PlainForward)
            and self.device.type != "cpu"
            and self.disabled_reason == _why_plain(self.device)
        ):
            logger.warning("%s captures no graphs: %s", self.name, self.disabled_reason)


def get_graphed_forward_cls() -> type[GraphedForward]:
    """The class to construct on this platform, as TaoMate's platform hook answers.

    It is ``GraphedForward`` everywhere, which takes the backend of its device when it is constructed: only then is the
    device known.
    """
    return GraphedForward


@contextmanager
def _both(outer: Callable[[], AbstractContextManager[Any]], module: Any) -> Iterator[None]:
    with outer(), adaln.capture_context(module):
        yield


def _backend(device: torch.device, reference: bool) -> type[graphreplay.GraphedForward]:
    if device.type == "cpu" and reference:
        return graphreplay.ReferenceGraphedForward
    return PlainForward if _why_plain(device) else graphreplay.get_graphed_forward_cls(device)


def _why_plain(device: torch.device) -> str | None:
    """Why nothing can capture on a device, or None.

    Raises:
        BackendUnavailableError: there is no such device, so that a plain forward would find none either.
    """
    if device.type == "cpu":
        return "a CPU replays no faster than it runs eagerly; reference=True captures there all the same"
    try:
        graphreplay.get_graphed_forward_cls(device)
    except (graphreplay.BackendNotInstalledError, graphreplay.UnknownDeviceError) as error:
        return str(error)
    except graphreplay.BackendUnavailableError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        return str(error)
    return None


_classes: dict[tuple[type, type], type[GraphedForward]] = {}


def _combined(cls: type[GraphedForward], backend: type[graphreplay.GraphedForward]) -> type[GraphedForward]:
    """A subclass of both, the same one each time. ``cls`` comes first: GraphedForward has no hooks of its own, so that
    the backend's count, and those of a subclass of it count before them."""
    if issubclass(cls, backend):
        return cls
    if (cls, backend) not in _classes:
        name = f"{cls.__name__}[{backend.__name__}]"
        _classes[cls, backend] = type(name, (cls, backend), {"__module__": cls.__module__})
    return _classes[cls, backend]
