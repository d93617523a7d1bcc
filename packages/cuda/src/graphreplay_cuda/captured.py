"""Graphs of GraphedForward: CUDAGraphs on the stream and in the memory of one GraphPool."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphreplay.entry import Launch
from graphreplay.storage import CopyPlan
from graphreplay_cuda import driver, kernels, streams
from graphreplay_cuda.context import graph_to_stage
from graphreplay_cuda.graph import CUDAGraph
from graphreplay_cuda.launches import Launches
from graphreplay_cuda.pools import PoolHandle


class PoolState:
    """What a GraphPool keeps for this backend."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = PoolHandle(torch.cuda.graph_pool_handle())
        # Warm-ups run here too, so that whatever libraries allocate at a stream's first use is no memory of a graph.
        self.capture_stream = streams.borrow_stream(device.index)
        weakref.finalize(self, streams.give_back, self.capture_stream).atexit = False
        self.launches = Launches(device)
        """Those of all graphs of the pool, and of all else that is done with its memory."""
        self.launches.take_turn()

    def release(self) -> None:
        """Gives memory back to the device if the pool has no graph left: nobody else can use it."""
        if not torch.cuda.is_initialized():  # in a forked child
            return
        if self.handle.graphs == 0 and not torch.cuda.is_current_stream_capturing():
            with driver.relaxed():  # other threads may capture meanwhile
                torch.cuda.empty_cache()


class CapturedForward:
    """The graph of one forward."""

    def __init__(self, captured: CUDAGraph, noted: Tensor, nbytes: int) -> None:
        self.nbytes = nbytes
        self.reset = captured.reset
        self._graph = captured
        self._noted = noted

    def staging(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Launch:
        by_graph, late = outputs[: len(self._noted)], outputs[len(self._noted) :]
        self._graph.hand_out(by_graph, self._noted)
        run, handing_out = self._graph.staging(inputs).run, CopyPlan(late)
        if not late:
            return run

        def launch(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            run(inputs, outputs[: len(by_graph)])
            handing_out.copy(outputs[len(by_graph) :], late)

        return launch


def capture(forward: Callable[[], Any], pool: PoolState) -> tuple[CapturedForward, Any]:
    """Runs ``forward`` once under capture on the pool's stream, with its memory in the pool.

    Other threads may use the device meanwhile (capture_error_mode "thread_local").

    Returns:
        The graph, and the forward's outputs, which each replay overwrites.

    Raises:
        Exception: the forward's own error, or CaptureError where it did what a capture forbids. The current stream, the
            allocator and the random generator are as before.
    """
    captured = CUDAGraph()
    with graph_to_stage(captured, pool.handle, pool.capture_stream, "thread_local"):
        before = torch.cuda.memory_reserved(pool.device)
        # Before the forward, so that none of its tensors comes to lie here; and as a storage, since a tensor is filled
        # where algorithms are to be deterministic, by a kernel that would be part of the graph.
        storage = torch.UntypedStorage(8 * kernels.OUTPUT_CAPACITIES[-1], device=pool.device)
        noted = torch.empty(0, dtype=torch.int64, device=pool.device).set_(storage)
        outputs = forward()
        grown = torch.cuda.memory_reserved(pool.device) - before
    captured._take_turns_with(pool.launches)
    # What the pool grew by. Later captures reuse it, so they count less; the sum is what the pool holds. Other threads'
    # growth is in it too: torch tells what a pool holds only by a snapshot, which walks and copies all of its blocks.
    return CapturedForward(captured, noted, max(0, grown)), outputs
