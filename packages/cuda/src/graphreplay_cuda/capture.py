"""One stream capture, and the way back from one that failed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

_failed_graphs: list[torch.cuda.CUDAGraph] = []
"""Graphs whose ``capture_end`` raised. torch (2.11 at least) keeps a raw pointer to such a graph in its pinned-memory
allocator and crashes when the graph is reset or destroyed, so they live as long as the process: a few hundred bytes
each, their device memory is given back."""


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

    def enter(self) -> Any:
        """The memory pool for one more graph. torch drops a pool with its last graph; then the next opens another."""
        if self._graphs == 0:
            self._handle = torch.cuda.graph_pool_handle()
        self._graphs += 1
        return self._handle

    def leave(self) -> None:
        """One graph is gone. With the last one the pool's memory goes back to the device: nobody else can use it."""
        self._graphs -= 1
        if self._graphs == 0:
            torch.cuda.empty_cache()


class CapturedGraph:
    """A CUDA graph that was captured and instantiated."""

    def __init__(self, graph: torch.cuda.CUDAGraph, nbytes: int, pool: PoolState) -> None:
        self.nbytes = nbytes
        self.replay = graph.replay
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool

    def reset(self) -> None:
        if self._graph is not None:
            self._pool.last_stream.synchronize()
            self._graph.reset()
            self._graph = None
            self._pool.leave()


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
    reserved = torch.cuda.memory_reserved(device)
    graph, handle = torch.cuda.CUDAGraph(), pool.enter()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
            try:
                outputs = forward()
            except BaseException:
                _abandon(graph, device, handle)
                raise
            try:
                _end(graph)
            except BaseException:
                _mend(graph, device, handle)
                raise
    except BaseException:
        pool.leave()
        raise
    # What the pool grew by. Later captures reuse it, so they count less; the sum is what the pool holds.
    return CapturedGraph(graph, max(0, torch.cuda.memory_reserved(device) - reserved), pool), outputs


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an empty graph is fine: its outputs are inputs or constants
        graph.capture_end()


def _abandon(graph: torch.cuda.CUDAGraph, device: torch.device, handle: Any) -> None:
    """Ends a capture whose forward raised. Whatever goes wrong here, the forward's error is the one to tell."""
    try:
        _end(graph)
    except RuntimeError:
        _mend(graph, device, handle)
    else:
        graph.reset()


def _mend(graph: torch.cuda.CUDAGraph, device: torch.device, handle: Any) -> None:
    """Undoes what torch leaves behind when ``capture_end`` raises, with the capture's stream still current."""
    _failed_graphs.append(graph)
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
