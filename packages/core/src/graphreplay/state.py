"""What a graphed forward keeps between calls, and how it ends."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Self

from torch import Tensor

from graphreplay.ambient import Ambient
from graphreplay.cache import LRUCache
from graphreplay.churn import ChurnGuard
from graphreplay.entry import Entry
from graphreplay.errors import ClosedError, ForkedError, NotCopyableError
from graphreplay.hooks import BackendHooks
from graphreplay.peers import NoPeers
from graphreplay.plan import Plan
from graphreplay.request import Key, Request
from graphreplay.signature import Signature
from graphreplay.stats import Stats, logger
from graphreplay.together import Failure
from graphreplay.weights import ModuleWatch

MAX_REFUSED = 1024
"""Keys that are remembered as not graphable; the oldest goes first."""


class _Forks:
    """How often this process is the child of a fork: asking the system for its number costs more."""

    count = 0

    def add(self) -> None:
        self.count += 1


forks = _Forks()
os.register_at_fork(after_in_child=forks.add)


def free(entry: Entry) -> None:
    """Frees an evicted graph. Whoever evicts it has a call in hand that is right, or more graphs to free."""
    try:
        entry.free()
    except Exception as error:  # as text: a handler may keep what it is given, and an error keeps the graph
        logger.warning("a graph could not be freed: %s: %s", type(error).__name__, str(error))


class GraphStore(BackendHooks):
    """The graphs of one wrapper with all that is known about them. Methods that change it hold the pool's lock."""

    disabled_reason: str | None
    """Why calls run eagerly from now on, or None."""

    peers: NoPeers
    """The other ranks of its group."""

    warmup_iters: int
    clone_outputs: bool
    _capture_context: Callable[[], AbstractContextManager[Any]]
    _flatten: Callable[[Any], tuple[Signature, list[Tensor]]]
    """The key of a kwargs tree for this forward and device, and the tensors to stage."""

    def _open_store(self, max_entries: int, max_bytes: int | None) -> None:
        self._ambient = Ambient(self.device.type)
        self._watch: ModuleWatch | None = None
        self._plans: tuple[Plan, ...] = ()
        """Of the latest replays, the latest first. Only ever replaced, since calls read it without the lock."""
        self._cache: LRUCache[Hashable, Entry] = LRUCache(max_entries, max_bytes, free)
        self._refused: OrderedDict[Hashable, str] = OrderedDict()
        self._churn = ChurnGuard()
        self._last: Key | None = None
        self._stats = Stats(self.name)
        self._forks = forks.count
        self._closed = False

    @property
    def enabled(self) -> bool:
        """Whether calls may be captured and replayed."""
        return self.disabled_reason is None

    @property
    def captures(self) -> int:
        """How many graphs were captured so far."""
        return self._stats.captures

    @property
    def num_graphs(self) -> int:
        """How many graphs are kept now."""
        return len(self._cache)

    def stats(self) -> dict[str, Any]:
        """A plain dict: ``graphs``, ``pinned`` and ``bytes`` kept now; ``captures``, ``replays``, ``verified``
        (replays that were compared with eager), ``evictions``, ``misses`` and ``eager_calls`` so far; ``miss_reasons``
        and ``eager_reasons`` by count; ``enabled`` and ``disabled_reason``."""
        with self.pool.lock:
            return {
                "graphs": len(self._cache),
                "pinned": self._cache.pinned,
                "bytes": self._cache.nbytes,
                "captures": self._stats.captures,
                "replays": self._stats.replays,
                "verified": self._stats.verified,
                "evictions": self._cache.evictions,
                "misses": self._stats.miss_reasons.total(),
                "eager_calls": self._stats.eager_reasons.total(),
                "miss_reasons": dict(self._stats.miss_reasons),
                "eager_reasons": dict(self._stats.eager_reasons),
                "enabled": self.enabled,
                "disabled_reason": self.disabled_reason,
            }

    def disable(self, reason: str) -> None:
        """Drops every graph; all calls run eagerly from now on. The first reason stays."""
        with self.pool.lock:
            if self.disabled_reason is None:
                self.disabled_reason = reason
                logger.warning("%s captures no more: %s", self.name, reason)
                self.peers.leave(reason)
            self._drop_graphs()

    def reset(self) -> None:
        """Drops every graph, pins included, and forgets which calls were refused. A disabled wrapper stays disabled."""
        with self.pool.lock:
            self._drop_graphs()

    def close(self) -> None:
        """Drops every graph; calls raise ClosedError from now on. Closing again does nothing."""
        with self.pool.lock:
            self._closed = True
            self._drop_graphs()
            self.peers.close()

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.disabled_reason or f"{len(self._cache)} graphs"
        return f"<{type(self).__name__} {self.name} on {self.device}: {state}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # deepcopy, copy and pickle all come here.
        raise NotCopyableError(
            f"{self.name} cannot be copied or pickled: its graphs hold addresses of this process. Copy .module, and "
            "wrap the copy"
        )

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name} was closed; build another GraphedForward")
        if self._forks != forks.count:
            raise ForkedError(
                f"{self.name} was built before this process was forked, and device graphs do not survive a fork; build "
                "another GraphedForward in this process"
            )

    def _watched(self, *, fresh: bool = False) -> ModuleWatch:
        """The watch over the module as it was when its present graphs were captured."""
        watch = self._watch
        if watch is None or fresh:
            with self.pool.lock:
                if self._watch is not None and fresh and self._watch.changed():
                    self._clear()
                if self._watch is None:
                    self._watch = ModuleWatch(self.module, self.sight_of)
                watch = self._watch
        return watch

    def _clear(self) -> None:
        self._cache.clear()
        self._watch = None
        self._plans = ()
        try:
            self._release_memory()
        except Exception as error:  # the graphs are gone all the same
            logger.warning("memory of graphs could not be given back: %s: %s", type(error).__name__, str(error))

    def _what_is_new(self, key: Key) -> str:
        return "first capture" if self._last is None else key.news_since(self._last, self._ambient)

    def _refuse(self, key: Hashable, reason: str) -> None:
        """Notes that calls of this key run eagerly; the oldest such note goes when there are too many."""
        self._refused[key] = reason
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        logger.warning("%s does not capture such a call: %s", self.name, reason)

    def _missed(self, request: Request, changed: str | None) -> str | None:
        """Counts a miss, or says why such a call is not captured."""
        reason = self._refused.get(request.key)
        if reason is None and not request.ahead:
            reason = self._churn.refusal(request.key.signature)
        if reason is None:
            self._stats.miss(changed or self._what_is_new(request.key))
        return reason

    def _settle(self, failure: Failure, request: Request) -> None:
        """Draws the conclusion from a capture that failed, as severe as it is."""
        logger.debug("%s keeps no graph of a call: %s", self.name, str(failure))  # a handler may keep an error
        if failure.severity == "refuse":
            self._refuse(request.key, str(failure))
        elif failure.severity == "disable":
            self.disable(str(failure))

    def _keep(self, entry: Entry, request: Request) -> None:
        """Takes in the graph of a request, or refuses the request if the graph alone is too large."""
        self._stats.captures += 1
        # Those of the key were made for another graph, of which other things held.
        self._plans = tuple(plan for plan in self._plans if plan.key != request.key)
        what_is_new = self._what_is_new(request.key)
        self._last = request.key
        bound = self._cache.max_bytes
        if bound is not None and entry.nbytes > bound and not request.options.pin:
            free(entry)
            self._refuse(request.key, f"the graph alone holds {entry.nbytes} bytes, above max_bytes={bound}")
            return
        if not request.options.pin and not request.ahead:
            varying = self._churn.captured(request.key.signature)
            if varying is not None:
                logger.warning("%s: %s is new on every call; further values of it run eagerly", self.name, varying)
        self._cache.put(request.key, entry, entry.nbytes, pin=request.options.pin)
        evictions, replays = self._cache.evictions, self._stats.replays
        if evictions >= 2 * self._cache.max_entries and replays < self._stats.captures:
            self._stats.thrash(
                f"{evictions} graphs were evicted and only {replays} calls replayed one; lately {what_is_new}. "
                "Raise max_entries or max_bytes, or pad what varies to a few sizes"
            )

    def _drop_graphs(self) -> None:
        self._clear()
        self._refused.clear()
        self._churn = ChurnGuard()
        self._last = None
