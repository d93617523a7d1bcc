"""Branches and loops that the device decides on, as methods of CUDAGraph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from graphreplay_cuda.blocks import IfNode, WhileNode

if TYPE_CHECKING:
    from graphreplay_cuda.capture import Capture


class ConditionalNodes:
    """What CUDAGraph offers while it is captured, to put work under a condition that each replay evaluates.

    Bodies nest. They may hold what a graph may hold, except random numbers, collectives, waits for events of other
    streams and calls into the host. Streams that fork in a body join before it ends or a nested one begins.
    """

    def _capturing(self, what: str) -> Capture:
        """The capture under way, for a method of this name."""
        raise NotImplementedError

    def begin_capture_to_if_node(self, pred: Tensor) -> None:
        """Captures what follows into a body that runs where ``pred`` is True when a replay gets here.

        Args:
            pred: one bool on the graph's device. The graph keeps it alive, and each replay reads it.

        Raises:
            GraphStateError: no capture is under way in this thread.
            FeatureUnavailableError: the driver is older than CUDA 12.4.
            PredicateError, ConditionalBodyError: a bad predicate, or a stream outside the innermost open body.

        In the body, torch refuses operators that draw random numbers with a RuntimeError of its own; the blocks
        (``if_node``, ``while_node``) and ``while_loop`` say why.
        """
        self._capturing("begin_capture_to_if_node").bodies.begin("if", pred)

    def begin_capture_to_else_node(self) -> None:
        """Captures what follows into a body that runs where the predicate of the if body which has just ended is False.

        Raises:
            GraphStateError: no capture is under way in this thread.
            FeatureUnavailableError: the driver is older than CUDA 12.8.
            ConditionalBodyError: no if body has just ended.
        """
        self._capturing("begin_capture_to_else_node").bodies.begin_else()

    def begin_capture_to_while_node(self, pred: Tensor) -> None:
        """Captures what follows into a body that runs again and again: first if ``pred`` is True when a replay gets
        here, then as long as ``set_conditional_handle_for_current_node`` says. Arguments and errors as for if nodes."""
        self._capturing("begin_capture_to_while_node").bodies.begin("while", pred)

    def set_conditional_handle_for_current_node(self, pred: Tensor) -> None:
        """Has the innermost while body run again if ``pred`` is True when a replay gets here.

        Raises:
            GraphStateError: no capture is under way in this thread.
            PredicateError, ConditionalBodyError: a bad predicate, or no while body is innermost.
        """
        self._capturing("set_conditional_handle_for_current_node").bodies.set(pred)

    def end_capture_to_conditional_node(self) -> None:
        """Ends the innermost open body.

        Raises:
            GraphStateError: no capture is under way in this thread, or no body is open.
            ConditionalBodyError: a while body never sets its predicate (it stays open), or holds what no body can run
                (``capture_end`` will give the capture up).
        """
        self._capturing("end_capture_to_conditional_node").bodies.end()

    def if_node(self, pred: Tensor) -> IfNode:
        """``with graph.if_node(pred) as branch:`` captures a body as ``begin_capture_to_if_node`` does; right behind
        it, ``with branch.orelse():`` captures the other one."""
        return IfNode(self._capturing("if_node"), pred)

    def while_node(self, pred: Tensor) -> WhileNode:
        """``with graph.while_node(pred) as loop:`` captures a body as ``begin_capture_to_while_node`` does;
        ``loop.set(pred)``, its last step, decides about the next iteration."""
        return WhileNode(self._capturing("while_node"), pred)
