"""Bodies of conditional nodes, while they are captured.

A conditional node runs its body graphs as a handle says, which a kernel in front of the node sets from a predicate on
the device. What a body holds is captured on a stream of its own, piece by piece: a piece ends where a nested node
begins or the body ends, and goes into the body graph as one child graph.

The driver can also capture straight into a body graph. But where such a capture fails, it destroys that graph, and the
node that holds it crashes the process when its own graph goes; a piece that fails takes nothing along.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from graphreplay_cuda import driver, features, kernels
from graphreplay_cuda.arguments import check_predicate
from graphreplay_cuda.errors import ConditionalBodyError, DriverError, GraphStateError

if TYPE_CHECKING:
    from graphreplay_cuda.capture import Capture

Kind = Literal["if", "else", "while"]

_RUNS_IN_BODIES = frozenset({"KERNEL", "MEMCPY", "MEMSET", "EMPTY", "GRAPH", "CONDITIONAL"})
"""CUDA's rule for bodies (CUDA programming guide, conditional graph nodes). What else a capture can hold comes from
collectives and events of other streams (WAIT_EVENT, EVENT_RECORD), and from calls into the host (HOST)."""


@dataclass(eq=False)
class Body:
    """A body being captured, or just captured."""

    kind: Kind
    graph: int
    handle: int
    else_graph: int | None
    stream: torch.cuda.Stream
    parent: torch.cuda.Stream
    """The stream that was current, and will be again."""
    progress: tuple[int, ...]
    """How far the graph around it was when the body was opened; work must not go there meanwhile."""
    tail: list[Any] = field(default_factory=list)
    """The node of the body graph that the next one depends on, if any."""
    is_set: bool = False

    @property
    def end(self) -> driver.CaptureInfo:
        """Where the next node of the body graph goes."""
        return driver.CaptureInfo.behind(self.graph, self.tail)


class Bodies:
    """The open bodies of one capture, innermost last. Made before the capture begins."""

    def __init__(self, capture: Capture) -> None:
        self.open: list[Body] = []
        self._capture: Capture = weakref.proxy(capture)  # no cycle: predicates hold memory of the pool
        self._closed_if: Body | None = None
        self._generator = torch.cuda.default_generators[capture.device.index]
        self._random_state: Any = None
        self._outsider = torch.Generator(capture.device)
        self._outsider.seed()  # other threads may draw from it meanwhile

    def begin(self, kind: Literal["if", "while"], predicate: Tensor) -> Body:
        """Adds a conditional node behind what the current stream holds, and captures into its body.

        Raises:
            FeatureUnavailableError: the driver has no such nodes.
            PredicateError: the predicate is not one bool on the device.
            ConditionalBodyError: the current stream is not the one of the innermost open body, or of the capture.
        """
        features.require(f"{kind} nodes")
        check_predicate(predicate, self._capture.device)
        parent = self._checked_stream()
        self._capture.keep_alive.append(predicate)
        bodies = 2 if kind == "if" and features.available("else bodies") else 1
        with self._spoiling("the driver refuses the node"):
            stream = self._capture.body_stream(parent)
            handle, graphs = self._add_node(parent, predicate, loop=kind == "while", bodies=bodies)
            else_graph = graphs[1] if bodies == 2 else None
            return self._open(Body(kind, graphs[0], handle, else_graph, stream, parent, self._progress()))

    def begin_else(self, branch: Body | None = None) -> Body:
        """Captures into the else body of an if node whose body has just ended; None: of the last one.

        Raises:
            FeatureUnavailableError: the driver has no else bodies.
            ConditionalBodyError: no if body has just ended here.
        """
        features.require("else bodies")
        parent, last = self._checked_stream(), self._closed_if
        known = last is not None and last.else_graph is not None and (branch is None or branch is last)
        if last is None or last.else_graph is None or not known or last.progress != self._progress():
            raise ConditionalBodyError("an else body follows its if body at once; no if body has just ended here")
        body = Body("else", last.else_graph, last.handle, None, last.stream, parent, last.progress)
        with self._spoiling("the driver refuses the else body"):
            return self._open(body)

    def set(self, predicate: Tensor) -> None:
        """Has the innermost open while body decide about its next iteration by this predicate, where it stands now.

        Raises:
            PredicateError: the predicate is not one bool on the device.
            ConditionalBodyError: no while body is innermost, or the current stream is not the body's.
        """
        if not self.open or self.open[-1].kind != "while":
            raise ConditionalBodyError("there is no while body to set the predicate of: the innermost open one is not")
        check_predicate(predicate, self._capture.device)
        stream = self._checked_stream()
        self._capture.keep_alive.append(predicate)
        self._launch_setter(self.open[-1].handle, predicate, stream)
        self.open[-1].is_set = True

    def end(self) -> None:
        """Ends the innermost body; its parent stream is current again.

        Raises:
            GraphStateError: no body is open.
            ConditionalBodyError: it is a while body that never sets its predicate, and stays open; or the body cannot
                run, and the capture will be refused.
        """
        if not self.open:
            raise GraphStateError("no conditional body is open; begin one first")
        body = self.open[-1]
        if body.kind == "while" and not body.is_set:
            raise ConditionalBodyError(
                "the while body never sets its predicate, so it would never end; compute it anew as the body's last "
                "step and call set(predicate)"
            )
        with self._spoiling("the body cannot be ended"):
            self._close(body)
        self._closed_if = body if body.kind == "if" else None

    def spoil(self, why: str) -> None:
        """Ends the innermost body, if any, which is unfinished; the capture will be refused."""
        self._capture.spoiled = self._capture.spoiled or why
        if self.open:
            with suppress(ConditionalBodyError):  # the first reason counts
                self._close(self.open[-1])

    def abandon(self) -> None:
        """Ends all open bodies, whatever the driver says."""
        while self.open:
            with suppress(DriverError, ConditionalBodyError):  # why we are here, or as good
                self._leave(self.open[-1])

    @contextmanager
    def _spoiling(self, what: str) -> Iterator[None]:
        """Has the capture refused if the block fails, after which the graph is not what was asked for."""
        try:
            yield
        except ConditionalBodyError as error:
            self._capture.spoiled = self._capture.spoiled or str(error)
            raise
        except DriverError as error:
            self._capture.spoiled = self._capture.spoiled or str(error)
            raise ConditionalBodyError(f"{what}: {error}") from error

    def _add_node(
        self, parent: torch.cuda.Stream, predicate: Tensor, *, loop: bool, bodies: int
    ) -> tuple[int, list[int]]:
        """Adds a setter and a conditional node where the current stream is. Returns its handle and its bodies."""
        if self.open:
            outer = self.open[-1]
            self._end_piece(outer)
            driver.begin_capture(outer.stream.cuda_stream, self._capture.mode)
            handle = driver.conditional_handle(outer.graph)
            arguments = (ctypes.c_uint64 * 2)(handle, predicate.data_ptr())
            pointers = (ctypes.c_void_p * 2)(ctypes.addressof(arguments), ctypes.addressof(arguments) + 8)
            setter = driver.kernel_params(self._setter, ctypes.addressof(pointers))
            outer.tail = [driver.add_kernel(outer.end, setter)]
            node, graphs = driver.add_conditional(outer.end, handle, loop=loop, bodies=bodies)
            outer.tail = [node]
        else:
            handle = driver.conditional_handle(self._capture.root)
            self._launch_setter(handle, predicate, parent)
            here = driver.capture_info(parent.cuda_stream)
            assert here is not None
            node, graphs = driver.add_conditional(here, handle, loop=loop, bodies=bodies)
            driver.continue_behind(parent.cuda_stream, [node])
        return handle, graphs

    def _open(self, body: Body) -> Body:
        driver.begin_capture(body.stream.cuda_stream, self._capture.mode)
        self.open.append(body)
        self._closed_if = None
        torch.cuda.set_stream(body.stream)
        if self._random_state is None:
            # Every iteration of a body would draw the same numbers, and a body that is skipped would advance the
            # generator all the same. A state that takes no part in the capture makes torch refuse the operator.
            self._random_state = self._generator.graphsafe_get_state()
            self._generator.graphsafe_set_state(self._outsider)
        return body

    def _close(self, body: Body) -> None:
        try:
            self._leave(body)
        except DriverError as error:
            raise ConditionalBodyError(
                f"the {body.kind} body cannot be captured: {error}. Did an operator in it wait for the device, or was "
                "work put on another stream and not joined?"
            ) from error
        if self._progress() != body.progress:
            raise ConditionalBodyError(
                f"work was put on another stream of the capture while the {body.kind} body was open; it would run "
                "whatever the predicate says. Put it before the body, or into it"
            )

    def _leave(self, body: Body) -> None:
        self.open.pop()
        self._closed_if = None
        if not self.open and self._random_state is not None:
            self._generator.graphsafe_set_state(self._random_state)
            self._random_state = None
        torch.cuda.set_stream(body.parent)
        self._end_piece(body)

    def _end_piece(self, body: Body) -> None:
        """Ends the capture on the body's stream and adds what it holds to the body graph."""
        piece = driver.end_capture(body.stream.cuda_stream)
        try:
            kinds = {driver.node_kind(node) for node in driver.nodes(piece)}
            if kinds - _RUNS_IN_BODIES:
                raise ConditionalBodyError(
                    f"the {body.kind} body holds {', '.join(sorted(kinds - _RUNS_IN_BODIES))} nodes, which no "
                    "conditional body can run; they come from collectives, events of other streams and host callbacks. "
                    "Move those out of the body"
                )
            if kinds:
                body.tail = [driver.add_child(body.end, piece)]
        finally:
            driver.destroy_graph(piece)

    def _progress(self) -> tuple[int, ...]:
        """How many nodes the innermost graph has, and the piece of it that is being captured."""
        if not self.open:
            return (driver.node_count(self._capture.root),)
        piece = driver.capture_info(self.open[-1].stream.cuda_stream)
        return (driver.node_count(self.open[-1].graph), -1 if piece is None else driver.node_count(piece.graph))

    def _checked_stream(self) -> torch.cuda.Stream:
        """The current stream, which must be where the innermost graph is captured."""
        stream = torch.cuda.current_stream(self._capture.device)
        here = driver.capture_info(stream.cuda_stream)
        if self.open and (stream != self.open[-1].stream or here is None):
            raise ConditionalBodyError(
                f"the current stream is not that of the innermost open body, the {self.open[-1].kind} body, or its "
                "capture is broken"
            )
        if not self.open and (here is None or here.graph != self._capture.root):
            raise ConditionalBodyError("the current stream is not one of this capture, or the capture is broken")
        return stream

    @property
    def _setter(self) -> Any:
        return kernels.set_predicate(self._capture.device.index)

    def _launch_setter(self, handle: int, predicate: Tensor, stream: torch.cuda.Stream) -> None:
        values = ((handle, predicate.data_ptr()), (ctypes.c_uint64, ctypes.c_void_p))
        driver.call("cuLaunchKernel", self._setter, 1, 1, 1, 1, 1, 1, 0, stream.cuda_stream, values, 0)
