"""One stream capture under way: how it begins, ends, and is given up."""

from __future__ import annotations

import threading
import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from graphreplay import CaptureError
from graphreplay.capture import collector_hold
from graphreplay_cuda import driver, features, kernels, streams
from graphreplay_cuda.conditional import Bodies
from graphreplay_cuda.pools import PoolHandle
from graphreplay_cuda.release import free_deferred, mend


class Capture:
    """What comes on the calling thread's current stream goes into a graph, until ``end`` or ``abort``.

    While it lasts, the capture's stream is current, garbage collection is held off (a graph or event freed in the
    window breaks the capture), and the autocast weight cache is off (it would hand memory of this graph to others).

    Args:
        stream: where it runs; not the legacy default stream.
        pool: where memory for its tensors comes from.
        mode: the capture error mode.

    Raises:
        CaptureError: torch could not begin; everything is as before.
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
        self.bodies = Bodies(self)
        free_deferred()
        # Both before the capture, whose memory they would take, or which they would break.
        streams.give_workspace(stream)
        if features.available("if nodes"):
            kernels.set_predicate(self.device.index)
        self.number: Any = pool.enter()  # torch has a type of its own for it
        try:
            self._begin()
        except BaseException:
            self._close()
            pool.leave()
            raise
        _here.capture = self

    def _begin(self) -> None:
        self._scope.enter_context(collector_hold)
        self._scope.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        self._scope.enter_context(torch.cuda.stream(self.stream))
        try:
            self._graph.capture_begin(pool=self.number, capture_error_mode=self.mode)
        except RuntimeError as error:
            mend(self._graph, self.device, self.number)
            raise CaptureError(
                f"the capture could not begin: {_first_line(error)}. If its pool was one of torch's whose graphs are "
                "all gone, take another from graph_pool_handle()"
            ) from error
        info = driver.capture_info(self.stream.cuda_stream)
        assert info is not None
        self.root = info.graph

    def end(self) -> torch.cuda.CUDAGraph:
        """Ends and instantiates it.

        Raises:
            CaptureError: something in it cannot be captured. It is given up; everything is as before.
        """
        assert not self.bodies.open
        if self.spoiled is not None:
            reason = self.spoiled
            self.abort()
            raise CaptureError(f"the capture was given up: {reason}")
        torch.cuda.set_stream(self.stream)  # whatever stream was left current
        try:
            _end(self._graph)
        except RuntimeError as error:
            self._give_up()
            raise CaptureError(f"the capture failed: {_first_line(error)}") from error
        self._close()
        try:
            self._graph.instantiate()
        except RuntimeError as error:
            self._graph.reset()
            self._pool.leave()
            raise CaptureError(f"the graph could not be instantiated: {_first_line(error)}") from error
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
        self._graph.reset()
        self._close()
        self._pool.leave()
        return []

    def _give_up(self) -> list[str]:
        troubles = []
        try:
            mend(self._graph, self.device, self.number)
        except RuntimeError as error:
            troubles.append(f"cleaning up after the capture raised {_first_line(error)}")
        self._close()
        self._pool.leave()
        return troubles

    def _close(self) -> None:
        _here.capture = None
        self._scope.close()

    def body_stream(self, parent: torch.cuda.Stream) -> torch.cuda.Stream:
        """The stream for a body below a parent stream, with the allocations of this thread going to the graph's pool.

        torch knows memory of a capture by the id of its stream's capture, and a body has an id of its own: its tensors
        would come from the default pool, and go to others after the capture. So from the first body on, the pool takes
        all that this thread allocates. Backward passes then run in this thread too, and not in autograd's own.
        """
        stream = streams.body_stream(parent)
        if stream is not None and self._routed:
            return stream
        torch._C._cuda_endAllocateToPool(self.device.index, self.number)
        try:
            if stream is None:
                stream = _while_relaxed(parent)  # with the pool out of the way of its workspace
        finally:
            torch._C._cuda_beginAllocateCurrentThreadToPool(self.device.index, self.number)
            torch._C._cuda_releasePool(self.device.index, self.number)  # which begin has added once more
        if not self._routed:
            self._scope.enter_context(torch.autograd.set_multithreading_enabled(False))
            self._routed = True
        return stream


class _Here(threading.local):
    capture: Capture | None = None


_here = _Here()


def current_capture() -> Capture | None:
    """The CUDAGraph capture of the calling thread that is under way, if any."""
    return _here.capture


def _while_relaxed(parent: torch.cuda.Stream) -> torch.cuda.Stream:
    """A new body stream with its workspace, made inside a capture: the driver forbids other modes to allocate."""
    previous = driver.call("cuThreadExchangeStreamCaptureMode", driver.capture_mode("relaxed"))
    try:
        stream = streams.new_body_stream(parent)
        streams.give_workspace(stream)
        return stream
    finally:
        driver.call("cuThreadExchangeStreamCaptureMode", previous)


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        # An empty graph is fine: its outputs are inputs or constants.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]  # CUDA errors go on with pages of general advice
