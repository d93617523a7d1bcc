"""Ranks of a process group decide together, in the store of torch.distributed, which no forward uses.

They meet at places that they all name alike. Each rank leaves a ballot there and waits for the others' until a
deadline; whoever has seen enough proposes a verdict. The store takes the first proposal and shows it to all, so that
every rank reads the same one, however late it came.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import distributed as dist

from graphreplay.errors import RankDisagreementError
from graphreplay.stats import logger

FIRST_PAUSE, LONGEST_PAUSE = 0.0001, 0.01
"""Seconds between two looks at the store; each is half as long again as the one before."""

KEPT_EXCUSES = 16
"""How many calls a rank may be behind another one, which runs eagerly, and still learn why."""

NOTHING = "\x00"
"""What compare_set answers, given it as the expected value, where there is no such key; nobody writes it."""

SEVERITIES = ("", "skip", "refuse", "disable")
"""What a failure ends: nothing, this capture, captures of this key, captures of this wrapper. The worst one counts."""


@dataclass(frozen=True)
class Ballot:
    """What one rank has to say at a meeting."""

    digest: str
    """Of what it is about to capture; equal on all ranks if they may go on."""
    failure: str | None = None
    """Why this rank cannot go on."""
    severity: str = ""
    """How far the failure reaches: one of SEVERITIES."""
    holds: str = ""
    """What graphs it keeps; ranks that do not keep the same will not miss together."""
    progress: str = ""
    """Which collectives of the capture it has run; equal on all ranks if they are in step."""
    excused: bool = False
    """Whether it does not come to this meeting."""


@dataclass(frozen=True)
class Verdict:
    """What the ranks have decided, the same on all of them."""

    ballots: dict[int, Ballot]
    missing: dict[int, str]
    """Ranks that did not come: what they said when they left, or where each was seen last."""
    gone: bool
    """Whether some rank has left for good."""

    @property
    def go(self) -> bool:
        """Whether all came, can go on, and mean the same."""
        digests = {ballot.digest for ballot in self.ballots.values()}
        return not self.missing and self.severity == "" and len(digests) == 1

    @property
    def in_step(self) -> bool:
        """Whether all have run the same collectives."""
        return not self.missing and len({ballot.progress for ballot in self.ballots.values()}) == 1

    @property
    def severity(self) -> str:
        """The worst of the ballots."""
        return max((ballot.severity for ballot in self.ballots.values()), key=SEVERITIES.index, default="")

    def why(self, own: int) -> str:
        """The reasons of a verdict against going on, this rank's own first."""
        failures = {rank: ballot.failure for rank, ballot in self.ballots.items() if ballot.failure is not None}
        ours = failures.get(own)
        others = {rank: text for rank, text in {**self.missing, **failures}.items() if rank != own}
        reasons = [] if ours is None else [ours]
        # Most failures are the same on all ranks; then one says it all.
        reasons += [f"rank {rank}: {others[rank]}" for rank in sorted(others) if others[rank] != ours]
        if own in self.missing and not reasons:
            reasons = ["this rank came after the others had given up"]
        if not reasons:
            sides: dict[str, list[int]] = {}
            for rank, ballot in self.ballots.items():
                sides.setdefault(ballot.digest, []).append(rank)
            reasons = [
                f"ranks {' and '.join(map(str, sides.values()))} call differently: in the structure or constants of "
                "their kwargs, in variant=, in grad or autocast mode, or in warmup_iters="
            ]
        return "; ".join(reasons)


