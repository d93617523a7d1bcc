"""Inputs copied by the graph itself: a kernel at its root, whose table of addresses is set anew before each launch.

The table travels by value with a launch, so a later call cannot change what an earlier one still reads, and the copies
are ordered with the graph's own work, on whatever stream it is launched.
"""

from __future__ import annotations

import ctypes
import operator
import threading
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, compress, count, repeat
from struct import Struct
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from graphreplay import CaptureError, ConfigurationError
from graphreplay.storage import extent, layout
from graphreplay_cuda import driver, kernels, streams
from graphreplay_cuda.errors import DriverError, GraphStateError

_PLAIN_TYPES = {Tensor, Parameter}

_BYTES_PER_BLOCK = 16 * kernels.THREADS
"""Bytes that a block copies at a time, with 16 by each thread."""

_MAX_BLOCKS = 128
"""Blocks for one tensor; larger ones are walked through. With 128 rows that is several waves on any GPU."""


class Table:
    """The argument of a stage kernel, and the launch that goes with it: which bytes go where."""

    def __init__(self, index: int, targets: Sequence[Tensor]) -> None:
        capacity = next(capacity for capacity in kernels.CAPACITIES if len(targets) <= capacity)
        words: Any = (ctypes.c_uint64 * (3 * capacity))()
        sizes = [extent(tensor) for tensor in targets]
        for row, (tensor, size) in enumerate(zip(targets, sizes, strict=True)):
            words[row], words[2 * capacity + row] = tensor.data_ptr(), size
        self._argument = (ctypes.c_void_p * 1)(ctypes.addressof(words))
        blocks = min(_MAX_BLOCKS, max(1, -(-max(sizes, default=0) // _BYTES_PER_BLOCK)))
        grid = (blocks, max(1, len(sizes)))
        kernel = kernels.stage(index, capacity)
        self.params = driver.kernel_params(kernel, ctypes.addressof(self._argument), grid, kernels.THREADS)
        self.pack_sources = partial(Struct(f"{len(sizes)}Q").pack_into, words, 8 * capacity)
        """``pack_sources(*addresses)`` sets where the bytes come from."""


class _Looks:
    """What inputs must look like for their bytes to be what the buffers should get."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._like = like
        self._shapes = [tensor.shape for tensor in like]
        self._strides = [tensor.stride() for tensor in like]
        self._dtypes = [tensor.dtype for tensor in like]
        self._devices = [tensor.get_device() for tensor in like]
        self._layouts = [tensor.layout for tensor in like]
        self._complex = any(dtype.is_complex for dtype in self._dtypes)

    def at(self, position: int) -> _Looks:
        """Those of one input."""
        return _Looks(self._like[position : position + 1])

    def fit(self, inputs: Sequence[Any]) -> bool:
        """Whether inputs do. One property of all at a time, since this runs on each call."""
        return (
            set(map(type, inputs)) <= _PLAIN_TYPES
            and [tensor.shape for tensor in inputs] == self._shapes
            and [tensor.dtype for tensor in inputs] == self._dtypes
            and list(map(Tensor.get_device, inputs)) == self._devices
            and [tensor.layout for tensor in inputs] == self._layouts
            and list(map(Tensor.stride, inputs)) == self._strides
            and not any(map(Tensor.is_neg, inputs))
            and not (self._complex and any(map(Tensor.is_conj, inputs)))
        )


class Launches:
    """The launches of one graph, which come one at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.last: int | None = None
        """The raw stream of the latest one."""

    def wait(self) -> None:
        """Has the host wait for them."""
        if self.last is not None:
            streams.named(self.last, self.device).synchronize()


def refuse_capture(what: str, cause: Exception | None = None) -> None:
    """Refuses a launch while the current stream is captured.

    Raises:
        GraphStateError: it is.
    """
    if torch.cuda.is_current_stream_capturing():
        raise GraphStateError(f"{what} inside a capture, which takes in no graphs") from cause


class CopyNode:
    """The stage kernel at the root of one graph. Adding it instantiates the graph again.

    Raises:
        CaptureError: the driver refuses.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, launches: Launches) -> None:
        self.launches = launches
        self.replay = super(torch.cuda.CUDAGraph, graph).replay  # without the Python of torch around it
        self.loaded = False
        """Whether the next launch would copy what the latest one did."""
        self._nothing = Table(launches.device.index, ())
        launches.wait()  # instantiating anew destroys what is in flight
        try:
            with torch.cuda.device(launches.device):
                driver.ensure_context(launches.device.index)
                self.node = driver.put_in_front(graph.raw_cuda_graph(), self._nothing.params)
                graph.instantiate()
        except (DriverError, RuntimeError) as error:
            raise CaptureError(f"inputs cannot be staged by this graph: {error}") from error
        self.executable = driver.bindings().CUgraphExec(graph.raw_cuda_graph_exec())
        self.set_params = driver.bindings().cuGraphExecKernelNodeSetParams

    def close(self) -> None:
        """Refuses launches from now on: the graph is gone."""
        self.set_params = _refuse_reset

    def clear(self) -> None:
        """Has the next launch copy nothing."""
        if self.loaded:
            driver.ensure_context(self.launches.device.index)
            driver.call("cuGraphExecKernelNodeSetParams", self.executable, self.node, self._nothing.params)
            self.loaded = False


def _refuse_reset(*_: Any) -> NoReturn:
    raise GraphStateError("stage_and_launch on a graph that was reset; take staging() of a captured graph")


class Staging:
    """``stage_and_launch`` for one list of static inputs.

    Buffers that are dense and apart from each other are written by the graph's copy node, up to the largest of
    CAPACITIES; the rest by ``copy_``, ordered behind the graph's last launch.
    """

    def __init__(self, node: CopyNode, static_inputs: Sequence[Tensor]) -> None:
        self._static = list(static_inputs)
        self._launches = node.launches
        self._index = node.launches.device.index
        _check_static(self._static, node.launches.device)
        self._node = node
        self._by_node = _apart(self._static)[: kernels.CAPACITIES[-1]]
        self._rest = [p for p in range(len(self._static)) if p not in set(self._by_node)]
        self._table = Table(self._index, [self._static[p] for p in self._by_node])
        self._looks = _Looks(self._static)
        self._sizes = [extent(tensor) for tensor in self._static]
        spans = sorted((t.data_ptr(), t.data_ptr() + n) for t, n in zip(self._static, self._sizes, strict=True) if n)
        self._starts = [start for start, _ in spans]
        self._ends = list(accumulate((end for _, end in spans), max, initial=0))

    def serves(self, static_inputs: Sequence[Tensor]) -> bool:
        """Whether these are its buffers, the same objects in the same order."""
        ours = self._static
        return len(static_inputs) == len(ours) and all(map(operator.is_, ours, static_inputs))

    def stage_and_launch(self, inputs: Sequence[Tensor]) -> None:
        """Copies the inputs and launches the graph; errors as for ``CUDAGraph.stage_and_launch``."""
        with torch.inference_mode():  # buffers made in inference mode may be written nowhere else
            self.launch(self._plain(inputs))

    def launch(self, inputs: Sequence[Tensor]) -> None:
        """As ``stage_and_launch``, but trusts the caller that there is one input for each buffer: a tensor of the same
        dtype, device, shape and strides, not lazily conjugated or negated, that shares no memory with any buffer.
        Anything else may copy foreign memory."""
        if not driver.thread.has_context:
            driver.ensure_context(self._index)
        node, table, launches = self._node, self._table, self._launches
        with launches.lock:
            if self._rest:
                self._copy_rest(inputs)
                inputs = [inputs[p] for p in self._by_node]
            table.pack_sources(*map(Tensor.data_ptr, inputs))
            (status,) = node.set_params(node.executable, node.node, table.params)
            if status:
                raise DriverError(f"cuGraphExecKernelNodeSetParams failed: {status.name}")
            node.loaded = True
            try:
                node.replay()
            except RuntimeError as error:
                refuse_capture("stage_and_launch", error)
                raise
            launches.last = torch._C._cuda_getCurrentRawStream(self._index)

    def _copy_rest(self, inputs: Sequence[Tensor]) -> None:
        refuse_capture("stage_and_launch")
        device, last = self._launches.device, self._launches.last
        if last is not None:
            torch.cuda.current_stream(device).wait_stream(streams.named(last, device))
        for position in self._rest:
            self._static[position].copy_(inputs[position])

    def _plain(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs, converted where the copy node needs that, and copied where they share memory with a buffer."""
        if len(inputs) != len(self._static):
            raise ConfigurationError(f"{len(inputs)} inputs for {len(self._static)} static inputs")
        plain = list(inputs)
        if not self._looks.fit(plain):
            for position, tensor in enumerate(inputs):
                if not isinstance(tensor, Tensor):
                    raise ConfigurationError(f"input {position} is no tensor but {type(tensor).__name__}")
                if not self._looks.at(position).fit([tensor]):
                    plain[position] = self._converted(position, tensor)
        addresses = list(map(Tensor.data_ptr, plain))
        # How many buffers start before each input ends, and how far those reach.
        before = map(bisect_left, repeat(self._starts), map(operator.add, addresses, self._sizes))
        reach = map(self._ends.__getitem__, before)
        for position in compress(count(), map(operator.gt, reach, addresses)):
            plain[position] = self._converted(position, plain[position])
        return plain

    def _converted(self, position: int, tensor: Tensor) -> Tensor:
        """The values of an input in a new tensor, laid out as the buffer, or contiguous if that has gaps."""
        target = self._static[position]
        dense = layout(target) == (False, False)
        strides = target.stride() if dense else torch.empty(target.shape, device="meta").stride()
        return torch.empty_strided(target.shape, strides, dtype=target.dtype, device=target.device).copy_(tensor)


def _check_static(static_inputs: list[Tensor], device: torch.device) -> None:
    for position, tensor in enumerate(static_inputs):
        where = f"static input {position}"
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ConfigurationError(f"{where} is no plain tensor but {type(tensor).__name__}")
        if tensor.device != device:
            raise ConfigurationError(f"{where} is on {tensor.device}, and the graph on {device}")


def _apart(tensors: list[Tensor]) -> list[int]:
    """Positions of tensors that are dense, hold their values as they are, and share no memory with any other."""
    spans = sorted((t.data_ptr(), t.data_ptr() + extent(t), p) for p, t in enumerate(tensors) if t.numel())
    apart = []
    reach = 0
    for index, (start, end, position) in enumerate(spans):
        next_start = spans[index + 1][0] if index + 1 < len(spans) else end
        lazy = tensors[position].is_neg() or tensors[position].is_conj()
        if start >= reach and next_start >= end and not lazy and layout(tensors[position]) == (False, False):
            apart.append(position)
        reach = max(reach, end)
    return sorted(apart)
