"""Conditional bodies as blocks: what is opened is closed, whatever happens inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from torch import Tensor

from graphreplay_cuda.conditional import Body, is_random_refusal
from graphreplay_cuda.errors import ConditionalBodyError

if TYPE_CHECKING:
    from graphreplay_cuda.capture import Capture


class _Block:
    """A body that is open within the block. If the block raises, so that the body is unfinished, the error goes on and
    the capture will be refused at its end."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._body: Body | None = None

    def _begin(self) -> Body:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._body = self._begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        bodies, body = self._capture.bodies, self._body
        assert body is not None
        if body not in bodies.open:
            return  # the capture was given up inside the block
        unbalanced = bodies.open[-1] is not body
        while bodies.open[-1] is not body:
            bodies.spoil(f"a body inside the {body.kind} body was left open")
        if error is not None:
            bodies.spoil(f"its {body.kind} body raised {type(error).__name__}: {error}")
        elif unbalanced:
            bodies.spoil(f"a body inside the {body.kind} body was left open")
            raise ConditionalBodyError(f"a body inside the {body.kind} body was left open; end it there")
        else:
            try:
                bodies.end()
            except ConditionalBodyError as refused:
                if body in bodies.open:
                    bodies.spoil(str(refused))
                raise
        if is_random_refusal(error):
            raise ConditionalBodyError(
                f"random numbers in a {body.kind} body: each iteration would draw the same ones, and a body that is "
                "skipped would advance the generator; draw them before the body"
            ) from error


class IfNode(_Block):
    """The block of an if body."""

    def __init__(self, capture: Capture, predicate: Tensor) -> None:
        super().__init__(capture)
        self._predicate = predicate

    def _begin(self) -> Body:
        return self._capture.bodies.begin("if", self._predicate)

    def orelse(self) -> ElseNode:
        """The block of what runs where the predicate is False; it follows the if block at once.

        Raises, on entry:
            FeatureUnavailableError: the driver is older than CUDA 12.8.
            ConditionalBodyError: something was captured since, or this if block is not the last one.
        """
        return ElseNode(self._capture, self._body)


class ElseNode(_Block):
    """The block of an else body."""

    def __init__(self, capture: Capture, branch: Body | None) -> None:
        super().__init__(capture)
        self._branch = branch

    def _begin(self) -> Body:
        return self._capture.bodies.begin_else(self._branch)


class WhileNode(_Block):
    """The block of a while body."""

    def __init__(self, capture: Capture, predicate: Tensor) -> None:
        super().__init__(capture)
        self._predicate = predicate

    def _begin(self) -> Body:
        return self._capture.bodies.begin("while", self._predicate)

    def set(self, predicate: Tensor) -> None:
        """Has the body run again if ``predicate`` is True when a replay gets here.

        Raises:
            PredicateError: it is not one bool on the device.
            ConditionalBodyError: another body is innermost.
        """
        if self._body is None or self._body not in self._capture.bodies.open[-1:]:
            raise ConditionalBodyError("set() outside the loop's own body, or inside a body within it")
        self._capture.bodies.set(predicate)
