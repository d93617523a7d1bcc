"""One captured graph with its static inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Generator, Tensor

from graphreplay.request import Key
from graphreplay.storage import CopyPlan, any_freed, maker_of, overlap_across_storages, storage_ids
from graphreplay.tree import check_rebuilt, rebuilder, replace_tensors


class Launch(Protocol):
    """Runs captured work once, on the current stream."""

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Copies the bytes of the inputs onto the static inputs; launches; and has the bytes of the static outputs
        copied into ``outputs``. All have the layouts of their static tensors.

        Raises:
            NoMemoryError: an input was freed, and nothing was done.
        """


class Graph(Protocol):
    """What a backend's ``_capture_graph`` returns."""

    nbytes: int
    """Device memory that the graph holds, without its static inputs."""

    def staging(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Launch:
        """How to run the captured work on other values of these static inputs, and hand out these static outputs. Each
        of them is dense and alone in its storage."""

    def reset(self) -> None:
        """Waits for replays in flight and frees the graph; it is never replayed again. Repeated calls do nothing."""


class NoMemoryError(Exception):
    """A tensor was freed by resizing its storage."""


def require_memory(tensors: Sequence[Tensor]) -> None:
    """Raises NoMemoryError where one of them was freed."""
    if any_freed(tensors):
        raise NoMemoryError("a kwarg has no memory")


def launch_between(
    replay: Callable[[], object], static_inputs: Sequence[Tensor], static_outputs: Sequence[Tensor]
) -> Launch:
    """A Launch that copies before and after ``replay()``."""
    staging, handing_out = CopyPlan(static_inputs), CopyPlan(static_outputs)

    def launch(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        require_memory(inputs)
        staging.copy(static_inputs, inputs)
        replay()
        handing_out.copy(outputs, static_outputs)

    return launch


def _lending(launch: Launch) -> Launch:
    """One that hands nothing out."""
    return lambda inputs, outputs: launch(inputs, ())


def _handing_out_dense(launch: Launch, plan: CopyPlan) -> Launch:
    """One that leaves out the outputs which the plan's ``copy_rest`` copies."""
    return lambda inputs, outputs: launch(inputs, plan.pick_dense(outputs))


class Entry:
    """A graph, the tensors that it reads its inputs from, and the tensors that it leaves its outputs in.

    Args:
        key: what it is looked up by.
        graph: from the backend.
        inputs: the static inputs, in leaf order.
        written: positions of inputs that the forward writes.
        changes: tensors and generators beside them that it may change.
        repeatable: a replay writes nothing but memory of this entry, so that one whose outputs are dropped did no harm.
        outputs: the static output tree; output_leaves are its tensors.
        keep_alive: objects that the graph reads by address.
        clone_outputs: whether outputs are handed out in tensors of their own, and not as the static ones themselves.
            They are all the same where the graph writes or returns its inputs: a caller who passes a static output in
            again would have one of the two overwritten with the other.
    """

    def __init__(
        self,
        key: Key,
        graph: Graph,
        inputs: list[Tensor],
        written: Sequence[int],
        changes: tuple[list[Tensor], list[Generator]],
        repeatable: bool,
        outputs: Any,
        output_leaves: list[Tensor],
        keep_alive: tuple[Any, ...],
        *,
        clone_outputs: bool,
    ) -> None:
        self.key = key
        self.graph = graph
        self.repeatable = repeatable
        self.replays = 0
        self.written = written
        self.changes = changes
        self._inputs = inputs
        self._staging = CopyPlan(inputs)
        self._complex = any(tensor.is_complex() for tensor in inputs)
        self._write_back = CopyPlan([inputs[position] for position in written])
        # As they are now: a weight among them may be moved, and the graph goes on writing, or reading, as much as ever.
        aliases = {id(tensor): tensor.detach() for tensor in output_leaves}
        output_leaves = [aliases[id(tensor)] for tensor in output_leaves]
        # Rebuilt here and at each call, so that nobody else holds, or changes, a container that is handed out.
        self.rebuild = rebuilder(replace_tensors(outputs, iter(output_leaves), share_records=False))
        check_rebuilt(self.rebuild(output_leaves), output_leaves, "output")
        self._output_leaves = output_leaves
        shares_inputs = not set(storage_ids(inputs)).isdisjoint(storage_ids(output_leaves))
        lends = not (clone_outputs or written or shares_inputs)
        self._handing_out = None if lends else CopyPlan(output_leaves)
        handed_out = () if self._handing_out is None else self._handing_out.pick_dense(output_leaves)
        launch = graph.staging(self._staging.pick_dense(inputs), handed_out)
        # None of these may hold the entry: nobody but its graph's owner is to keep it, and its memory, alive.
        self.launch: Launch = launch
        """Replays what was staged; on a device this returns while the work goes on."""
        self.allocate: Callable[[], Sequence[Tensor]]
        """Makes memory for the outputs."""
        if self._handing_out is None:
            self.launch, self.allocate = _lending(launch), lambda: output_leaves
        elif self._handing_out.is_simple:
            self.allocate = maker_of(output_leaves)
        else:
            self.launch = _handing_out_dense(launch, self._handing_out)
            self.allocate = partial(self._handing_out.allocate, output_leaves)
        plain_outputs = self._handing_out is None or self._handing_out.is_simple
        self.is_plain = self._staging.is_simple and not written and plain_outputs
        """Whether a replay takes no more than ``allocate``, ``launch`` and ``rebuild``, if the bytes of all inputs are
        their values."""
        self.plannable = True
        """Whether a plan can recognize calls of this graph, as far as is known."""
        self._keep_alive = keep_alive
        self.reads_only = repeatable and not written and not shares_inputs
        """Whether nobody can tell if inputs share storage with each other, or with what the module holds."""
        self.nbytes = graph.nbytes + self._staging.nbytes

    def refusal(self, leaves: Sequence[Tensor]) -> str | None:
        """Why these inputs cannot be staged, though the key is that of the graph, or None."""
        if self._staging.uncopyable(leaves) is not None:
            return "a kwarg that shares storage is lazily conjugated or negated, and was not at capture"
        if self.written and overlap_across_storages(leaves):
            return "the forward writes a kwarg, and two kwargs of different storages lie in the same memory"
        return None

    def stage(self, leaves: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """All that can be done before anything runs that an eager call would do again.

        Args:
            leaves: the tensors to copy, in leaf order.

        Returns:
            What ``launch`` takes: inputs, and memory for the outputs.
        """
        dense = self._staging.pick_dense(leaves)
        if any(map(Tensor.is_neg, dense)) or (self._complex and any(map(Tensor.is_conj, dense))):
            dense = [leaf.resolve_neg().resolve_conj() for leaf in dense]
        outputs = self.allocate()
        self._staging.copy_rest(self._inputs, leaves)
        return dense, outputs

    def hand_out(self, leaves: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        """The outputs of the last launch. Inputs that the forward writes are written in ``leaves`` too, as the eager
        forward would do."""
        self.replays += 1
        if self.written:
            positions = self.written
            self._write_back.copy([leaves[p] for p in positions], [self._inputs[p] for p in positions])
        if self._handing_out is not None:
            self._handing_out.copy_rest(outputs, self._output_leaves)
        return self.rebuild(outputs)

    def free(self) -> None:
        """Frees the graph and, with this entry, the memory around it."""
        self.graph.reset()

    def __del__(self) -> None:
        # A wrapper that is dropped while a replay is in flight: the static tensors must outlive it.
        graph: Graph | None = getattr(self, "graph", None)  # not so if it was never finished
        if graph is not None:
            graph.reset()
