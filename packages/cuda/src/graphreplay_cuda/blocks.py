"""Conditional bodies as blocks: what is opened is closed, whatever happens inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from torch import Tensor

from graphreplay_cuda.conditional import Body
from graphreplay_cuda.current import current_capture
from graphreplay_cuda.errors import ConditionalBodyError, GraphStateError

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
        if self._body is not None:
            raise GraphStateError("a block of a conditional body is entered once; make another one")
        if current_capture() is not self._capture:
            raise GraphStateError("the block belongs to a capture that is over, or to one of another thread")
        self._body = self._begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        bodies, body = self._capture.bodies, self._body
        assert body is not None
        if current_capture() is not self._capture:
            self._capture.spoiled = "a block of a conditional body was left in another thread, or after its capture"
            return
        problem = None
        if body not in bodies.open:
            problem = f"the {body.kind} body was ended inside its block, so what followed was not in it"
            self._capture.spoiled = self._capture.spoiled or problem
        elif bodies.open[-1] is not body:
            problem = f"a body inside the {body.kind} body was left open; end it there"
        elif error is not None:
            bodies.spoil(f"its {body.kind} body raised {type(error).__name__}: {error}")
        else:
            self._end(body)
        while body in bodies.open:
            bodies.spoil(problem or "it was left unfinished")
        if _is_random_refusal(error):
            raise ConditionalBodyError(
                f"random numbers in a {body.kind} body: each iteration would draw the same ones, and a body that is "
                "skipped would advance the generator; draw them before the body"
            ) from error
        if problem is not None and error is None:
            raise ConditionalBodyError(problem)

    def _end(self, body: Body) -> None:
        try:
            self._capture.bodies.end()
        except ConditionalBodyError as refused:
            if body in self._capture.bodies.open:
                self._capture.bodies.spoil(str(refused))
            raise


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
        return ElseNode(self._capture, self)


class ElseNode(_Block):
    """The block of an else body."""

    def __init__(self, capture: Capture, branch: IfNode) -> None:
        super().__init__(capture)
        self._branch = branch

    def _begin(self) -> Body:
        if self._branch._body is None:
            raise ConditionalBodyError("an else body follows its if body at once; that has not been captured")
        return self._capture.bodies.begin_else(self._branch._body)


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
        if current_capture() is not self._capture or self._body not in self._capture.bodies.open[-1:]:
            raise ConditionalBodyError("set() outside the loop's own body, or inside a body within it")
        self._capture.bodies.set(predicate)


def _is_random_refusal(error: BaseException | None) -> bool:
    """Whether torch refused an operator since its generator takes no part in the capture."""
    text = str(error)  # of 2.11 and 2.13, or of a later torch
    return isinstance(error, RuntimeError) and "captur" in text and ("generator" in text or "RNG op" in text)