class Agreement:
    """One wrapper's meetings with its peers on the other ranks.

    Args:
        store: a store of torch.distributed, or a prefix of one, for these meetings alone.
        ranks: of the group, as the world counts them.
        rank: this one.
        deadline: seconds to wait for the others at a meeting.
    """

    _built: ClassVar[Counter[tuple[str, str]]] = Counter()

    def __init__(self, store: Any, ranks: list[int], rank: int, deadline: float) -> None:
        self.ranks, self.rank = ranks, rank
        self.deadline = deadline
        self._store = store
        self._process = os.getpid()
        self._past: list[str] = []
        self._heard: dict[int, str] = {}
        self._excuses: deque[str] = deque()
        self._left = False
        self.waits_in_vain = 0
        """In a row, for ranks that did not come."""

    @classmethod
    def of_group(cls, ranks: list[int], name: str, deadline: float) -> Agreement:
        """The agreement of a wrapper in a group of these ranks. It keeps the store alive, and not the group.

        Wrappers of one name on one group count from 0 in the order in which they are built, which is to be the same on
        all ranks.
        """
        members = "-".join(map(str, ranks))
        number = cls._built[members, name]
        cls._built[members, name] += 1
        store = dist.distributed_c10d._get_default_store()
        prefix = dist.distributed_c10d.PrefixStore(f"graphreplay/{members}/{name}/{number}", store)
        return cls(prefix, ranks, dist.get_rank(), deadline)

    def meet(self, place: str, ballot: Ballot) -> Verdict:
        """Meets the other ranks.

        Raises:
            RankDisagreementError: the store is gone.
        """
        try:
            verdict = self._meet(place, ballot)
        except RuntimeError as error:
            raise RankDisagreementError(f"rank {self.rank} cannot reach the store, at {place}: {error}") from error
        except BaseException:  # an interrupt: this rank's ballot is there, and it does not come after all
            proposal = {"came": {}, "missing": {self.rank: "was interrupted"}, "gone": False}
            with suppress(RuntimeError):  # the store may be gone
                self._store.compare_set(f"{place}/verdict", "", json.dumps(proposal))
            raise
        self.waits_in_vain = self.waits_in_vain + 1 if verdict.missing else 0
        return verdict

    def _meet(self, place: str, ballot: Ballot) -> Verdict:
        keys = {rank: f"{place}/{rank}" for rank in self.ranks}
        decided = f"{place}/verdict"
        self._store.set(keys[self.rank], json.dumps(asdict(ballot)))
        end, pause = time.monotonic() + self.deadline, FIRST_PAUSE
        in_time = True
        while not self._has(*keys.values()) and not self._has(decided):
            in_time = time.monotonic() <= end
            if not in_time or self._has("left"):
                break
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)
        texts = {rank: self._read(key) for rank, key in keys.items()}
        proposal = {
            "came": {rank: text for rank, text in texts.items() if text is not None},
            "missing": {rank: self._last_seen(rank, in_time) for rank, text in texts.items() if text is None},
            "gone": any(self._has(f"left/{rank}") for rank in self.ranks),
        }
        verdict = json.loads(self._store.compare_set(decided, "", json.dumps(proposal)))
        ballots = {int(rank): Ballot(**json.loads(text)) for rank, text in verdict["came"].items()}
        if not verdict["missing"]:
            self._forget([keys[self.rank], decided])
        self._hear()
        return Verdict(ballots, {int(rank): text for rank, text in verdict["missing"].items()}, verdict["gone"])

    def excuse(self, place: str, ballot: Ballot) -> None:
        """Leaves a ballot at a place that this rank does not come to. The last few stay there, for ranks that are some
        calls behind."""
        key = f"{place}/{self.rank}"
        self._excuses.append(key)
        self._write(key, json.dumps(asdict(ballot)))
        if len(self._excuses) > KEPT_EXCUSES:
            self._delete(self._excuses.popleft())

    def at(self, place: str) -> None:
        """Lets the others know where this rank is, should it not come back."""
        self._write(f"at/{self.rank}", place)

    def leave(self, reason: str) -> None:
        """Tells the others not to wait for this rank any more. The first reason stays."""
        if not self._left and self._process == os.getpid():  # a forked child is no rank, and shares the connection
            self._left = True
            self._write(f"left/{self.rank}", reason)
            self._write("left", str(self.rank))

    def alone(self, reason: str) -> None:
        """Tells the others, who need not come, that this rank has waited for them in vain."""
        self._write(f"alone/{self.rank}", reason)

    def _write(self, key: str, text: str) -> None:
        try:
            # Errors of other programs may hold halves of characters, which no store takes.
            self._store.set(key, text.encode(errors="backslashreplace").decode())
        except RuntimeError as error:  # whoever hosts the store is gone; there is something worse to tell
            logger.warning("rank %d cannot tell the others at %s: %s: %s", self.rank, key, text, str(error))

    def _delete(self, key: str) -> None:
        with suppress(RuntimeError):  # it is clean-up, and no reason to lose a verdict
            self._store.delete_key(key)

    def _hear(self) -> None:
        with suppress(RuntimeError):  # the verdict is there already
            for rank in self.ranks:
                text = None if rank == self.rank else self._read(f"alone/{rank}")
                if text is not None and self._heard.get(rank) != text:  # it stays there for the others
                    self._heard[rank] = text
                    logger.warning("rank %d: %s", rank, text)

    def _has(self, *keys: str) -> bool:
        return bool(self._store.check(list(keys)))

    def _read(self, key: str) -> str | None:
        """What stands at a key, or None. The store's own ``get`` waits for keys that are not there, and one that was
        there a moment ago may have been deleted."""
        text = str(self._store.compare_set(key, NOTHING, NOTHING).decode())
        return None if text == NOTHING else text

    def _last_seen(self, rank: int, in_time: bool) -> str:
        left = self._read(f"left/{rank}")
        if left is not None:
            return f"left: {left}"
        at = self._read(f"at/{rank}")
        when = f"when rank {self._read('left')} had left" if in_time else f"within {self.deadline:g} s"
        return f"did not come {when}" + ("" if at is None else f", seen last at {at}")

    def _forget(self, keys: list[str]) -> None:
        """Deletes what this rank has left at the meeting before, and its verdict: whoever came to this meeting has read
        that one's."""
        for key in self._past:
            self._delete(key)
        self._past = keys
