"""Locks that the child of a fork finds free."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

_locked: WeakSet[Locked] = WeakSet()


class Locked:
    """Has a lock, which is a new one in the child of a fork: no thread is left there that could let go of it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _locked.add(self)


def _renew() -> None:
    for owner in _locked:
        owner.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)
