"""The calls of the CUDA driver that torch has no name for, the same with cuda.bindings 12 and 13.

Handles (streams, graphs, nodes, kernels) are passed on as the bindings return them; streams and graphs may be ints.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from graphreplay_cuda.errors import DriverError

# Bindings 12 keep an older form, without edge data, under the plain name. It serves where older drivers must do.
_WITH_EDGES = {
    "cuStreamGetCaptureInfo": "cuStreamGetCaptureInfo_v3",
    "cuStreamUpdateCaptureDependencies": "cuStreamUpdateCaptureDependencies_v2",
    "cuGraphAddNode": "cuGraphAddNode_v2",
}


@cache
def bindings() -> Any:
    """The module ``cuda.bindings.driver``, imported at its first use."""
    from cuda.bindings import driver

    return driver


def call(name: str, *args: Any) -> Any:
    """Calls a driver function.

    Returns:
        Its results without the status: None, the only one, or a tuple.

    Raises:
        DriverError: the status is not success, or this driver has no such function.
    """
    driver = bindings()
    function = getattr(driver, _WITH_EDGES.get(name, name), None) or getattr(driver, name)
    try:
        status, *results = function(*args)
    except RuntimeError as error:  # of the bindings: no driver, or an older one
        raise DriverError(f"{name} failed: {error}") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{name} failed: {status.name}")
    return results[0] if len(results) == 1 else tuple(results) or None


def status_name(status: int) -> str:
    """What the driver calls a status, or its number where it is newer than the bindings."""
    known = bindings().CUresult
    return str(known(status).name) if status in set(map(int, known)) else str(status)


@cache
def address(name: str) -> int:
    """Where a driver function lies, in the form of CUDA 12."""
    return int(call("cuGetProcAddress", name.encode(), 12000, 0)[0])


@cache
def version() -> int:
    """The newest CUDA version that the driver serves, as 1000 * major + 10 * minor."""
    return int(call("cuDriverGetVersion"))


@dataclass(frozen=True)
class CaptureInfo:
    """Where the next node of a graph goes: the nodes that it depends on, and how. For a stream, where its capture
    stands."""

    graph: int
    dependencies: list[Any]
    edges: list[Any]

    @classmethod
    def behind(cls, graph: int, nodes: list[Any]) -> CaptureInfo:
        """Behind these nodes of a graph, in full."""
        return cls(graph, nodes, [bindings().CUgraphEdgeData() for _ in nodes])


def capture_info(stream: int) -> CaptureInfo | None:
    """The capture of a raw stream, or None if it has none, or a broken one."""
    status, _, graph, dependencies, edges, _ = call("cuStreamGetCaptureInfo", stream)
    if status != bindings().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        return None
    return CaptureInfo(int(graph), list(dependencies or []), list(edges or []))


def is_capturing(stream: int) -> bool:
    """Whether a raw stream is being captured, be it a capture that is broken already."""
    return bool(call("cuStreamIsCapturing", stream) != bindings().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


@contextmanager
def relaxed() -> Iterator[None]:
    """Lets the calling thread allocate and free in the block while captures are under way, its own or other threads':
    in their strict modes such calls would break them, though they put nothing on a captured stream."""
    before = call("cuThreadExchangeStreamCaptureMode", capture_mode("relaxed"))
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


class _Thread(threading.local):
    has_context = False


thread = _Thread()
"""What is known about the calling thread."""


def ensure_context() -> None:
    """Gives a thread that has not used CUDA yet the context of its current device: without any, calls of the driver
    crash. Most of them take a context of another device as well."""
    if not thread.has_context:
        if not int(call("cuCtxGetCurrent")):
            # Torch may not hold it yet, so it is not given back.
            device = call("cuDeviceGet", torch.cuda.current_device())
            call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
        thread.has_context = True


def new_stream() -> int:
    """A stream that does not wait for the legacy default stream, on the current device."""
    return int(call("cuStreamCreate", int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING)))


def capture_mode(name: str) -> Any:
    """The driver's constant for a capture error mode."""
    return getattr(bindings().CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{name.upper()}")


def begin_capture(stream: int, mode: str) -> None:
    """Captures what comes on a raw stream into a graph of its own."""
    call("cuStreamBeginCapture", stream, capture_mode(mode))


def end_capture(stream: int) -> int:
    """Ends such a capture and returns its graph, which the caller destroys."""
    return int(call("cuStreamEndCapture", stream))


def conditional_handle(graph: int) -> int:
    """A handle whose value a kernel of the graph sets, 0 at each launch."""
    context = call("cuCtxGetCurrent")
    return int(call("cuGraphConditionalHandleCreate", bindings().CUgraph(graph), context, 0, 0))


def add_conditional(at: CaptureInfo, handle: int, *, loop: bool, bodies: int) -> tuple[Any, list[int]]:
    """Adds a conditional node behind what a capture holds so far.

    Returns:
        The node, and its empty body graphs.
    """
    driver = bindings()
    kinds = driver.CUgraphConditionalNodeType
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = handle
    params.conditional.type = kinds.CU_GRAPH_COND_TYPE_WHILE if loop else kinds.CU_GRAPH_COND_TYPE_IF
    params.conditional.size = bodies
    params.conditional.ctx = call("cuCtxGetCurrent")
    node = call("cuGraphAddNode", driver.CUgraph(at.graph), at.dependencies, at.edges, len(at.dependencies), params)
    return node, [int(body) for body in params.conditional.phGraph_out]


def add_kernel(at: CaptureInfo, params: Any) -> Any:
    """Adds a kernel node and returns it."""
    return call("cuGraphAddKernelNode", bindings().CUgraph(at.graph), at.dependencies, len(at.dependencies), params)


def add_child(at: CaptureInfo, child: int) -> Any:
    """Adds a copy of a graph as one node and returns that."""
    driver = bindings()
    count = len(at.dependencies)
    return call("cuGraphAddChildGraphNode", driver.CUgraph(at.graph), at.dependencies, count, driver.CUgraph(child))


def destroy_graph(graph: int) -> None:
    """Frees a graph that the caller owns."""
    call("cuGraphDestroy", bindings().CUgraph(graph))


def kernel_params(kernel: Any, arguments: int, grid: tuple[int, int] = (1, 1), threads: int = 1) -> Any:
    """How a kernel node launches.

    Args:
        arguments: the address of an array of pointers to the arguments, which stay the caller's.
    """
    params = bindings().CUDA_KERNEL_NODE_PARAMS()
    params.func = kernel
    params.gridDimX, params.gridDimY = grid
    params.blockDimX = threads
    params.gridDimZ = params.blockDimY = params.blockDimZ = 1
    params.sharedMemBytes = 0
    params.kernelParams = arguments
    return params


def continue_behind(stream: int, nodes: Sequence[Any]) -> None:
    """Makes what a capturing raw stream gets next depend on these nodes alone."""
    flag = bindings().CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    call("cuStreamUpdateCaptureDependencies", stream, list(nodes), None, len(nodes), int(flag))


def nodes(graph: int) -> list[Any]:
    """The nodes of a graph, without those of bodies."""
    handle = bindings().CUgraph(graph)
    count = call("cuGraphGetNodes", handle, 0)[1]
    return list(call("cuGraphGetNodes", handle, count)[0]) if count else []


def node_count(graph: int) -> int:
    """How many nodes a graph has, without those of bodies."""
    return int(call("cuGraphGetNodes", bindings().CUgraph(graph), 0)[1])


def roots(graph: int) -> list[Any]:
    """The nodes of a graph that depend on no other."""
    handle = bindings().CUgraph(graph)
    count = call("cuGraphGetRootNodes", handle, 0)[1]
    return list(call("cuGraphGetRootNodes", handle, count)[0]) if count else []


def node_kind(node: Any) -> str:
    """The kind of a node, such as KERNEL or EVENT_WAIT."""
    name: str = call("cuGraphNodeGetType", node).name
    return name.removeprefix("CU_GRAPH_NODE_TYPE_")


def put_in_front(graph: int, kernel: Any) -> Any:
    """Adds a kernel node that everything else in a graph depends on, and returns it."""
    after = roots(graph)
    node = add_kernel(CaptureInfo.behind(graph, []), kernel)
    if after:
        handle, before, count = bindings().CUgraph(graph), [node] * len(after), len(after)
        if hasattr(bindings(), "cuGraphAddDependencies_v2"):  # bindings 12, whose plain form any driver has
            call("cuGraphAddDependencies", handle, before, after, count)
        else:
            call("cuGraphAddDependencies", handle, before, after, CaptureInfo.behind(graph, after).edges, count)
    return node


def put_behind(graph: int, kernel: Any) -> None:
    """Adds a kernel node that depends on everything else in a graph."""
    last = [node for node in nodes(graph) if not call("cuGraphNodeGetDependentNodes", node, 0)[-1]]
    add_kernel(CaptureInfo.behind(graph, last), kernel)


def load_kernel(ptx: bytes, name: str) -> Any:
    """Compiles a kernel for the current device and loads it now: loading it inside a capture would break that."""
    library = call("cuLibraryLoadData", ptx, [], [], 0, [], [], 0)
    function = call("cuKernelGetFunction", call("cuLibraryGetKernel", library, name.encode()))
    if version() >= 12040:  # older drivers have no such call; there the first launch loads it
        call("cuFuncLoad", function)
    return function


def write_dot(graph: int, path: str, *, verbose: bool) -> None:
    """Writes a graph, with the bodies of its conditional nodes, as a DOT file."""
    flags = bindings().CUgraphDebugDot_flags.CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE
    call("cuGraphDebugDotPrint", bindings().CUgraph(graph), os.fsencode(path), int(flags) if verbose else 0)
