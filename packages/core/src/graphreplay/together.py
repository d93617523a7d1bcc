"""One capture, alone or together with the other ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import distributed as dist
from torch._ops import OpOverload

from graphreplay.agreement import Agreement, Ballot, Verdict
from graphreplay.collectives import COLLECTIVES, ForeignCollectiveError, process_groups
from graphreplay.errors import CaptureError, RankDisagreementError
from graphreplay.opmode import OpMode, namespace_of
from graphreplay.stats import logger

WAITS_IN_VAIN = 3
"""So often in a row a rank waits for others that do not come, before it gives captures up: it calls out of turn."""


_SEEN = {"before": "before its warm-up", "warmed-up": "before its capture", "after": "after its capture"}


class Failure(CaptureError):
    """Why a capture is not kept, and how far that reaches.

    Attributes:
        severity: "skip" (this capture), "refuse" (captures of this key) or "disable" (all of this wrapper).
    """

    def __init__(self, severity: str, reason: str) -> None:
        super().__init__(reason)
        self.severity = severity


class Alone:
    """A capture that concerns this rank alone."""

    alone = True

    def begin(self) -> None:
        """The inputs are ready; the forwards of warm-up and capture come next.

        Raises:
            Failure: the other ranks do not come along.
        """

    @contextmanager
    def forward(self, phase: str) -> Iterator[None]:
        """Surrounds one forward that runs collectives for real."""
        yield

    def settle(self, error: Exception, run: Callable[[], object]) -> None:
        """After a failure: runs the forwards that the other ranks expect, as far as collectives can be made up for."""

    def warmed_up(self) -> None:
        """All warm-ups are issued; the capture comes next.

        Raises:
            Failure: one on another rank failed.
            RankDisagreementError: the ranks are out of step.
        """

    def agree(self, failure: Failure | None) -> Failure | None:
        """What all ranks make of how their captures went; None: every one keeps its own.

        Raises:
            RankDisagreementError: the ranks are out of step. No graph that holds their collectives may be left when
                they are broken off.
        """
        return failure

    def break_off(self, reason: str) -> None:
        """Ends the collectives of ranks that are out of step. Wrappers with a group raise from now on."""


class Together(Alone):
    """A capture for which the ranks meet before their first forward, between warm-up and capture, and at the end.

    The second meeting is there because a capture waits for the device (it loads kernels, it allocates), which waits for
    collectives of the warm-up, which wait for every rank to issue them.

    Args:
        place: of the call; the same on all ranks.
        digest: of what is captured.
        holds: what graphs this rank keeps, in words.
        warm_ups: how many there will be.
        captures_run: whether the capture runs collectives for real, as a warm-up does.
        break_off: ends this rank's collectives under way, which may never end by themselves; given the reason, and the
            groups that ran some.
    """

    alone = False

    def __init__(
        self,
        agreement: Agreement,
        place: str,
        digest: str,
        holds: str,
        warm_ups: int,
        *,
        captures_run: bool,
        break_off: Callable[[str, set[dist.ProcessGroup]], None],
    ) -> None:
        self._agreement = agreement
        self._break_off = break_off
        self._place, self._digest, self._holds = place, digest, holds
        self._captures_run = captures_run
        self._next = "before"
        """Which meeting comes next: before, warmed-up or after."""
        self._settled: Failure | None = None
        self._forwards = warm_ups
        """How many the ranks run until the next meeting."""
        self._done = 0
        self._per_forward: int | None = None
        """Collectives of one forward, once one is through."""
        self._count = _CollectiveCount()

    def begin(self) -> None:
        self._meet_and_go_on()
        self._next = "warmed-up"

    def warmed_up(self) -> None:
        try:
            self._meet_and_go_on()
        except RankDisagreementError as error:
            self.break_off(str(error))  # or the way out of here waits for the device
            raise
        self._next, self._forwards = "after", self._forwards + self._captures_run

    def _meet_and_go_on(self) -> None:
        failure = self.agree(None)
        if failure is not None:
            self._settled = failure
            raise failure

    @contextmanager
    def forward(self, phase: str) -> Iterator[None]:
        self._count.issued = 0
        self._agreement.at(f"{self._place}, {phase}")
        with self._count:
            yield
        self._per_forward = self._count.issued
        self._forward_is_through()

    def _forward_is_through(self) -> None:
        self._done, self._count.issued = self._done + 1, 0

    def settle(self, error: Exception, run: Callable[[], object]) -> None:
        if isinstance(_root(error), ForeignCollectiveError):
            return  # all ranks refuse it at the same place, and ranks that capture nothing would get its collectives
        if self._count.issued and self._count.issued == self._per_forward:
            self._forward_is_through()  # it failed behind its last collective
        # A forward that has issued some of its collectives cannot issue the rest: running it again would repeat them.
        if self._next == "before" or self._settled is not None or self._count.issued:
            return
        with suppress(Exception):  # the other ranks see by the count that it has failed again
            while self._done < self._forwards:
                with self._count:
                    run()
                self._forward_is_through()

    def agree(self, failure: Failure | None) -> Failure | None:
        if self._settled is not None:
            return self._settled  # the ranks have met over it already
        try:
            verdict = self._meet(failure)
        except RankDisagreementError as error:
            if self._count.issued:
                raise
            return Failure("disable", str(error))  # in step, as far as this rank can tell
        if verdict.go:
            return None
        if self._next != "before" and not verdict.in_step:
            raise RankDisagreementError(
                f"{self._place}: the ranks of {self._agreement.ranks} are out of step and cannot be brought back: "
                f"{verdict.why(self._agreement.rank)}. Their group is of no more use, and aborted on a GPU; start the "
                "processes anew"
            )
        return self._judged(verdict)

    def break_off(self, reason: str) -> None:
        self._break_off(reason, self._count.groups)

    def _meet(self, failure: Failure | None) -> Verdict:
        when = self._next
        self._agreement.at(f"{self._place}, {_SEEN[when]}")
        reason, severity = (None, "") if failure is None else (str(failure), failure.severity)
        progress = f"{self._done} forwards and {self._count.issued} collectives"
        ballot = Ballot(self._digest, reason, severity, self._holds, progress)
        verdict = self._agreement.meet(f"{self._place}/{when}", ballot)
        held = {rank: ballot.holds for rank, ballot in sorted(verdict.ballots.items()) if not ballot.excused}
        if when == "before" and len(set(held.values())) > 1:
            what = "; ".join(f"rank {rank}: {text}" for rank, text in held.items())
            logger.warning("the ranks do not keep the same graphs, and will wait for each other in vain: %s", what)
        return verdict

    def _judged(self, verdict: Verdict) -> Failure:
        why = verdict.why(self._agreement.rank)
        if verdict.gone:
            return Failure("disable", why)
        if verdict.missing and self._agreement.waits_in_vain >= WAITS_IN_VAIN:
            return Failure(
                "disable", f"this rank was alone {WAITS_IN_VAIN} times in a row, now at {self._place}: {why}"
            )
        if verdict.missing:
            self._agreement.alone(f"waited for the others at {self._place} and found: {why}")
            return Failure("refuse", f"this rank captures alone: {why}; it may have evicted what the others replay")
        return Failure(verdict.severity or "refuse", why)


class _CollectiveCount(OpMode):
    """Counts the collectives of one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.issued = 0
        self.groups: set[dist.ProcessGroup] = set()

    def on_op(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if namespace_of(op) in COLLECTIVES:
            self.issued += 1  # before, since one that fails may have reached the others
            self.groups.update(process_groups(args, kwargs))
        return op(*args, **kwargs)


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
