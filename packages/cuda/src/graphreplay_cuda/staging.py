"""Inputs copied by the graph itself: a kernel at its root, whose table of addresses is set anew before each launch.

The table travels by value with a launch, so a later call cannot change what an earlier one still reads, and the copies
are ordered with the graph's own work, on whatever stream it is launched.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, compress, count, repeat
from typing import Any

import torch
from torch import Tensor

from graphreplay import ConfigurationError
from graphreplay.entry import NoMemoryError, require_memory
from graphreplay.storage import any_freed, extent, is_freed, layout
from graphreplay.tree import TENSOR_TYPES
from graphreplay_cuda import driver, kernels
from graphreplay_cuda.copynode import CopyNode, Table, loader
from graphreplay_cuda.errors import DriverError


class _Likeness:
    """What inputs must look like for their bytes to be what the buffers should get."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._like = like
        self._shapes = [tensor.shape for tensor in like]
        self._strides = [tensor.stride() for tensor in like]
        self._dtypes = [tensor.dtype for tensor in like]
        self._devices = [tensor.get_device() for tensor in like]
        self._layouts = [tensor.layout for tensor in like]
        self._complex = any(dtype.is_complex for dtype in self._dtypes)

    def at(self, position: int) -> _Likeness:
        """Those of one input."""
        return _Likeness(self._like[position : position + 1])

    def fit(self, inputs: Sequence[Any]) -> bool:
        """Whether inputs do. One property of all at a time, since this runs on each call."""
        return (
            set(map(type, inputs)) <= TENSOR_TYPES
            and [tensor.shape for tensor in inputs] == self._shapes
            and [tensor.dtype for tensor in inputs] == self._dtypes
            and list(map(Tensor.get_device, inputs)) == self._devices
            and [tensor.layout for tensor in inputs] == self._layouts
            and list(map(Tensor.stride, inputs)) == self._strides
            and not any(map(Tensor.is_neg, inputs))
            and not (self._complex and any(map(Tensor.is_conj, inputs)))
        )


