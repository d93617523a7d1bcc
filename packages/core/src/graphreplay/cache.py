"""A bounded least-recently-used cache with pins and byte accounting."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from graphreplay.errors import GraphReplayWarning
from graphreplay.stats import logger

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class _Slot(Generic[V]):
    value: V
    nbytes: int
    pinned: bool


class LRUCache(Generic[K, V]):
    """Keeps the most recently used values within ``max_entries`` and ``max_bytes``.

    Pinned values are never evicted, also where they alone exceed a bound: then the cache grows, and warns once. The
    newest value always stays, so that nothing is built in vain.

    Args:
        max_entries: how many values to keep, at least 1.
        max_bytes: how many bytes to keep, or None for no such bound.
        on_evict: called with each value that leaves, whatever made it leave.
    """

    def __init__(self, max_entries: int, max_bytes: int | None, on_evict: Callable[[V], None]) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.evictions = 0
        self._on_evict = on_evict
        self._slots: OrderedDict[K, _Slot[V]] = OrderedDict()  # least recently used first
        self._nbytes = 0
        self._pinned = 0
        self._warned = False
        self.newest_key: K | None = None
        self.newest: V | None = None
        """What ``get`` of the key above returns, where that is known: whoever has this very key need not ask."""

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[K]:
        """Keys, least recently used first."""
        return iter(self._slots)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def pinned(self) -> int:
        """How many values are pinned."""
        return self._pinned

    def get(self, key: K) -> V | None:
        """The value, now the most recently used one, or None."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        self._slots.move_to_end(key)
        self.newest_key, self.newest = key, slot.value
        return slot.value

    def put(self, key: K, value: V, nbytes: int, *, pin: bool = False) -> None:
        """Adds a value under a new key and evicts others until the bounds hold, least recently used first."""
        if key in self._slots:
            raise KeyError(f"{key!r} is in the cache already")
        self._slots[key] = _Slot(value, nbytes, pin)
        self.newest_key, self.newest = key, value
        self._nbytes += nbytes
        self._pinned += pin
        self._shrink(keep=key)

    def pin(self, key: K) -> bool:
        """Exempts a value from eviction. False if it is not here."""
        return self._set_pinned(key, True)

    def unpin(self, key: K) -> bool:
        """Makes a value evictable again; what exceeds a bound goes at once. False if it is not here."""
        return self._set_pinned(key, False)

    def evict(self, key: K) -> bool:
        """Drops a value, pinned or not. False if it is not here."""
        if key not in self._slots:
            return False
        self._drop(key)
        return True

    def clear(self) -> None:
        """Drops everything, pins included."""
        for key in list(self._slots):
            self._drop(key)

    def _set_pinned(self, key: K, pinned: bool) -> bool:
        slot = self._slots.get(key)
        if slot is None:
            return False
        self._pinned += pinned - slot.pinned
        slot.pinned = pinned
        self._shrink(keep=next(reversed(self._slots)))
        return True

    def _over(self) -> bool:
        return len(self._slots) > self.max_entries or (self.max_bytes is not None and self._nbytes > self.max_bytes)

    def _shrink(self, keep: K) -> None:
        loose = [key for key, slot in self._slots.items() if not slot.pinned and key != keep] if self._over() else []
        for key in loose:
            if not self._over():
                break
            self._drop(key)
            self.evictions += 1
        if self._over() and self._pinned and not self._warned:
            self._warned = True
            message = (
                f"{len(self._slots)} graphs, {self._pinned} of them pinned, hold {self._nbytes} bytes, above "
                f"max_entries={self.max_entries} or max_bytes={self.max_bytes}. Pinned graphs are kept; raise the "
                "bound, or unpin() what is no longer visited."
            )
            try:
                warnings.warn(message, GraphReplayWarning, stacklevel=2)
            except GraphReplayWarning:  # under -W error; the call in hand must not lose its result by it
                logger.warning(message)

    def _drop(self, key: K) -> None:
        slot = self._slots.pop(key)
        self.newest_key = self.newest = None
        self._nbytes -= slot.nbytes
        self._pinned -= slot.pinned
        self._on_evict(slot.value)

    def check_valid(self) -> None:
        """Asserts every invariant; for tests."""
        slots = self._slots.values()
        assert self._nbytes == sum(slot.nbytes for slot in slots)
        assert self._pinned == sum(slot.pinned for slot in slots)
        loose = [key for key, slot in self._slots.items() if not slot.pinned]
        if self.newest_key is not None:
            last = next(reversed(self._slots))
            assert (last, self._slots[last].value) == (self.newest_key, self.newest)
        assert not (self._over() and len(loose) > 1), "a bound is exceeded though something evictable is left"
