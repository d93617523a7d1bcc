"""One stream capture under way: how it begins, ends, and is given up."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from graphreplay import CaptureError
from graphreplay.capture import collector_hold
from graphreplay_cuda import driver, features, kernels, streams
from graphreplay_cuda.conditional import Bodies
from graphreplay_cuda.current import set_current_capture
from graphreplay_cuda.errors import DriverError, GraphStateError
from graphreplay_cuda.pools import PoolHandle
from graphreplay_cuda.release import first_line, free_deferred, mend

IN_USE = "this thread, or the stream to capture, is in a capture already; end that first, or pass another stream"


class Capture:
    """What comes on the calling thread's current stream goes into a graph, until ``end`` or ``abort``.

    While it lasts, the capture's stream is current, garbage collection is held off (a graph or event freed in the
    window breaks the capture), and the autocast weight cache is off (it would hand memory of this graph to others).

    As it begins, torch (2.11) writes the seed of the device's random generator to memory that every replay reads and
    writes anew on its own stream. So the capture's stream comes behind the current one, whose replays still read it,
    and the host waits for it at the end, whatever that is: then no replay meets what was written here.

    Args:
        stream: where it runs; not the legacy default stream.
        pool: where memory for its tensors comes from.
        mode: the capture error mode.

    Raises:
        CaptureError: torch could not begin; everything is as before.
        GraphStateError: another capture on the stream or into the pool is under way.
    """

    def __init__(self, stream: torch.cuda.Stream, pool: PoolHandle, mode: str) -> None:
        self.stream = stream
        self.device = stream.device
        self.mode = mode
        self.thread = threading.get_ident()
        self.spoiled: str | None = None
        """Why the graph would be wrong, though the driver would take it."""
        self.keep_alive: list[Tensor] = []
        """Tensors that the graph reads by address."""
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._pool = pool
        self._scope = ExitStack()
        self._routed = False
        self._ready: set[torch.cuda.Stream] = set()
        self.bodies = Bodies(self)
        self._number: Any = None  # torch has a type of its own for it
        free_deferred()
        if not streams.take(stream):
            raise GraphStateError(IN_USE)
        with ExitStack() as unless_begun:
            unless_begun.callback(self._leave_stream)
            # All before the capture, whose memory they would take, or which they would break.
            with driver.relaxed():
                streams.follow_current(stream)
                streams.give_workspace(stream)
                if features.available("if nodes"):
                    with suppress(DriverError):  # then the first conditional node says why
                        kernels.set_predicate(self.device.index)
            self._number = pool.enter()
            unless_begun.callback(self._leave_pool)
            self._begin()
            unless_begun.pop_all()

    def _begin(self) -> None:
        with ExitStack() as scope:
            collector_hold.__enter__()
            # Once: here, or where the thread has died and the capture is dropped.
            scope.callback(weakref.finalize(self, collector_hold.__exit__))
            scope.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            scope.enter_context(torch.cuda.stream(self.stream))
            try:
                self._graph.capture_begin(pool=self._number, capture_error_mode=self.mode)
            except RuntimeError as error:
                failure = CaptureError(
                    f"the capture could not begin: {first_line(error)}. If its pool was one of torch's whose graphs "
                    "are all gone, take another from graph_pool_handle()"
                )
                raise _with_notes(failure, mend(self._graph, self.device, self._number)) from error
            scope.callback(set_current_capture, None)
            set_current_capture(self)
            self._scope = scope.pop_all()

    def end(self, *, instantiate: bool) -> torch.cuda.CUDAGraph:
        """Ends it, and instantiates the graph if asked to.

        Raises:
            CaptureError: something in it cannot be captured. It is given up; everything is as before.
        """
        if self.spoiled is not None:
            raise _with_notes(CaptureError(f"the capture was given up: {self.spoiled}"), self.abort())
        torch.cuda.set_stream(self.stream)  # whatever stream was left current
        try:
            _end(self._graph)
        except RuntimeError as error:
            raise _with_notes(CaptureError(f"the capture failed: {first_line(error)}"), self._give_up()) from error
        self._scope.close()
        self._pool.capture_over()
        try:
            self._leave_stream()
            if instantiate:
                self._graph.instantiate()
        except BaseException as error:
            self._pool.leave(self._graph.reset)
            if isinstance(error, RuntimeError):
                raise CaptureError(f"the graph could not be instantiated: {first_line(error)}") from error
            raise
        return self._graph

    def abort(self) -> list[str]:
        """Gives it up, innermost body first; everything is as before.

        Returns:
            What went wrong on the way, for a note to the error that led here.
        """
        self.bodies.abandon()
        torch.cuda.set_stream(self.stream)
        try:
            _end(self._graph)
        except RuntimeError:  # broken already
            return self._give_up()
        self._scope.close()
        try:
            self._leave_stream()
        finally:
            self._leave_pool(self._graph.reset)
        return []

    def _give_up(self) -> list[str]:
        try:
            return mend(self._graph, self.device, self._number)
        finally:
            self._scope.close()
            try:
                self._leave_stream()
            finally:
                self._leave_pool()

    def _leave_stream(self) -> None:
        try:
            streams.wait_for(self.stream)
        finally:
            streams.let_go(self.stream)

    def _leave_pool(self, free: Callable[[], None] = lambda: None) -> None:
        self._pool.capture_over()
        self._pool.leave(free)

    @cached_property
    def root(self) -> int:
        """The driver's graph that the capture goes into, without its bodies."""
        info = driver.capture_info(self.stream.cuda_stream)
        if info is None:
            raise DriverError("the capture is broken")
        return info.graph

    def body_stream(self, parent: torch.cuda.Stream) -> torch.cuda.Stream:
        """The stream for a body below a parent stream, with the allocations of this thread going to the graph's pool.

        torch knows memory of a capture by the id of its stream's capture, and a body has an id of its own: its tensors
        would come from the default pool, and go to others after the capture. So from the first body on, the pool takes
        all that this thread allocates. Backward passes then run in this thread too, and not in autograd's own.
        """
        stream = streams.body_stream(parent)
        if stream in self._ready:
            return stream
        torch._C._cuda_endAllocateToPool(self.device.index, self._number)
        try:
            streams.give_workspace(stream)  # with the pool out of its way
        finally:
            torch._C._cuda_beginAllocateCurrentThreadToPool(self.device.index, self._number)
            torch._C._cuda_releasePool(self.device.index, self._number)  # which begin has added once more
        self._ready.add(stream)
        if not self._routed:
            self._scope.enter_context(torch.autograd.set_multithreading_enabled(False))
            self._routed = True
        return stream


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        # An empty graph is fine: its outputs are inputs or constants.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


def _with_notes(error: CaptureError, troubles: list[str]) -> CaptureError:
    for trouble in troubles:
        error.add_note(f"and {trouble}")
    return error
