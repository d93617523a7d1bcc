"""One stream capture, and the way back from one that failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

_failed_graphs: list[torch.cuda.CUDAGraph] = []
"""Graphs whose ``capture_end`` raised. torch (2.11 at least) keeps a raw pointer to such a graph in its pinned-memory
allocator and crashes when the graph is reset or destroyed, so they live as long as the process: a few hundred bytes
each, their device memory is given back."""


@dataclass(slots=True)
class PoolState:
    """What a GraphPool keeps for this backend."""

    device: torch.device
    handle: Any = field(init=False)
    capture_stream: torch.cuda.Stream = field(init=False)
    """Warm-ups run here too: cuBLAS allocates its workspace at a stream's first use, and if that were inside a capture
    the workspace would be memory of one graph that all later ones use."""
    last_stream: torch.cuda.Stream = field(init=False)
    """Where the pool's latest work was put."""

    def __post_init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.capture_stream = torch.cuda.Stream(self.device)
        self.last_stream = torch.cuda.current_stream(self.device)


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
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    reserved = torch.cuda.memory_reserved(device)
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            outputs = forward()
        except BaseException:
            _abandon(graph, pool)
            raise
        try:
            graph.capture_end()
        except BaseException:
            _mend(graph, pool)
            raise
    # What the pool grew by. Later captures reuse it, so they count less; the sum is what the pool holds.
    return CapturedGraph(graph, max(0, torch.cuda.memory_reserved(device) - reserved), pool), outputs


def _abandon(graph: torch.cuda.CUDAGraph, pool: PoolState) -> None:
    """Ends a capture whose forward raised. Whatever goes wrong here, the forward's error is the one to tell."""
    try:
        graph.capture_end()
    except RuntimeError:
        _mend(graph, pool)
    else:
        graph.reset()


def _mend(graph: torch.cuda.CUDAGraph, pool: PoolState) -> None:
    """Undoes what torch leaves behind when ``capture_end`` raises, with the capture's stream still current."""
    _failed_graphs.append(graph)
    try:
        torch._C._cuda_endAllocateToPool(pool.device.index, pool.handle)
    except RuntimeError:
        pass  # a later torch did so itself, and gave the pool back as well
    else:
        torch._C._cuda_releasePool(pool.device.index, pool.handle)
    # The random generator still believes in a capture; one that succeeds sets it right.
    trivial = torch.cuda.CUDAGraph()
    trivial.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=pool.device)
    trivial.capture_end()
    trivial.reset()
