"""Counters, and the reasons behind every miss and every eager call."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger("graphreplay")

MAX_REASONS = 256
"""Distinct reasons that are kept apart; what comes later is counted as "other reasons"."""


class Stats:
    """What one graphed forward did. ``logger`` hears each distinct eager reason once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.captures = 0
        self.replays = 0
        self.verified = 0
        self._thrashed = False
        self.eager_reasons: Counter[str] = Counter()
        self.miss_reasons: Counter[str] = Counter()

    def eager(self, reason: str) -> None:
        if self._count(self.eager_reasons, reason):
            logger.warning("%s runs eagerly: %s", self._name, reason)

    def miss(self, reason: str) -> None:
        if self._count(self.miss_reasons, reason):
            logger.debug("%s misses: %s", self._name, reason)

    def thrash(self, what: str) -> None:
        """Warns, once, that graphs are evicted faster than they pay."""
        if not self._thrashed:
            self._thrashed = True
            logger.warning("%s thrashes: %s", self._name, what)

    @staticmethod
    def _count(reasons: Counter[str], reason: str) -> bool:
        """Counts a reason, and tells whether it is a new one."""
        new = reason not in reasons
        if new and len(reasons) >= MAX_REASONS:
            reasons["other reasons"] += 1
            return False
        reasons[reason] += 1
        return new
