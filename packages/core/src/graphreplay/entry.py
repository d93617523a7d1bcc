"""One captured graph with its static inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Generator, Tensor

from graphreplay.storage import CopyPlan, overlap_across_storages
from graphreplay.tree import check_rebuilt, replace_tensors


class Graph(Protocol):
    """What a backend's ``_capture_graph`` returns."""

    nbytes: int
    """Device memory that the graph holds, without its static inputs."""

    def staging(self, inputs: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None]:
        """How to run the captured work on other values of these static inputs, each of which is dense and alone in its
        storage: a function that copies the bytes of tensors of the same layout onto them and launches on the current
        stream."""

    def reset(self) -> None:
        """Waits for replays in flight and frees the graph; it is never replayed again. Repeated calls do nothing."""


class Entry:
    """A graph, the tensors that it reads its inputs from, and the tensors that it leaves its outputs in.

    Args:
        graph: from the backend.
        inputs: the static inputs, in leaf order.
        written: positions of inputs that the forward writes.
        changes: tensors and generators beside them that it may change.
        repeatable: a replay writes nothing but memory of this entry, so that one whose outputs are dropped did no harm.
        outputs: the static output tree; output_leaves are its tensors.
        keep_alive: objects that the graph reads by address.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: list[Tensor],
        written: Sequence[int],
        changes: tuple[list[Tensor], list[Generator]],
        repeatable: bool,
        outputs: Any,
        output_leaves: list[Tensor],
        keep_alive: tuple[Any, ...],
    ) -> None:
        self.graph = graph
        self.repeatable = repeatable
        self.replays = 0
        self.written = written
        self.changes = changes
        self._inputs = inputs
        self._staging = CopyPlan(inputs)
        self._launch = graph.staging(self._staging.pick_dense(inputs))
        self._complex = any(tensor.is_complex() for tensor in inputs)
        self._write_back = CopyPlan([inputs[position] for position in written])
        # Rebuilt here and at each call, so that nobody else holds, or changes, a container that is handed out.
        self._outputs = replace_tensors(outputs, iter(output_leaves), share_records=False)
        check_rebuilt(self._outputs, output_leaves, "output")
        self._output_leaves = output_leaves
        self._handing_out = CopyPlan(output_leaves)
        self._keep_alive = keep_alive
        self.nbytes = graph.nbytes + self._staging.nbytes

    def refusal(self, leaves: Sequence[Tensor]) -> str | None:
        """Why these inputs cannot be staged, though the key is that of the graph, or None."""
        if self._staging.uncopyable(leaves) is not None:
            return "a kwarg that shares storage is lazily conjugated or negated, and was not at capture"
        if self.written and overlap_across_storages(leaves):
            return "the forward writes a kwarg, and two kwargs of different storages lie in the same memory"
        return None

    def stage(self, leaves: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Tensor] | None]:
        """All that can be done before anything runs that an eager call would do again: the inputs for ``launch``, and
        memory for the outputs, unless the replay can be dropped."""
        self._staging.copy_rest(self._inputs, leaves)
        dense = self._staging.pick_dense(leaves)
        if any(map(Tensor.is_neg, dense)) or (self._complex and any(map(Tensor.is_conj, dense))):
            # Their bytes are not their values.
            dense = [leaf.resolve_neg().resolve_conj() for leaf in dense]
        drops = self.repeatable and not self.written
        return dense, None if drops else self._handing_out.allocate(self._output_leaves)

    def launch(self, dense: Sequence[Tensor]) -> None:
        """Replays; on a device this returns while the work goes on."""
        self._launch(dense)

    def hand_out(self, leaves: Sequence[Tensor], outputs: list[Tensor] | None) -> Any:
        """The outputs of the last launch, in tensors that the caller owns, such as these. Inputs that the forward
        writes are written in ``leaves`` too, as the eager forward would do."""
        self.replays += 1
        if self.written:
            positions = self.written
            self._write_back.copy([leaves[p] for p in positions], [self._inputs[p] for p in positions])
        if outputs is None:
            outputs = self._handing_out.allocate(self._output_leaves)
        self._handing_out.copy(outputs, self._output_leaves)
        return replace_tensors(self._outputs, iter(outputs), share_records=False)

    def free(self) -> None:
        """Frees the graph and, with this entry, the memory around it."""
        self.graph.reset()

    def __del__(self) -> None:
        # A wrapper that is dropped while a replay is in flight: the static tensors must outlive it.
        graph: Graph | None = getattr(self, "graph", None)  # not so if it was never finished
        if graph is not None:
            graph.reset()
