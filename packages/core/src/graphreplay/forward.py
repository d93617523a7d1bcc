"""GraphedForward: the way of a call from kwargs to outputs.

    kwargs ─► signature ─► cache ─┬─ hit ──► stage inputs ─► replay ─► outputs
                                  ├─ miss ─► forward once, eagerly: the call's own result ─► capture for the next call
                                  └─ not graphable ─► eager, with a reason that is counted and logged

The road is ``_call``, ``_request``, ``_look_up``, ``_replay`` and ``_capture``, in that order below; ``_hit`` is a
short cut for calls like recent ones. A platform overrides the hooks in hooks.py and never repeats the road. Captures
ahead of calls are in upkeep.py, and what a wrapper keeps between calls in state.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import call as run
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from graphreplay import upkeep
from graphreplay.ambient import eager_only
from graphreplay.arguments import check_arguments, check_deadline, check_flags, check_verify, parse_device
from graphreplay.bound import BoundForward
from graphreplay.capture import (
    body_error_wins,
    build_entry,
    capturing_here,
    describe,
    quiet_capture,
    thread,
    warm_ups,
)
from graphreplay.entry import Entry
from graphreplay.errors import (
    CaptureError,
    PositionalArgumentError,
    RankDisagreementError,
    StateLostError,
    UnsupportedLeafError,
)
from graphreplay.peers import peers_of
from graphreplay.plan import MAX_PLANS, Plan
from graphreplay.pool import GraphPool
from graphreplay.request import (
    NO_OPTIONS,
    CallOptions,
    Request,
    keyed,
    kwargs_named_as_options,
    order_shows_below,
    share_nothing,
)
from graphreplay.signature import flatten
from graphreplay.state import GraphStore, forks, free
from graphreplay.stats import logger
from graphreplay.together import Alone, Failure
from graphreplay.verify import EagerTwin

DISABLE_VARIABLE = "GRAPHREPLAY_DISABLE"
"""Environment variable that turns all graphs off, unless it is empty or 0; read when a wrapper is built."""


class GraphedForward(GraphStore):
    """Calls a keyword-only forward, and replays it as one device graph for shapes that it has seen before.

    A call returns what ``module(**kwargs)`` returns, in tensors that the caller owns. The first call of a shape runs
    eagerly and captures afterwards; later ones replay. Where a graph cannot give the eager result the call runs
    eagerly, and ``stats()`` says why. Thread-safe.

    This base class supports no device: ``enabled`` is False and calls are plain forwards. Take the class for a device
    from ``get_graphed_forward_cls``.

    Args:
        module: an ``nn.Module`` or any callable that takes keywords only.
        device: where the module and its tensor kwargs live.
        max_entries: how many graphs to keep, at least 1; the least recently used goes first.
        max_bytes: bytes to keep, as ``stats()`` counts them, or None for no such bound: static inputs, and what each
            capture added to the pool. What an evicted graph leaves in its pool serves later captures, and goes back to
            the device with the pool's last graph.
        warmup_iters: forwards before a capture beside the call's own, at least 1; the first one runs under the
            host-sync probe. ``prepare``, which has no call of its own, runs one more.
        group: the process group whose collectives the forward runs. Its ranks build the wrapper alike and call it in
            the same order; they capture a shape together or not at all, over the store of torch.distributed.
        deadline: seconds that the ranks of a group wait for each other at each meeting of a capture: before its
            warm-up, before the capture itself, and after it.
        name: how logs and errors call this wrapper; the module's class by default.
        enabled: False makes every call a plain forward.
        capture_context: makes a context manager that surrounds warm-up and capture, to put the module into a state
            that can be captured. It is left before the first replay, and not entered for the call's own eager forward.
        pool: a GraphPool to share graph memory with other wrappers on the device, and of no other group.
        verify: compare the first replay of each graph, or every replay, with an eager run of the same call: bit for
            bit on a CPU, up to the rounding of the dtype elsewhere (``graphreplay.verify.ROUNDING``), with the same
            random numbers, and with all that the forward writes. If something differs, the call returns what eager
            gave, and the wrapper is disabled with a reason that says what. Not for groups of several ranks.
        check_module: look at each replay whether weights, buffers, submodules, hooks and modes are those of the
            capture. False: the caller knows, and calls ``reset()`` after moving, replacing or switching any of them;
            updating weights in place needs neither. Misses, ``prepare`` and compared replays look all the same.
        clone_outputs: hand outputs out in tensors that the caller owns. False: in the graph's own, which the next call
            of any wrapper on the pool overwrites, and which must not be changed; the caller's own all the same where
            the forward writes or returns its inputs. Passing them in again, as in ``y = graphed(x=y)``, is right.
        nvtx: mark captures and replays as ranges for a profiler.

    Raises:
        ConfigurationError: an argument is out of range (a ValueError).
        UnknownDeviceError: torch knows no such device type.
        BackendUnavailableError: this machine has no such device.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        *,
        device: torch.device | str,
        max_entries: int = 16,
        max_bytes: int | None = None,
        warmup_iters: int = 1,
        group: torch.distributed.ProcessGroup | None = None,
        deadline: float = 30.0,
        name: str | None = None,
        enabled: bool = True,
        capture_context: Callable[[], AbstractContextManager[Any]] | None = None,
        pool: GraphPool | None = None,
        verify: Literal["off", "first", "always"] = "off",
        check_module: bool = True,
        clone_outputs: bool = True,
        nvtx: bool = False,
    ) -> None:
        bounds = {"max_entries": max_entries, "warmup_iters": warmup_iters}
        if max_bytes is not None:
            bounds["max_bytes"] = max_bytes
        check_arguments(module, capture_context, pool, **bounds)
        check_flags(enabled=enabled, check_module=check_module, clone_outputs=clone_outputs, nvtx=nvtx)
        check_deadline(deadline)
        self.module = module
        self.device = self.resolve_device(parse_device(device))
        self.name = name or str(getattr(module, "__qualname__", type(module).__name__))
        self.warmup_iters = warmup_iters
        self.group = group
        self.peers = peers_of(group, self.name, self.device, deadline)
        check_verify(verify, self.peers.ranks)
        self.disabled_reason = self._why_off(enabled)
        self.pool = pool or GraphPool()
        self.pool.bind(self.device, self.peers.ranks)
        if not clone_outputs:
            self.pool.lends = True
        self._capture_context = capture_context or nullcontext
        self._verify = verify
        self._check_module = check_module
        self.clone_outputs = clone_outputs
        self._nvtx = nvtx
        self._named_as_options = kwargs_named_as_options(module)
        self._flatten = partial(flatten, ordered_below=order_shows_below(module), on_device=self.device.type != "cpu")
        self._open_store(max_entries, max_bytes)
        self.peers.forget(self)
        if self.disabled_reason is not None:
            self.peers.leave(self.disabled_reason)

    def _why_off(self, enabled: bool) -> str | None:
        if not enabled:
            return "built with enabled=False"
        if os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0"):
            return f"the environment variable {DISABLE_VARIABLE} is set"
        return self._graphs_supported()

    # ------------------------------------------------------------------------------------------ calls

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward with ``kwargs``, by a replay where one is at hand. Three kwargs are the wrapper's own:

        Args:
            variant: anything with a signature that names module state which the kwargs do not show (LoRA on or off).
            keep_alive: objects whose tensors the forward reads by address; they live as long as the graph that this
                call captures. Where other objects mean other results, name them in ``variant`` too.
            pin: exempt the graph of this call from eviction.

        Raises:
            PositionalArgumentError: a positional argument was given.
            ConfigurationError: ``keep_alive`` or ``pin`` is of another type, or the forward itself has a kwarg of one
                of the three names; see ``options``.
            UnsupportedLeafError: ``variant`` has no stable value.
            RankDisagreementError: the ranks of ``group`` are out of step, or one of them is gone.
            StateLostError: buffers could not be put back after a capture; the wrapper is disabled.
            ClosedError, ForkedError: the wrapper cannot be used any more, or not in this process.
            Exception: whatever the forward itself raises.
        """
        if args:
            raise PositionalArgumentError(
                f"{self.name} takes keyword arguments only, {len(args)} positional given; "
                "pass each by the name that the forward has for it, as in graphed(x=x)"
            )
        # No parameters of their own: Python compares each keyword of a call with the name of each, in every call.
        if "variant" in kwargs or "keep_alive" in kwargs or "pin" in kwargs:
            return self._call(kwargs, CallOptions.taken_from(kwargs, self._named_as_options))
        return self._call(kwargs, NO_OPTIONS)

    def options(self, *, variant: Any = None, keep_alive: tuple[Any, ...] = (), pin: bool = False) -> BoundForward:
        """The same calls with these options bound, for forwards whose own kwargs have one of the three names:
        ``graphed.options(pin=True)(pin=tensor)``."""
        return BoundForward(self, CallOptions(variant, keep_alive, pin))

    def prepare(self, **kwargs: Any) -> bool:
        """Captures the graph for such a call, with the options of that, without making one; kwargs, buffers and torch's
        generators end as they were. Grad mode, autocast and the like are part of the key: prepare under those of the
        calls to come.

        Returns:
            Whether a graph is there now. If not, ``stats()`` says why.

        Raises:
            ConfigurationError: as for a call.
            UnsupportedLeafError: ``variant`` has no stable value.
            Exception: whatever the forward itself raises.
        """
        return upkeep.prepare(self, kwargs, CallOptions.taken_from(kwargs, self._named_as_options))

    def unpin(self, **kwargs: Any) -> bool:
        """Makes the graph of such a call evictable, of the call's ``variant``. Returns False if there is none."""
        return upkeep.unpin(self, kwargs, CallOptions.taken_from(kwargs, self._named_as_options))

    def evict(self, **kwargs: Any) -> bool:
        """Drops the graph of such a call, pinned or not. Returns False if there is none."""
        return upkeep.evict(self, kwargs, CallOptions.taken_from(kwargs, self._named_as_options))

    # ------------------------------------------------------------------------------------------- road

    def _call(self, kwargs: dict[str, Any], options: CallOptions) -> Any:
        peers, call, answer = self.peers, "", None
        if (
            self._plans  # none where it is closed or disabled
            and self._forks == forks.count
            and not is_dynamo_compiling()
            and not thread.capturing
            and not self._is_capturing()
        ):
            state = tuple(map(run, self._ambient.readers))
            for plan in self._plans:
                leaves = plan.match(state, kwargs, options.variant)
                if leaves is not None:
                    if not peers.alone:
                        peers.check()
                        call = peers.next_call()
                    hit = self._hit if not self._nvtx else self._marked_hit
                    answer = hit(plan, leaves, kwargs, options)
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
        request = answer if isinstance(answer, Request) else self._request(kwargs, options)
        if not peers.alone:
            call = call or peers.next_call()
        if isinstance(request, str):
            self.peers.excuse(call, request)
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
        addresses, watch = list(map(Tensor.data_ptr, leaves)), self._watch
        if (
            watch is None
            or not all(addresses)
            or (plan.grad_mode and watch.requires_grad())
            or forward_ad._current_level >= 0
        ):
            return None
        with self.pool.lock:
            cache = self._cache
            entry = cache.newest if cache.newest_key is plan.key else cache.get(plan.key)
            if entry is None or plan not in self._plans:  # by another thread, while this one waited for its turn
                return None
            plain = entry.is_plain and self._verify != "always"
            if not (plain and entry.reads_only) and not share_nothing(leaves, watch):
                return None
            if not plain:
                return Request(kwargs, options, leaves, addresses, plan.key, plan.state)
            harmless = entry.repeatable and not self.pool.lends  # as _can_do_over says
            if not harmless and self._check_module and not watch.is_untouched():
                changed = self._drop_if_changed()
                if changed is not None:
                    return changed
            try:
                self._take_turn()
                outputs = entry.allocate()
            except Exception:
                return None  # the road knows what to do if this goes on
            try:
                entry.launch(leaves, addresses, outputs)
                if harmless and self._check_module and not watch.is_untouched():
                    changed = self._drop_if_changed()
                    if changed is not None:
                        return changed
                result = entry.rebuild(outputs)
            except Exception as error:
                self._replay_failed(error, harmless)
                return None
            entry.replays += 1
            self._stats.replays += 1
            if options.pin:
                cache.pin(plan.key)
            if plan is not self._plans[0]:
                self._promote(plan)
            return (result,)

    def _marked_hit(
        self, plan: Plan, leaves: Sequence[Tensor], kwargs: dict[str, Any], options: CallOptions
    ) -> tuple[Any] | Request | str | None:
        with self._range("replay"):
            return self._hit(plan, leaves, kwargs, options)

    def _replay_failed(self, error: Exception, harmless: bool) -> None:
        """Disables the wrapper. Returns only if an eager call can make up for the replay."""
        self.disable(f"replay failed: {describe(error)}")
        if not harmless:
            raise error

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
                dense, addresses, outputs = entry.stage(request.leaves, request.addresses)
                harmless = self._can_do_over(entry)  # any other replay may write half of what it writes
                entry.launch(dense, addresses, outputs)
                # The host looks at the module while the device works. What such a graph has computed from weights that
                # moved is dropped; any other one had to wait for this check.
                changed = self._drop_if_changed() if harmless and self._check_module else None
                if changed is not None:
                    return self._missed(request, changed)
                harmless = harmless and not entry.written
                result = entry.hand_out(request.leaves, outputs)
            except Exception as error:
                self._replay_failed(error, harmless)
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
            plan = Plan(entry.key, self._ambient, state, kwargs, variant, request.leaves)
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
