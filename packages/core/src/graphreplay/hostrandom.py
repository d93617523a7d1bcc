"""Notices forwards that draw from Python's or NumPy's global generators, whose numbers a graph would freeze."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graphreplay.errors import CaptureError


class HostRandom:
    """Watches several runs of one forward. Other threads draw too, so only what changed in every run counts."""

    def __init__(self) -> None:
        self._start = _states()
        self._drawn = set(self._start)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Surrounds one run."""
        before = _states()
        yield
        self._drawn &= {name for name, state in _states().items() if state != before.get(name)}

    def check(self) -> None:
        """Puts generators that the forward draws from back to where they were.

        Raises:
            CaptureError: there is such a generator.
        """
        if not self._drawn:
            return
        if "random" in self._drawn:
            random.setstate(self._start["random"])
        if "numpy.random" in self._drawn:
            sys.modules["numpy"].random.set_state(_unhashed(self._start["numpy.random"]))
        raise CaptureError(
            f"the forward draws from {' and '.join(sorted(self._drawn))}, whose numbers a replay would repeat; "
            "draw with torch on the device"
        )


def _states() -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), keys.dtype.str, *rest)
    return states


def _unhashed(state: tuple[Any, ...]) -> tuple[Any, ...]:
    kind, keys, dtype, *rest = state
    return (kind, sys.modules["numpy"].frombuffer(keys, dtype=dtype), *rest)
