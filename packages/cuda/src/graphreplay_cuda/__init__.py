"""The CUDA backend of graphreplay: once installed, ``graphreplay.get_graphed_forward_cls("cuda")`` finds it.

``CUDAGraph`` is the graph underneath, usable alone: with pools, streams, and loops and branches on the device.
"""

from importlib.metadata import version

from graphreplay_cuda.context import graph, graph_pool_handle, is_current_stream_capturing
from graphreplay_cuda.errors import (
    ConditionalBodyError,
    DriverError,
    FeatureUnavailableError,
    GraphStateError,
    PredicateError,
)
from graphreplay_cuda.forward import CUDAGraphedForward
from graphreplay_cuda.graph import CUDAGraph
from graphreplay_cuda.loops import while_loop

__version__ = version("graphreplay-cuda")

__all__ = [
    "CUDAGraph",
    "CUDAGraphedForward",
    "ConditionalBodyError",
    "DriverError",
    "FeatureUnavailableError",
    "GraphStateError",
    "PredicateError",
    "__version__",
    "graph",
    "graph_pool_handle",
    "is_current_stream_capturing",
    "while_loop",
]
