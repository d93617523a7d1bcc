"""GraphedForward: what users build and call. The way of a call is road.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch

from graphreplay import upkeep
from graphreplay.arguments import check_arguments, check_deadline, check_flags, check_verify, parse_device
from graphreplay.bound import BoundForward
from graphreplay.errors import PositionalArgumentError
from graphreplay.peers import peers_of
from graphreplay.pool import GraphPool
from graphreplay.request import NO_OPTIONS, CallOptions, kwargs_named_as_options, order_shows_below
from graphreplay.road import Road
from graphreplay.signature import flatten

DISABLE_VARIABLE = "GRAPHREPLAY_DISABLE"
"""Environment variable that turns all graphs off, unless it is empty or 0; read when a wrapper is built."""


class GraphedForward(Road):
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
