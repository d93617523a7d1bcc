"""The road: the way of a call from kwargs to outputs.

    kwargs ─► signature ─► cache ─┬─ hit ──► stage inputs ─► replay ─► outputs
                                  ├─ miss ─► forward once, eagerly: the call's own result ─► capture for the next call
                                  └─ not graphable ─► eager, with a reason that is counted and logged

It is ``_call``, ``_request``, ``_look_up``, ``_replay`` and ``_capture``, in that order below; ``_hit`` is a short cut
for calls like recent ones. A platform overrides the hooks in hooks.py and never repeats the road. What users call is in
forward.py, captures ahead of calls in upkeep.py, and what a wrapper keeps between calls in state.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from operator import call as run
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from graphreplay.ambient import eager_only
from graphreplay.capture import (
    body_error_wins,
    build_entry,
    capturing_here,
    describe,
    quiet_capture,
    thread,
    warm_ups,
)
from graphreplay.entry import Entry, NoMemoryError
from graphreplay.errors import CaptureError, RankDisagreementError, StateLostError, UnsupportedLeafError
from graphreplay.plan import MAX_PLANS, Plan
from graphreplay.request import CallOptions, Request, keyed, share_nothing
from graphreplay.state import GraphStore, forks, free
from graphreplay.stats import logger
from graphreplay.storage import any_freed
from graphreplay.together import Alone, Failure
from graphreplay.verify import EagerTwin


class Road(GraphStore):
    """Calls the forward, or replays a graph of it."""

    _verify: str
    _check_module: bool
    _nvtx: bool

    def _call(self, kwargs: dict[str, Any], options: CallOptions) -> Any:
        peers, call, answer = self.peers, "", None
        if (
            self._plans  # none where it is closed or disabled
            and self._forks == forks.count
            and not is_dynamo_compiling()
            and not thread.capturing
        ):
            state = tuple(map(run, self._ambient.readers))
            for plan in self._plans:
                leaves = plan.match(state, kwargs, options.variant)
                if leaves is not None:
                    if not peers.alone:
                        if self._is_capturing():  # such calls are not counted
                            break
                        peers.check()
                        call = peers.next_call()
                    answer = self._hit(plan, leaves, kwargs, options)
                    if type(answer) is tuple:
                        return answer[0]
                    break
        self._check_usable()
        if capturing_here() or self._is_capturing():
            # Someone else's graph takes this forward in; it is part of that graph, and none of ours is touched.
            with body_error_wins(self._capture_context):
                return self._eager(kwargs, "called inside another capture")
        if not peers.alone:
            peers.check()
        if self.disabled_reason is not None:
            return self._eager(kwargs, self.disabled_reason)
        call = call or peers.next_call()
        try:
            request = answer if isinstance(answer, Request) else self._request(kwargs, options)
        except BaseException as error:
            peers.excuse(call, f"its call raised {type(error).__name__}: {error}")
            raise
        if isinstance(request, str):
            peers.excuse(call, request)
            return self._eager(kwargs, request)
        changed = answer if isinstance(answer, str) else None
        with self.pool.lock:
            found = self._look_up(request, changed)
            answer = self._replay(found, request) if isinstance(found, Entry) else found
            if isinstance(answer, tuple):
                return answer[0]
            if answer is None:
                try:
                    result = self.module(**kwargs)
                except BaseException as error:
                    self.peers.excuse(call, f"its forward raised {type(error).__name__}: {error}")
                    raise
                # The forward may have called, disabled or closed this very wrapper.
                if self.enabled and not self._closed and self._cache.get(request.key) is None:
                    self._capture(request, call)
                return result
        self.peers.excuse(call, answer)
        return self._eager(kwargs, answer)

    def _hit(
        self, plan: Plan, leaves: Sequence[Tensor], kwargs: dict[str, Any], options: CallOptions
    ) -> tuple[Any] | Request | str | None:
        """The short cut: replays for a call that a plan has recognized, and returns the outputs in a tuple.

        It asks what the road asks, but for what no call of a plain graph needs. Each line is paid for in every call.

        Returns:
            Otherwise, for the road to go on with: the request, what has changed of the module (the graphs are dropped
            then), or None.
        """
        watch = self._watch
        if watch is None or (plan.grad_mode and watch.requires_grad()) or forward_ad._current_level >= 0:
            return None
        with self.pool.lock:
            cache = self._cache
            entry = cache.newest if cache.newest_key is plan.key else cache.get(plan.key)
            if entry is None or plan not in self._plans:  # by another thread, while this one waited for its turn
                return None
            plain = entry.is_plain and self._verify != "always" and not self._nvtx
            if not (plain and entry.reads_only) and not share_nothing(leaves, watch):
                return None
            if not plain:
                return self._recognized(plan, leaves, kwargs, options)
            try:
                outputs = entry.allocate() if self._has_turn() else None
            except Exception:
                return None  # the road knows what to do if this goes on
            if outputs is None:  # another stream than the call's before, or a capture of someone else's
                apart = not entry.reads_only or share_nothing(leaves, watch)
                return self._recognized(plan, leaves, kwargs, options) if apart else None
            harmless = entry.repeatable and not self.pool.lends  # as _can_do_over says
            if not harmless and self._check_module and not watch.is_untouched():
                changed = self._drop_if_changed()
                if changed is not None:
                    return changed
            try:
                entry.launch(leaves, outputs)
                if harmless and self._check_module and not watch.is_untouched():
                    changed = self._drop_if_changed()
                    if changed is not None:
                        return changed
                result = entry.rebuild(outputs)
            except NoMemoryError:
                return None  # the key says which
            except Exception as error:
                self.disable(f"replay failed: {describe(error)}")
                if not harmless:
                    raise
                return None
            entry.replays += 1
            self._stats.replays += 1
            if options.pin:
                cache.pin(plan.key)
            if plan is not self._plans[0]:
                self._promote(plan)
            return (result,)

    def _recognized(
        self, plan: Plan, leaves: Sequence[Tensor], kwargs: dict[str, Any], options: CallOptions
    ) -> Request | None:
        """The request of a call that a plan has recognized, or None where a kwarg has no memory."""
        return None if any_freed(leaves) else Request(kwargs, options, leaves, plan.key, plan.state)

    def _request(self, kwargs: dict[str, Any], options: CallOptions, *, ahead: bool = False) -> Request | str:
        """What a graph for this call is looked up by, or why no graph may serve it."""
        if torch.compiler.is_compiling():
            return "torch.compile is tracing the call"
        watch = self._watch or self._watched()
        return watch.refusal or eager_only() or keyed(self, kwargs, options, watch, ahead)

    def _look_up(self, request: Request, changed: str | None = None) -> Entry | str | None:
        """The graph for a request, None for a miss that may be captured, or why it runs eagerly.

        Args:
            changed: what of the module turned out to have changed in this call already.
        """
        if self._closed or self.disabled_reason is not None:  # by another thread, while this one waited for its turn
            self._check_usable()
            return self.disabled_reason
        try:
            self._take_turn()
        except Exception as error:
            self.disable(f"the current stream cannot be ordered behind the graphs': {describe(error)}")
            return self.disabled_reason
        entry = self._cache.get(request.key)
        if entry is None or (self._check_module and not self._can_do_over(entry)):
            changed = changed or self._drop_if_changed()
            if changed is not None:
                return self._missed(request, changed)
        if entry is None:
            return self._missed(request, None)
        return entry.refusal(request.leaves) or entry

    def _replay(self, entry: Entry, request: Request) -> tuple[Any] | str | None:
        """Replays, and returns the outputs in a tuple; or, if the module turns out to have changed, what ``_look_up``
        says without this graph."""
        eager = None
        if self._verify == "always" or (self._verify == "first" and not entry.replays):
            changed = self._drop_if_changed()  # what the graph may change belongs to the module as it was
            if changed is not None:
                return self._missed(request, changed)
            try:
                eager = EagerTwin(self, entry, request, self._watched())
            except Failure as failure:
                logger.debug("%s does not compare a call: %s", self.name, str(failure))
            except CaptureError as error:
                self.disable(f"verify failed: {error}")
                return self.disabled_reason
            if self._closed or self.disabled_reason is not None or self._cache.get(request.key) is not entry:
                return "the forward has dropped its own graph while it was compared"
        harmless = True  # whether an eager call can make up for what fails
        with self._range("replay") if self._nvtx else nullcontext():
            try:
                dense, outputs = entry.stage(request.leaves)
                harmless = self._can_do_over(entry)  # any other replay may write half of what it writes
                entry.launch(dense, outputs)
                # The host looks at the module while the device works. What such a graph has computed from weights that
                # moved is dropped; any other one had to wait for this check.
                changed = self._drop_if_changed() if harmless and self._check_module else None
                if changed is not None:
                    return self._missed(request, changed)
                harmless = harmless and not entry.written
                result = entry.hand_out(request.leaves, outputs)
            except NoMemoryError as error:
                return str(error)
            except Exception as error:
                self.disable(f"replay failed: {describe(error)}")
                if not harmless:
                    raise
                return self.disabled_reason
        if eager is not None:
            self._stats.verified += 1
            difference = eager.difference(result)
            if difference is not None:
                self.disable(f"a replay differs from eager: {difference}; the graph cannot be trusted")
                self._stats.eager(str(self.disabled_reason))
                return (eager.take_over(),)
        self._stats.replays += 1
        if entry.replays == 1:
            self._churn.replayed(request.key.signature)
        if request.options.pin:
            self._cache.pin(request.key)
        if entry.plannable:
            self._plan(entry, request)
        return (result,)

    def _can_do_over(self, entry: Entry) -> bool:
        """Whether a call can run eagerly after its replay, as if that had not been."""
        return entry.repeatable and not self.pool.lends

    def _plan(self, entry: Entry, request: Request) -> None:
        """Has calls like this one be recognized."""
        state, kwargs, variant = request.state, request.kwargs, request.options.variant
        if any(plan.key is entry.key and plan.match(state, kwargs, variant) for plan in self._plans):
            return  # it was
        if any(map(Tensor.is_neg, request.leaves)) or any(map(Tensor.is_conj, request.leaves)):
            return  # of those to come, most will hold their values as they are
        try:
            plan = Plan(entry.key, self._ambient, state, kwargs, variant, request.leaves, self.looks_of)
        except ValueError as error:
            entry.plannable = False  # and no later call tries again, which takes half of what its key takes
            logger.debug("%s builds the key of each such call: %s", self.name, str(error))
        else:
            self._promote(plan)

    def _promote(self, plan: Plan) -> None:
        """Has calls be compared with this plan first."""
        self._plans = (plan, *[other for other in self._plans if other is not plan])[:MAX_PLANS]

    def _drop_if_changed(self) -> str | None:
        """Drops all graphs if the module has changed since they were captured, and says what changed."""
        changed = (self._watch or self._watched()).changed()
        if changed is not None:
            self._clear()
        return changed

    def _capture(self, request: Request, call: str) -> str | None:
        """Adds a graph for the request, or says why it did not.

        Never raises for a fault of the forward or the device: a request that cannot be keyed or copied is refused, and
        any other failure disables the wrapper, on all ranks alike.

        Raises:
            RankDisagreementError: the ranks are out of step.
            StateLostError: what the forward wrote meanwhile could not be put back.
        """
        watch = self._watched(fresh=True)  # the eager forward may have created weights lazily
        ranks, entry, failure, lost = self._ranks(request, call), None, None, None
        try:
            marked = self._range("capture") if self._nvtx else nullcontext()
            with marked, quiet_capture(self.device, alone=ranks.alone, ahead=request.ahead):
                entry = build_entry(self, request, watch, ranks)
        except Failure as error:
            failure = error.with_traceback(None)
        except UnsupportedLeafError as error:
            failure = Failure("refuse", str(error))
        except StateLostError as error:
            lost, failure = error, Failure("disable", str(error))
        except RankDisagreementError as error:
            self._break_off(ranks, str(error))
            raise
        except Exception as error:
            failure = Failure("disable", describe(error))
        except BaseException:
            self._break_off(ranks, "this rank was interrupted in a capture")
            raise
        if entry is not None and (self._closed or self.disabled_reason is not None):
            failure = Failure("skip", "the forward has closed or disabled its wrapper")  # while it was captured
        try:
            failure = ranks.agree(failure)
        except BaseException as error:
            if entry is not None:
                free(entry)
            self._break_off(ranks, str(error) or "this rank was interrupted after a capture")
            raise
        if failure is None:
            assert entry is not None
            self._keep(entry, request)
        else:
            if entry is not None:
                free(entry)
            self._settle(failure, request)
        if lost is not None:
            try:
                raise lost
            finally:
                del lost  # or this frame and the error keep each other, and the wrapper, until a collection
        return None if failure is None else str(failure)

    def _break_off(self, ranks: Alone, reason: str) -> None:
        """Gives up on ranks that are out of step."""
        if not ranks.alone:
            self._cache.clear()  # NCCL waits for the graphs that hold its collectives
            ranks.break_off(reason)
            self.disable(reason)

    def _ranks(self, request: Request, call: str) -> Alone:
        """Those who capture with this one."""
        holds = f"{len(self._cache)} graphs, max_entries={self._cache.max_entries}, max_bytes={self._cache.max_bytes}"
        count = warm_ups(self, request)
        return self.peers.together(call, request.key, holds, count, captures_run=self.captures_run)

    def _eager(self, kwargs: dict[str, Any], reason: str) -> Any:
        self._stats.eager(reason)
        return self.module(**kwargs)
