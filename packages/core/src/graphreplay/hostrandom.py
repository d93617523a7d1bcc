"""Notices forwards that draw random numbers on the host, which a graph would freeze."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphreplay.errors import UnsupportedLeafError
from graphreplay.generators import position_of


class HostRandom:
    """Watches several runs of one forward: Python's and NumPy's global generators, and torch's CPU generator if the
    graphs are elsewhere. Other threads draw too, so only what changed in every run counts."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type != "cpu"
        self._start = self._states()
        self._drawn = set(self._start)
        self._ran = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Surrounds one run."""
        before = self._states()
        try:
            yield
        finally:
            self._ran = True
            self._drawn &= {name for name, state in self._states().items() if state != before.get(name)}

    def put_back(self) -> None:
        """Puts Python's and NumPy's generators back to where they were, if the forward draws from them."""
        if self._ran and "random" in self._drawn:
            random.setstate(self._start["random"])
        if self._ran and "numpy.random" in self._drawn:
            sys.modules["numpy"].random.set_state(_unhashed(self._start["numpy.random"]))

    def check(self) -> None:
        """Raises UnsupportedLeafError if the forward draws from such a generator: this call is not captured; others may
        be."""
        if not self._drawn:
            return
        raise UnsupportedLeafError(
            "forward",
            f"it draws from {' and '.join(sorted(self._drawn))}, whose numbers a replay would repeat; "
            "draw with torch on the device",
        )

    def _states(self) -> dict[str, Any]:
        states: dict[str, Any] = {"random": random.getstate()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, *rest = numpy.random.get_state()
            states["numpy.random"] = (kind, keys.tobytes(), keys.dtype.str, *rest)
        if self._on_device:
            states["torch's CPU generator"] = position_of(torch.default_generator)
        return states


def _unhashed(state: tuple[Any, ...]) -> tuple[Any, ...]:
    kind, keys, dtype, *rest = state
    return (kind, sys.modules["numpy"].frombuffer(keys, dtype=dtype), *rest)
