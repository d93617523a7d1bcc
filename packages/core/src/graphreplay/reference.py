"""The CPU reference backend: a device graph emulated operator by operator, for correctness and not for speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from graphreplay.collectives import COLLECTIVES, process_groups
from graphreplay.entry import Launch, launch_between
from graphreplay.errors import BackendUnavailableError, CaptureError
from graphreplay.forward import GraphedForward
from graphreplay.hostsync import SyncRefusal
from graphreplay.opmode import per_op, tensor_args, uncompiled


@dataclass(slots=True)
class _Call:
    """One recorded operator: run again, its results are copied into the storages that the capture gave out."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: list[tuple[int, torch.UntypedStorage]]
    """Results that alias no argument: their position among the result's tensors, and the recorded storage."""

    def run(self, works: list[Any]) -> None:
        """Runs it again, and adds what is still going on to ``works``: sends and receives wait for each other."""
        if self.op.namespace != "c10d":
            finish(works)
        result = self.op(*self.args, **self.kwargs)
        if self.op.namespace == "c10d":
            works.append(result[-1] if isinstance(result, tuple) else result)
        if self.op.namespace == "_c10d_functional":
            for tensor in tensor_args((result,)):
                torch.ops._c10d_functional.wait_tensor(tensor)
        if self.fresh:
            tensors = tensor_args((result,))
            for position, storage in self.fresh:
                storage.copy_(tensors[position].untyped_storage(), non_blocking=False)


def finish(works: list[Any]) -> None:
    """Waits for collectives under way."""
    for work in works:
        torch.distributed.Work.unbox(work).wait()
    works.clear()


class RecordedGraph:
    """Recorded operators that run again on the same storages: addresses are fixed, no Python of the module runs,
    outputs are overwritten, and random operators draw again."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.groups: set[Any] = set()
        """The process groups of its collectives. A group that goes waits for its threads, which may wait for Python:
        the last one to let go of it must be such an object, which releases the interpreter, and no recorded call."""
        self.nbytes = 0

    def staging(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Launch:
        return launch_between(self.replay, inputs, outputs)

    def replay(self) -> None:
        """Runs the recorded operators again."""
        # Whatever autocast did at capture is among the recorded operators; it must not act twice.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            works: list[Any] = []
            for call in self.calls:
                call.run(works)
            finish(works)

    def reset(self) -> None:
        self.calls.clear()
        self.groups.clear()


@per_op
def _is_autocast(op: OpOverload) -> bool:
    """Whether autocast casts the arguments of an operator."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCPU")


class _Recorder(SyncRefusal):
    """Runs each operator and appends it to a graph; refuses what a device capture would refuse."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__("cpu")
        self._autocast = torch.is_autocast_enabled("cpu")  # which a mode cannot see
        self._graph = graph
        self._made: set[int] = set()  # storages that recorded operators made; the graph keeps them alive

    def on_op(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Under a mode autocast does not reach the parts of a composite operator that it leaves alone as a whole.
        if self._autocast and self._composites and not any(map(_is_autocast, self._composites)) and _is_autocast(op):
            what = f"{self._composites[0]} cannot be recorded under autocast and inference mode; use torch.no_grad()"
            raise CaptureError(what)
        # In-place view operators (t_, squeeze_) change the very tensor object, so arguments are recorded as aliases:
        # one for each object, since some kernels ask whether two arguments are the same.
        aliases = {id(tensor): tensor.detach() for tensor in tensor_args(args, kwargs)}
        recorded_args, recorded_kwargs = tree_map(lambda arg: aliases.get(id(arg), arg), (args, kwargs))
        if op is torch.ops.aten.lift_fresh.default and args[0].untyped_storage()._cdata not in self._made:
            # torch.tensor(...) in the forward: eager makes the constant anew each time, so must a replay.
            op, recorded_args = torch.ops.aten.clone.default, (args[0].clone(),)
        result = super().on_op(op, args, kwargs)
        if torch.Tag.inplace_view in op.tags:
            return result  # it only renames memory, which has happened once and for all
        known = {tensor.untyped_storage()._cdata for tensor in tensor_args(args, kwargs)}
        fresh = []
        for position, tensor in enumerate(tensor_args((result,))):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._made.add(storage._cdata)
                fresh.append((position, storage))
                self._graph.nbytes += storage.nbytes()
        if op.namespace in COLLECTIVES:
            self._graph.groups.update(process_groups(args, kwargs))
        self._graph.calls.append(_Call(op, recorded_args, recorded_kwargs, fresh))
        return result


class ReferenceGraphedForward(GraphedForward):
    """Graphs on the CPU: every rule of the library holds as on a device, but a replay is no faster than eager.

    It serves to test modules and wrappers on any machine. It is asked for by name, or by device "cpu", and never chosen
    silently. Arguments, calls and errors are those of GraphedForward.
    """

    @classmethod
    def resolve_device(cls, device: torch.device) -> torch.device:
        if device.type == "cpu" and (device.index or 0) > 0:
            raise BackendUnavailableError(f"{device} is not here: the CPU counts as one device")
        return torch.device("cpu") if device.type == "cpu" else device  # tensors say "cpu", never "cpu:0"

    captures_run = True

    def _graphs_supported(self) -> str | None:
        if self.device.type != "cpu":
            return f"the reference backend runs on the CPU, not on {self.device}: take the class for that device"
        return None

    def _has_turn(self) -> bool:
        return True

    def _warmup_stream(self) -> AbstractContextManager[None]:
        return nullcontext()  # the CPU has one stream

    def _capture_graph(self, forward: Callable[[], Any]) -> tuple[RecordedGraph, Any]:
        graph = RecordedGraph()
        # Without the probe's function mode, which would send torch's fused attention layers down their slow path.
        with uncompiled(), _Recorder(graph):
            return graph, forward()
