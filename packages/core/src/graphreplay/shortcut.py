"""The short cut of a call: from its kwargs to the outputs of a replay, where a plan knows its key.

It asks what the road in forward.py asks, but builds no key, and leaves out what calls of such a graph never need. Each
line here is paid for in every call. Where anything is out of the ordinary it has changed nothing, and the road decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import call as run
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from graphreplay.capture import describe, thread
from graphreplay.entry import Entry
from graphreplay.plan import MAX_PLANS, Plan
from graphreplay.request import CallOptions, Request, share_nothing
from graphreplay.state import GraphStore, forks
from graphreplay.stats import logger


class ShortCut(GraphStore):
    """Replays calls like recent ones."""

    _check_module: bool
    _nvtx: bool

    def _call(self, kwargs: dict[str, Any], options: CallOptions) -> Any:
        plans = self._plans  # none once it is closed or disabled
        if (
            plans
            and self._forks == forks.count
            and not is_dynamo_compiling()
            and not thread.capturing
            and not self._is_capturing()
        ):
            state = tuple(map(run, self._ambient.readers))
            for plan in plans:
                leaves = plan.match(state, kwargs, options.variant)
                if leaves is not None:
                    hit = self._hit if not self._nvtx else self._marked_hit
                    answer = hit(plan, leaves, options)
                    if answer is not None:
                        return answer[0]
                    break
        return self._go(kwargs, options)

    def _hit(self, plan: Plan, leaves: Sequence[Tensor], options: CallOptions) -> tuple[Any] | None:
        """Replays for a call that a plan has recognized, and returns the outputs in a tuple; or None where the road has
        to decide, which then finds everything as it was."""
        addresses, watch, peers = list(map(Tensor.data_ptr, leaves)), self._watch, self.peers
        if (
            watch is None
            or not all(addresses)
            or (plan.grad_mode and watch.requires_grad())
            or forward_ad._current_level >= 0
        ):
            return None
        if not peers.alone:
            peers.check()
        with self.pool.lock:
            cache = self._cache
            entry = cache.newest if cache.newest_key is plan.key else cache.get(plan.key)
            if entry is None or plan not in self._plans:  # by another thread, while this one waited for its turn
                return None
            if not entry.reads_only and not share_nothing(leaves, watch):
                return None
            # Where the call can be done over, the host looks at the module while the device works.
            harmless = entry.repeatable and not self.pool.lends
            if not harmless and self._check_module and not watch.is_untouched() and watch.changed():
                return None
            try:
                self._take_turn()
                outputs = entry.allocate()
            except Exception:
                return None
            try:
                entry.launch(leaves, addresses, outputs)
            except Exception as error:
                self.disable(f"replay failed: {describe(error)}")
                if not harmless:
                    raise
                return None
            if harmless and self._check_module and not watch.is_untouched() and watch.changed():
                return None
            if not peers.alone:
                peers.next_call()
            entry.replays += 1
            self._stats.replays += 1
            if options.pin:
                cache.pin(plan.key)
            if plan is not self._plans[0]:
                self._promote(plan)
            return (entry.rebuild(outputs),)

    def _marked_hit(self, plan: Plan, leaves: Sequence[Tensor], options: CallOptions) -> tuple[Any] | None:
        with self._range("replay"):
            return self._hit(plan, leaves, options)

    def _go(self, kwargs: dict[str, Any], options: CallOptions) -> Any:
        """The road."""
        raise NotImplementedError

    def _plan(self, entry: Entry, request: Request) -> None:
        """Has calls like this one take the short cut."""
        state, kwargs, variant = request.state, request.kwargs, request.options.variant
        if any(plan.key is entry.key and plan.match(state, kwargs, variant) for plan in self._plans):
            return  # it did try the short cut, and may not take it
        try:
            plan = Plan(entry.key, self._ambient, state, kwargs, variant, request.leaves)
        except ValueError as error:
            entry.is_plain = False  # and no later call tries again, which takes half of what its key takes
            logger.debug("%s builds the key of each such call: %s", self.name, str(error))
        else:
            self._promote(plan)

    def _promote(self, plan: Plan) -> None:
        """Has calls be compared with this plan first."""
        self._plans = (plan, *[other for other in self._plans if other is not plan])[:MAX_PLANS]