class Staging:
    """``stage_and_launch`` for one list of static inputs.

    Buffers that are dense and apart from each other are written by the graph's copy node, up to the largest of
    CAPACITIES; the rest by ``copy_``, ordered behind the graph's last launch. It serves as long as the CUDAGraph that
    made it, which it does not keep.
    """

    def __init__(self, node: CopyNode, static_inputs: Sequence[Tensor]) -> None:
        self._static = list(static_inputs)
        _check_static(self._static, node.launches.device)
        self._node = node
        self._by_node = _apart(self._static)[: kernels.CAPACITIES[-1]]
        self._rest = [p for p in range(len(self._static)) if p not in set(self._by_node)]
        with driver.relaxed():
            table = Table(node.launches.device.index, [self._static[p] for p in self._by_node], node.hand_out)
        self._load = loader(node.executable, node.node, table)
        self._likeness = _Likeness(self._static)
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
        launches = self._node.launches
        # In inference mode, since buffers made there may be written nowhere else.
        with torch.inference_mode(), launches.lock:
            self._node.check()
            launches.refuse_capture("stage_and_launch")
            self.launch(self._plain(inputs))

    def launch(self, inputs: Sequence[Tensor]) -> None:
        """As ``stage_and_launch``, but trusts the caller that no capture is under way, and that there is one input for
        each buffer: a tensor of the same dtype, device, shape and strides, not lazily conjugated or negated, that
        shares no memory with any buffer. Anything else may copy foreign memory.

        Raises:
            ConfigurationError: an input was freed; nothing was launched.
            GraphStateError: the graph is gone.
        """
        launches, inputs = self._node.launches, as_list("inputs", inputs)
        with launches.lock:
            self._node.check()  # before anything changes
            launches.take_turn()
            try:
                self.run(inputs, ())
            except NoMemoryError as error:
                raise ConfigurationError(str(error)) from None

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """As ``launch``, for a list or tuple; copies what the graph hands out to ``outputs``, a list or tuple of
        tensors of the same layouts, where one without elements stands for nowhere; or nowhere at all. The caller has
        taken the graph's turn, and sees to it that no other thread does meanwhile.

        Raises:
            NoMemoryError: an input was freed; nothing was launched.
        """
        if not driver.thread.has_context:
            driver.ensure_context()
        node = self._node
        if node.closed:
            node.check()
        if self._rest:
            require_memory(inputs)
            for position in self._rest:
                self._static[position].copy_(inputs[position])
            inputs = [inputs[p] for p in self._by_node]
        status = self._load(inputs, outputs)
        if status:
            if status < 0:
                raise NoMemoryError("an input has no memory")
            raise DriverError(f"cuGraphExecKernelNodeSetParams failed: {driver.status_name(status)}")
        node.loaded = True
        node.replay()

    def _plain(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs, converted where the copy node needs that, and copied where they share memory with a buffer."""
        plain = as_list("inputs", inputs)
        if len(plain) != len(self._static):
            raise ConfigurationError(f"{len(plain)} inputs for {len(self._static)} static inputs")
        if not self._likeness.fit(plain):
            for position, tensor in enumerate(plain):
                if not isinstance(tensor, Tensor):
                    raise ConfigurationError(f"input {position} is no tensor but {type(tensor).__name__}")
                if not self._likeness.at(position).fit([tensor]):
                    plain[position] = self._converted(position, tensor)
        addresses = list(map(Tensor.data_ptr, plain))
        if any_freed(plain):
            _check_memory("input", plain)
        # How many buffers start before each input ends, and how far those reach.
        before = map(bisect_left, repeat(self._starts), map(operator.add, addresses, self._sizes))
        reach = map(self._ends.__getitem__, before)
        shared = list(compress(count(), map(operator.gt, reach, addresses)))
        if shared:
            self._node.launches.take_turn()  # an earlier launch may still write what is read here
        for position in shared:
            plain[position] = self._converted(position, plain[position])
        return plain

    def _converted(self, position: int, tensor: Tensor) -> Tensor:
        """The values of an input in a new tensor, laid out as the buffer, or contiguous if that has gaps."""
        target = self._static[position]
        dense = layout(target) == (False, False)
        strides = target.stride() if dense else torch.empty(target.shape, device="meta").stride()
        return torch.empty_strided(target.shape, strides, dtype=target.dtype, device=target.device).copy_(tensor)


def as_list(what: str, tensors: Iterable[Tensor]) -> list[Tensor]:
    """A list of what is given.

    Raises:
        ConfigurationError: it cannot be iterated over.
    """
    try:
        return list(tensors)
    except TypeError as error:
        raise ConfigurationError(f"{what} are a sequence of tensors, not {type(tensors).__name__}") from error


def _check_memory(what: str, tensors: Sequence[Tensor]) -> None:
    for position, tensor in enumerate(tensors):
        if is_freed(tensor):
            raise ConfigurationError(f"{what} {position} has no memory")


def _check_static(static_inputs: list[Tensor], device: torch.device) -> None:
    for position, tensor in enumerate(static_inputs):
        where = f"static input {position}"
        if type(tensor) not in TENSOR_TYPES or tensor.layout != torch.strided or tensor.is_nested:
            raise ConfigurationError(f"{where} is no plain tensor but {type(tensor).__name__}")
        if tensor.device != device:
            raise ConfigurationError(f"{where} is on {tensor.device}, and the graph on {device}")
        if layout(tensor)[1]:
            raise ConfigurationError(f"{where} overlaps itself, as expanded tensors do; a buffer cannot")
    _check_memory("static input", static_inputs)


def _apart(tensors: list[Tensor]) -> list[int]:
    """Positions of tensors that are dense, hold their values as they are, and share no memory with any other. Those
    without elements are among them."""
    spans = sorted((t.data_ptr(), t.data_ptr() + extent(t), p) for p, t in enumerate(tensors) if t.numel())
    apart = [position for position, tensor in enumerate(tensors) if not tensor.numel()]
    reach = 0
    for index, (start, end, position) in enumerate(spans):
        next_start = spans[index + 1][0] if index + 1 < len(spans) else end
        lazy = tensors[position].is_neg() or tensors[position].is_conj()
        if start >= reach and next_start >= end and not lazy and layout(tensors[position]) == (False, False):
            apart.append(position)
        reach = max(reach, end)
    return sorted(apart)
