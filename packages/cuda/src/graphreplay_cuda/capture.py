"""One stream capture, and the way back from one that failed."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

_kept_graphs: list[torch.cuda.CUDAGraph] = []
"""Graphs that must not be destroyed. Where ``capture_end`` raised, torch (2.11 at least) keeps a raw pointer to the
graph in its pinned-memory allocator and crashes when the graph goes. A few hundred bytes each; their device memory is
given back."""


_deferred: list[tuple[torch.cuda.CUDAGraph, PoolState]] = []
"""Graphs that were let go inside a capture of someone else, which freeing them would break."""


class PoolState:
    """What a GraphPool keeps for this backend."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Warm-ups run here too: cuBLAS allocates its workspace at a stream's first use, and if that were inside a
        # capture the workspace would be memory of one graph that all later ones use.
        self.capture_stream = torch.cuda.Stream(device)
        self.last_stream = torch.cuda.current_stream(device)
        """Where the pool's latest work was put."""
        self._handle: Any = None
        self._graphs = 0
        self._lock = threading.Lock()  # graphs are let go from any thread, with or without the pool's own lock

    def enter(self) -> Any:
        """The memory pool for one more graph. torch drops a pool with its last graph; then the next opens another."""
        free_deferred()
        with self._lock:
            if self._graphs == 0:
                self._handle = torch.cuda.graph_pool_handle()
            self._graphs += 1
            return self._handle

    def leave(self) -> None:
        """One graph is gone."""
        with self._lock:
            self._graphs -= 1

    def release(self) -> None:
        """Gives memory back to the device if the pool has no graph left: nobody else can use it."""
        if self._graphs == 0 and not torch.cuda.is_current_stream_capturing():
            torch.cuda.empty_cache()


class CapturedGraph:
    """A CUDA graph that was captured and instantiated."""

    def __init__(self, graph: torch.cuda.CUDAGraph, nbytes: int, pool: PoolState) -> None:
        self.nbytes = nbytes
        self.replay = graph.replay
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool
        self._process = os.getpid()

    def reset(self) -> None:
        graph, self._graph = self._graph, None
        if graph is None:
            return
        if self._process != os.getpid():
            _kept_graphs.append(graph)  # a forked child has no device to free it on; torch would print that
            return
        _deferred.append((graph, self._pool))
        if not torch.cuda.is_current_stream_capturing():
            free_deferred()


def free_deferred() -> None:
    """Frees what could not be freed when it was let go."""
    while True:
        try:
            graph, pool = _deferred.pop()
        except IndexError:  # not by a look first: other threads free as well
            return
        pool.last_stream.synchronize()
        graph.reset()
        pool.leave()


def capture(forward: Callable[[], Any], pool: PoolState) -> tuple[CapturedGraph, Any]:
    """Runs ``forward`` once under capture on the pool's stream, with its memory in the pool.

    Other threads may use the device meanwhile (capture_error_mode "thread_local").

    Returns:
        The graph, and the forward's outputs, which each replay overwrites.

    Raises:
        Exception: the forward's own error, or CUDA's where the forward did what a capture forbids. The current stream,
            the allocator and the random generator are as before.
    """
    device, stream = pool.device, pool.capture_stream
    stream.wait_stream(torch.cuda.current_stream(device))
    handle = pool.enter()
    reserved = torch.cuda.memory_reserved(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            ending = False
            try:
                graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                outputs = forward()
                ending = True
                _end(graph)
            except BaseException as error:
                _abandon(graph, device, handle, error, ended=ending)
                raise
    except BaseException:
        pool.leave()
        raise
    # What the pool grew by. Later captures reuse it, so they count less; the sum is what the pool holds.
    return CapturedGraph(graph, max(0, torch.cuda.memory_reserved(device) - reserved), pool), outputs


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        # An empty graph is fine: its outputs are inputs or constants.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


def _abandon(
    graph: torch.cuda.CUDAGraph, device: torch.device, handle: Any, error: BaseException, *, ended: bool
) -> None:
    """Cleans up after a capture that failed with this error, which stays the one to tell whatever goes wrong here."""
    try:
        if not ended:
            try:
                _end(graph)
            except RuntimeError as also:
                error.add_note(f"and ending the capture raised {also}")
            else:
                graph.reset()
                return
        _mend(graph, device, handle)
    except RuntimeError as also:
        error.add_note(f"and cleaning up raised {also}")


def _mend(graph: torch.cuda.CUDAGraph, device: torch.device, handle: Any) -> None:
    """Undoes what torch leaves behind when ``capture_end`` raises, with the capture's stream still current."""
    _kept_graphs.append(graph)
    try:
        torch._C._cuda_endAllocateToPool(device.index, handle)
    except RuntimeError:
        pass  # a later torch did so itself, and gave the pool back as well
    else:
        torch._C._cuda_releasePool(device.index, handle)
    # The random generator still believes in a capture; one that succeeds sets it right.
    trivial = torch.cuda.CUDAGraph()
    trivial.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=device)
    trivial.capture_end()
    trivial.reset()
