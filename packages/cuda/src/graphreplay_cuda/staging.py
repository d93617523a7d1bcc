"""Inputs copied by the graph itself: a kernel at its root, whose table of addresses is set anew before each launch.

The table travels by value with a launch, so a later call cannot change what an earlier one still reads, and the copies
are ordered with the graph's own work, on whatever stream it is launched.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from graphreplay import CaptureError, ConfigurationError
from graphreplay.storage import extent, layout
from graphreplay_cuda import driver, kernels
from graphreplay_cuda.errors import DriverError, GraphStateError

_SOURCES = 8 * kernels.CAPACITY
"""Where in a table the source addresses begin, in bytes."""

_BYTES_PER_BLOCK = 16 * kernels.THREADS
"""Bytes that a block copies at a time, with 16 by each thread."""

_MAX_BLOCKS = 128
"""Blocks for one tensor; larger ones are walked through. With all 128 rows that is several waves on any GPU."""


class Table:
    """The argument of the stage kernel, and the launch that goes with it: which bytes go where."""

    def __init__(self, kernel: Any, targets: Sequence[Tensor]) -> None:
        words: Any = (ctypes.c_uint64 * (3 * kernels.CAPACITY))()
        sizes = [extent(tensor) for tensor in targets]
        words[: len(sizes)] = [tensor.data_ptr() for tensor in targets]
        words[2 * kernels.CAPACITY : 2 * kernels.CAPACITY + len(sizes)] = sizes
        self._words = words
        self._argument = (ctypes.c_void_p * 1)(ctypes.addressof(words))
        blocks = min(_MAX_BLOCKS, max(1, -(-max(sizes, default=0) // _BYTES_PER_BLOCK)))
        grid = (blocks, max(1, len(sizes)))
        self.params = driver.kernel_params(kernel, ctypes.addressof(self._argument), grid, kernels.THREADS)
        self._pack = Struct(f"{len(sizes)}Q").pack_into

    def point(self, sources: Sequence[Tensor]) -> None:
        """Sets where the bytes come from."""
        self._pack(self._words, _SOURCES, *map(Tensor.data_ptr, sources))


class CopyNode:
    """The stage kernel at the root of one graph. Adding it instantiates the graph again.

    Raises:
        CaptureError: the driver refuses.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        self.kernel = kernels.stage(device.index)
        self.device = device
        self._graph = graph
        self._nothing = Table(self.kernel, ())
        self._loaded = False
        try:
            with torch.cuda.device(device):
                driver.ensure_context(device.index)
                self._node = driver.put_in_front(graph.raw_cuda_graph(), self._nothing.params)
                graph.instantiate()
        except (DriverError, RuntimeError) as error:
            raise CaptureError(f"inputs cannot be staged by this graph: {error}") from error
        self._executable = driver.bindings().CUgraphExec(graph.raw_cuda_graph_exec())
        self._set_params = driver.bindings().cuGraphExecKernelNodeSetParams

    def launch(self, table: Table) -> None:
        """Copies what the table says, then runs the graph, on the current stream."""
        self._set(table)
        self._loaded = True
        self._graph.replay()

    def clear(self) -> None:
        """Has the next launch copy nothing."""
        if self._loaded:
            self._set(self._nothing)
            self._loaded = False

    def _set(self, table: Table) -> None:
        (status,) = self._set_params(self._executable, self._node, table.params)
        if status:
            raise DriverError(f"cuGraphExecKernelNodeSetParams failed: {status.name}")


