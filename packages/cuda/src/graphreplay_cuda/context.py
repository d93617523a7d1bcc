"""A capture as a block, and what goes with it."""

from __future__ import annotations

import torch

from graphreplay import ConfigurationError
from graphreplay_cuda.arguments import require_device
from graphreplay_cuda.errors import GraphStateError
from graphreplay_cuda.graph import CUDAGraph
from graphreplay_cuda.pools import PoolHandle
from graphreplay_cuda.release import first_line

_BLOCK_END = "the end of a graph() block"


class graph:  # a function in all but name; frames of a generator would keep an error, and its tensors, alive
    """Captures a block into ``cuda_graph``: ``with graph(g): …``.

    Arguments, errors, and what to know of streams and random numbers are those of ``capture_begin`` and
    ``capture_end``. If the block raises, the capture is given up, all is as before, and the error goes on.
    """

    _instantiates = True

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: tuple[int, int] | CUDAGraph | torch.cuda.CUDAGraph | None = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        if not isinstance(cuda_graph, CUDAGraph):
            raise ConfigurationError(
                f"graph() captures into a graphreplay_cuda.CUDAGraph, not {type(cuda_graph).__name__}"
            )
        self._graph = cuda_graph
        self._arguments = pool, capture_error_mode, stream

    def __enter__(self) -> CUDAGraph:
        self._graph.capture_begin(*self._arguments)
        return self._graph

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._end()
        else:
            self._give_up(error)

    def _end(self) -> None:
        self._graph._capturing(_BLOCK_END)
        try:
            self._graph._end_capture(instantiate=self._instantiates)
        except GraphStateError as error:  # a body was left open; the block is over, so nobody can end it
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Gives the capture up. What goes wrong with that is a note to the error that led here, which goes on."""
        try:
            troubles = self._graph._give_up(_BLOCK_END)
        except Exception as failure:
            troubles = [f"giving the capture up raised {type(failure).__name__}: {first_line(failure)}"]
        for trouble in troubles:
            error.add_note(f"and {trouble}")


class graph_to_stage(graph):
    """As ``graph``, for one that is staged next: that instantiates it, with its copy kernels."""

    _instantiates = False


def graph_pool_handle() -> PoolHandle:
    """A name for a memory pool that several graphs share; torch takes it as well while a graph is in it.

    Raises:
        BackendUnavailableError: there is no CUDA device.
    """
    require_device()
    return PoolHandle(torch.cuda.graph_pool_handle())


def is_current_stream_capturing() -> bool:
    """Whether the current stream is being captured, by a CUDAGraph or anyone else; False without a CUDA device."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
