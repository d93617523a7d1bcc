"""Kernels at the two ends of a graph that copy its inputs and its outputs, with a table of addresses that is set before
each launch."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from graphreplay import CaptureError
from graphreplay.storage import any_freed, extent
from graphreplay_cuda import driver, kernels, native
from graphreplay_cuda.errors import DriverError, GraphStateError
from graphreplay_cuda.launches import Launches

_BYTES_PER_BLOCK = 16 * kernels.THREADS
"""Bytes that a block copies at a time, with 16 by each thread."""

_MAX_BLOCKS = 2048
"""Blocks of a launch, which larger tensors are walked through with: a wave or two on any GPU. Each tensor has 16 at
least."""


class HandOut:
    """The last kernel of a graph, which copies outputs to wherever the stage kernel has noted in each launch.

    Args:
        index: of the device.
        outputs: at most OUTPUT_CAPACITIES[-1] tensors, each dense, which the graph writes.
        noted: as many int64 on the device, which nothing else in the graph writes.
    """

    def __init__(self, index: int, outputs: Sequence[Tensor], noted: Tensor) -> None:
        self.count = len(outputs)
        self.capacity = _capacity(kernels.OUTPUT_CAPACITIES, self.count)
        self.noted = noted
        words: Any = (ctypes.c_uint64 * (2 * self.capacity + 1))()
        sizes = [extent(tensor) for tensor in outputs]
        for row, (tensor, size) in enumerate(zip(outputs, sizes, strict=True)):
            words[row], words[self.capacity + row] = tensor.data_ptr(), size
        words[2 * self.capacity] = noted.data_ptr()
        self._argument = (ctypes.c_void_p * 1)(ctypes.addressof(words))
        self._words = words
        kernel = kernels.hand_out(index, self.capacity)
        self.params = driver.kernel_params(kernel, ctypes.addressof(self._argument), _grid(sizes), kernels.THREADS)


class Table:
    """The argument of a stage kernel, and the launch that goes with it: which bytes go where.

    Args:
        index: of the device.
        targets: what the kernel writes.
        hand_out: the graph's last kernel, or None.
    """

    def __init__(self, index: int, targets: Sequence[Tensor], hand_out: HandOut | None) -> None:
        capacity = _capacity(kernels.CAPACITIES, len(targets))
        outputs, count = (0, 0) if hand_out is None else (hand_out.capacity, hand_out.count)
        words: Any = (ctypes.c_uint64 * (3 * capacity + outputs + 1))()
        sizes = [extent(tensor) for tensor in targets]
        for row, (tensor, size) in enumerate(zip(targets, sizes, strict=True)):
            words[row], words[capacity + row] = tensor.data_ptr(), size
        if hand_out is not None:
            words[3 * capacity + outputs] = hand_out.noted.data_ptr()
        self._argument = (ctypes.c_void_p * 1)(ctypes.addressof(words))
        self._words = words
        kernel = kernels.stage(index, capacity, outputs)
        self.params = driver.kernel_params(kernel, ctypes.addressof(self._argument), _grid(sizes), kernels.THREADS)
        self.inputs, self.outputs = len(sizes), count
        self.sizes = ctypes.addressof(words) + 8 * capacity
        """Where the sizes of inputs in bytes begin in the table."""
        self.sources, self.destinations = self.sizes + 8 * capacity, self.sizes + 16 * capacity
        """Where the addresses of inputs begin, and those of outputs; 0 for one of these goes nowhere."""
        addresses = Struct(f"{len(sizes)}Q{8 * (capacity - len(sizes))}x{count}Q")
        self._pack = partial(addresses.pack_into, words, 16 * capacity)

    def fill(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
        """Notes the addresses of these inputs and outputs, or of no outputs at all. Returns False, with nothing
        changed, where an input was freed.

        Raises:
            ValueError: there are more or fewer of them.
        """
        if len(inputs) != self.inputs or len(outputs) not in (0, self.outputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs for {self.inputs} and {self.outputs}")
        if any_freed(inputs):
            return False
        self._pack(
            *map(Tensor.data_ptr, inputs), *(map(Tensor.data_ptr, outputs) if outputs else repeat(0, self.outputs))
        )
        return True


def loader(executable: Any, node: Any, table: Table) -> Callable[[Sequence[Tensor], Sequence[Tensor]], int]:
    """What has the next launch of an executable graph copy these inputs with its stage kernel, a node, and hand out to
    these outputs, or to none at all; each a list or tuple. It returns the driver's status; or -1, with nothing told to
    the driver, where an input was freed."""
    if native.missing is None:
        from graphreplay_cuda._native import Loader

        compiled = Loader(
            table,
            *(table.sizes, table.sources, table.destinations, table.inputs, table.outputs),
            driver.address("cuGraphExecKernelNodeSetParams"),
            *map(int, (executable, node, table.params.getPtr())),
        )
        return compiled.load
    set_params = driver.bindings().cuGraphExecKernelNodeSetParams

    def load(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        return int(set_params(executable, node, table.params)[0]) if table.fill(inputs, outputs) else -1

    return load


def _capacity(capacities: Sequence[int], count: int) -> int:
    return next(capacity for capacity in capacities if count <= capacity)


def _grid(sizes: Sequence[int]) -> tuple[int, int]:
    rows = max(1, len(sizes))
    blocks = min(_MAX_BLOCKS // rows, max(1, -(-max(sizes, default=0) // _BYTES_PER_BLOCK)))
    return blocks, rows


_copy_nodes: weakref.WeakSet[CopyNode] = weakref.WeakSet()


class CopyNode:
    """The stage kernel at the root of one graph, and the one at its end if that hands outputs out. Adding them
    instantiates the graph, again if it was.

    Args:
        in_flight: whether launches of the graph may be.

    Raises:
        CaptureError: the driver refuses.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, launches: Launches, hand_out: HandOut | None, *, in_flight: bool
    ) -> None:
        self.hand_out = hand_out
        self.launches = launches
        self.replay = super(torch.cuda.CUDAGraph, graph).replay  # without the Python of torch around it
        self.loaded = False
        """Whether the next launch would copy what the latest one did."""
        self.closed = ""
        try:
            with torch.cuda.device(launches.device), driver.relaxed():
                self._nothing = Table(launches.device.index, (), hand_out)
                if in_flight:
                    launches.wait()  # instantiating anew destroys them
                driver.ensure_context()
                self.node = driver.put_in_front(graph.raw_cuda_graph(), self._nothing.params)
                if hand_out is not None:
                    driver.put_behind(graph.raw_cuda_graph(), hand_out.params)
                graph.instantiate()
        except (DriverError, RuntimeError) as error:
            raise CaptureError(f"the graph could not be instantiated with its copy kernels: {error}") from error
        self.executable = driver.bindings().CUgraphExec(graph.raw_cuda_graph_exec())
        _copy_nodes.add(self)

    def clear(self) -> None:
        """Has the next launch copy nothing, neither in nor out."""
        if self.loaded:
            driver.ensure_context()
            driver.call("cuGraphExecKernelNodeSetParams", self.executable, self.node, self._nothing.params)
            self.loaded = False

    def close(self, why: str) -> None:
        """Has ``check`` refuse launches from now on."""
        self.closed = why

    def check(self) -> None:
        """Comes before whatever a launch changes.

        Raises:
            GraphStateError: the graph is gone.
        """
        if self.closed:
            raise GraphStateError(f"stage_and_launch {self.closed}")


def _close_in_child() -> None:
    for node in _copy_nodes:
        node.close("in a process forked after the capture; capture the graph in this one")


os.register_at_fork(after_in_child=_close_in_child)
