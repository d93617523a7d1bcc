"""The XPU backend with its tensors on the CPU."""

import threading
from contextlib import contextmanager

import torch

from graphreplay import BackendUnavailableError
from graphreplay_xpu import XPUGraphedForward


class _Side(threading.local):
    hooks = False


_side = _Side()


class _In:
    """Whether its body is code of the hooks. A class: frames of a generator would keep an error alive."""

    def __init__(self, hooks):
        self._hooks = hooks

    def __enter__(self):
        self._before, _side.hooks = _side.hooks, self._hooks

    def __exit__(self, *exc_info):
        _side.hooks = self._before


class EmulatedForward(XPUGraphedForward):
    """Hooks run as they are and see the device as xpu, of this index; the core, the forward and the caller see it as
    cpu."""

    def __init__(self, module, *, index=0, **options):
        self._index = index
        super().__init__(module, **options)

    @property
    def device(self):
        return torch.device("xpu", self._index) if _side.hooks and self._device.type == "cpu" else self._device

    @device.setter
    def device(self, device):
        self._device = device

    @classmethod
    def resolve_device(cls, device):
        if device.type != "cpu":
            return super().resolve_device(device)
        try:
            super().resolve_device(torch.device("xpu", device.index) if device.index is not None else _XPU)
        except BackendUnavailableError as error:
            raise BackendUnavailableError(str(error).replace("xpu:", "cpu:")) from error
        return torch.device("cpu")

    def _graphs_supported(self):
        with _In(hooks=True):
            return super()._graphs_supported()

    @contextmanager
    def _warmup_stream(self):
        with _In(hooks=True), super()._warmup_stream(), _In(hooks=False):
            yield

    def _capture_graph(self, forward):
        def outside():
            with _In(hooks=False):
                return forward()

        with _In(hooks=True):
            return super()._capture_graph(outside)

    def _is_capturing(self):
        with _In(hooks=True):
            return super()._is_capturing()

    def _take_turn(self):
        with _In(hooks=True):
            super()._take_turn()

    def _has_turn(self):
        with _In(hooks=True):
            return super()._has_turn()


_XPU = torch.device("xpu")