class Staging:
    """``stage_and_launch`` for one list of static inputs.

    Buffers that are dense and apart from each other are written by the graph's copy node, up to CAPACITY of them; the
    rest by ``copy_``, ordered behind the graph's last launch.
    """

    def __init__(
        self,
        node: CopyNode,
        static_inputs: Sequence[Tensor],
        lock: AbstractContextManager[Any],
        launched: Callable[[], torch.cuda.Stream | None],
    ) -> None:
        self._static = list(static_inputs)
        _check_static(self._static, node.device)
        self._node, self._lock, self._launched = node, lock, launched
        self._index = node.device.index
        self._by_node = _apart(self._static)[: kernels.CAPACITY]
        self._rest = [p for p in range(len(self._static)) if p not in set(self._by_node)]
        self._table = Table(node.kernel, [self._static[p] for p in self._by_node])
        self._shapes = [tensor.shape for tensor in self._static]
        self._strides = [tensor.stride() for tensor in self._static]
        self._kinds = [(tensor.dtype, tensor.device, tensor.layout) for tensor in self._static]
        spans = sorted((t.data_ptr(), t.data_ptr() + extent(t)) for t in self._static if t.numel())
        self._starts = [start for start, _ in spans]
        self._ends = _running_max([end for _, end in spans])

    def serves(self, static_inputs: Sequence[Tensor]) -> bool:
        """Whether these are its buffers, the same objects in the same order."""
        ours = self._static
        return len(static_inputs) == len(ours) and all(a is b for a, b in zip(ours, static_inputs, strict=True))

    def stage_and_launch(self, inputs: Sequence[Tensor]) -> None:
        """Copies the inputs and launches the graph; errors as for ``CUDAGraph.stage_and_launch``."""
        with torch.inference_mode():  # buffers made in inference mode may be written nowhere else
            self.launch(self._plain(inputs))

    def launch(self, inputs: Sequence[Tensor]) -> None:
        """As ``stage_and_launch``, but trusts the caller that every input is a tensor of its buffer's dtype, device,
        shape and strides, not lazily conjugated or negated, and shares no memory with any buffer. Anything else would
        copy foreign memory."""
        by_node: Sequence[Tensor] = inputs
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                return self.launch(inputs)
        driver.ensure_context(self._index)
        with self._lock:
            last = self._launched()
            if self._rest:
                self._copy_rest(inputs, last)
                by_node = [inputs[p] for p in self._by_node]
            self._table.point(by_node)
            try:
                self._node.launch(self._table)
            except RuntimeError as error:
                if torch.cuda.is_current_stream_capturing():
                    raise GraphStateError("a graph cannot be launched inside a capture") from error
                raise
        return None

    def _copy_rest(self, inputs: Sequence[Tensor], last: torch.cuda.Stream | None) -> None:
        if last is not None:
            torch.cuda.current_stream(self._node.device).wait_stream(last)
        for position in self._rest:
            self._static[position].copy_(inputs[position])

    def _plain(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs, converted where the copy node needs that, and copied where they share memory with a buffer."""
        if len(inputs) != len(self._static):
            raise ConfigurationError(f"{len(inputs)} inputs for {len(self._static)} static inputs")
        for position, tensor in enumerate(inputs):
            if not isinstance(tensor, Tensor):
                raise ConfigurationError(f"input {position} is no tensor but {type(tensor).__name__}")
        plain = list(inputs)
        for position in self._unlike(plain):
            target = self._static[position]
            dense = torch.empty_strided(target.shape, _dense_strides(target), dtype=target.dtype, device=target.device)
            plain[position] = dense.copy_(plain[position])
        for position, tensor in enumerate(plain):
            address = tensor.data_ptr()
            before = bisect_right(self._starts, address + extent(tensor) - 1)  # buffers that start before its end
            if before and self._ends[before - 1] > address and tensor.numel():
                plain[position] = tensor.clone()
        return plain

    def _unlike(self, inputs: list[Tensor]) -> list[int]:
        """Positions of inputs whose bytes are not those that the buffer should get."""
        kinds = [(tensor.dtype, tensor.device, tensor.layout) for tensor in inputs]
        if (
            kinds == self._kinds
            and [tensor.shape for tensor in inputs] == self._shapes
            and list(map(Tensor.stride, inputs)) == self._strides
            and not any(map(Tensor.is_neg, inputs))
            and not any(map(Tensor.is_conj, inputs))
        ):
            return []
        return [p for p, tensor in enumerate(inputs) if kinds[p] != self._kinds[p] or not self._same_layout(p, tensor)]

    def _same_layout(self, position: int, tensor: Tensor) -> bool:
        lazy = tensor.is_neg() or tensor.is_conj()
        return not lazy and tensor.shape == self._shapes[position] and tensor.stride() == self._strides[position]


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


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Its strides if it is dense, else those of a contiguous tensor of its shape."""
    if layout(tensor) == (False, False):
        return tuple(tensor.stride())
    return tuple(torch.empty(tensor.shape, device="meta").stride())


def _running_max(values: list[int]) -> list[int]:
    highest, result = 0, []
    for value in values:
        highest = max(highest, value)
        result.append(highest)
    return result
