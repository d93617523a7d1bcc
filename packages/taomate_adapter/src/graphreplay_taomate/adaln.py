"""Captures without the AdaLN memo.

A DiT keeps an exact memo of its conditioning projections in ``adaln_cache``. Each forward has the memo digest the time
embedding on the host, which no capture may do; with ``max_bytes`` at 0 the memo neither digests nor answers, and the
forward computes its projections, on the device and inside the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import MemberDescriptorType
from typing import Any

import torch

import graphreplay
from graphreplay.behind import modules_behind

ATTRIBUTE = "adaln_cache"


@contextmanager
def capture_context(module: Any) -> Iterator[None]:
    """Bypasses the AdaLN memos of a module in its body; afterwards they are as before, whatever the body did.

    A memo is what the attribute ``adaln_cache`` holds, if that has a ``max_bytes``. It is looked for on ``module``
    itself, on every submodule, and on the modules that a bound method, a partial, a closure or a graphed forward leads
    to, those among a module's attributes included. A module without one is left alone.

    Contexts of one memo may be nested, or overlap in several threads: the first one in bypasses it, the last one out
    restores it. A forward that another thread runs meanwhile computes its projections as well.

    A memo is told to forget the embedding prepared last, by ``prepare`` of an empty one. Where it refuses that, its
    budget of 0 alone keeps it out.

    Raises:
        Exception: whatever a memo raises when its budget is set; those that were bypassed already are restored.
    """
    with ExitStack() as stack:
        for memo in _memos(module):
            stack.enter_context(_bypassed(memo))
        yield


def _memos(module: Any) -> list[Any]:
    """The AdaLN memos that a forward of this module may use, each once."""
    found = {id(holder): holder for holder in (getattr(module, ATTRIBUTE, None),)}
    pending, seen = modules_behind(module), set()
    while pending:
        for part in pending.pop().modules():
            if part in seen:
                continue
            seen.add(part)
            memo = getattr(part, ATTRIBUTE, None)
            found[id(memo)] = memo
            nested = [value for value in vars(part).values() if isinstance(value, graphreplay.GraphedForward)]
            pending += [inner for value in nested for inner in modules_behind(value)]
    return [memo for memo in found.values() if hasattr(memo, "max_bytes")]


class _Bypass:
    """A memo that is bypassed now, and how many contexts hold it so."""

    def __init__(self, memo: Any) -> None:
        self.holders = 0
        self._memo = memo
        self._changed: dict[str, Any] = {}

    def begin(self) -> None:
        before, budget = _attributes(self._memo), self._memo.max_bytes
        try:
            self._memo.max_bytes = 0
            if hasattr(self._memo, "prepare"):
                # It forgets the embedding of the forward before. Were it to do so in the forward that is captured, that
                # would be Python state that the forward changes, which no capture allows.
                with suppress(Exception):  # it may look closer at an embedding: then the budget alone has to do
                    self._memo.prepare(torch.empty(0, device="cpu"))
            self._note(before, budget)
        except BaseException:
            self._note(before, budget)
            self.end()
            raise

    def _note(self, before: dict[str, Any], budget: Any) -> None:
        after = _attributes(self._memo)
        names = [name for name in before | after if before.get(name, _ABSENT) is not after.get(name, _ABSENT)]
        self._changed = {name: before.get(name, _ABSENT) for name in names}
        self._changed.setdefault("max_bytes", budget)  # it may be a property

    def end(self) -> None:
        """Sets back what ``begin`` has changed."""
        for name, was in self._changed.items():
            if was is _ABSENT:
                if name in _attributes(self._memo):
                    delattr(self._memo, name)
            elif getattr(self._memo, name, _ABSENT) is not was:
                setattr(self._memo, name, was)


_ABSENT = object()


def _attributes(memo: Any) -> dict[str, Any]:
    """What an object's own attributes are bound to, those in ``__slots__`` too."""
    found = dict(getattr(memo, "__dict__", {}))
    for cls in type(memo).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType) and hasattr(memo, member.__name__):
                found[name] = member.__get__(memo)
    return found


_lock = threading.RLock()
_bypasses: dict[int, _Bypass] = {}
"""By the id of the memo, which its bypass keeps alive."""


@contextmanager
def _bypassed(memo: Any) -> Iterator[None]:
    with _lock:
        bypass = _bypasses.get(id(memo))
        if bypass is None:
            bypass = _Bypass(memo)
            bypass.begin()
            _bypasses[id(memo)] = bypass
        bypass.holders += 1
    try:
        yield
    finally:
        with _lock:
            bypass.holders -= 1
            if not bypass.holders:
                del _bypasses[id(memo)]
                bypass.end()
