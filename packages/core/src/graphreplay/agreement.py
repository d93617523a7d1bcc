"""Ranks of a process group decide together, in the store of torch.distributed, which no forward uses.

They meet at places that they all name alike. Each rank leaves a ballot there and waits for the others' until a
deadline; whoever has seen enough proposes a verdict. The store takes the first proposal and shows it to all, so that
every rank reads the same one, however late it came.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist

from graphreplay.errors import ConfigurationError, RankDisagreementError
from graphreplay.stats import logger

FIRST_PAUSE, LONGEST_PAUSE = 0.0001, 0.01
"""Seconds between two looks at the store; each is half as long again as the one before."""

NOTHING = "\x00"
"""What compare_set answers, given it as the expected value, where there is no such key; nobody writes it."""

SEVERITIES = ("", "skip", "refuse", "disable")
"""What a failure ends: nothing, this capture, captures of this key, captures of this wrapper. The worst one counts."""


@dataclass
class GroupHealth:
    """What all wrappers on one process group share."""

    aborted: str | None = None
    """Why its collectives were aborted, if they were. A graph that holds some must not be replayed any more: they would
    end at once, and leave behind whatever was there."""


_healths: WeakKeyDictionary[dist.ProcessGroup, GroupHealth] = WeakKeyDictionary()


def health_of(group: dist.ProcessGroup) -> GroupHealth:
    """The one record of a group."""
    return _healths.setdefault(group, GroupHealth())


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
    """Which collectives it has run since the last meeting; equal on all ranks if they are in step."""


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
                "their kwargs, in variant=, in grad or autocast mode"
            ]
        return "; ".join(reasons)


class Agreement:
    """One wrapper's meetings with its peers on the other ranks.

    Args:
        store: a store of torch.distributed, or a prefix of one, for these meetings alone.
        ranks: of the group, as the world counts them.
        rank: this one.
        deadline: seconds to wait for the others at a meeting.
        health: of their group.
    """

    _built: ClassVar[Counter[tuple[str, str]]] = Counter()

    def __init__(
        self, store: Any, ranks: list[int], rank: int, deadline: float, health: GroupHealth | None = None
    ) -> None:
        self.ranks, self.rank = ranks, rank
        self.health = health or GroupHealth()
        self.deadline = deadline
        self._store = store
        self._past: list[str] = []
        self._heard: dict[int, str] = {}
        self._excuse = ""
        self.waits_in_vain = 0
        """In a row, for ranks that did not come."""

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, ranks: list[int], name: str, deadline: float) -> Agreement:
        """The agreement of a wrapper with its group of these ranks. It keeps the store alive, and not the group.

        Wrappers of one name on one group count from 0 in the order in which they are built, which is to be the same on
        all ranks.
        """
        members = "-".join(map(str, ranks))
        number = cls._built[members, name]
        cls._built[members, name] += 1
        store = dist.distributed_c10d._get_default_store()
        prefix = dist.distributed_c10d.PrefixStore(f"graphreplay/{members}/{name}/{number}", store)
        return cls(prefix, ranks, dist.get_rank(), deadline, health_of(group))

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
            self._store.compare_set(f"{place}/verdict", "", json.dumps(proposal))
            raise
        self.waits_in_vain = self.waits_in_vain + 1 if verdict.missing else 0
        return verdict

    def _meet(self, place: str, ballot: Ballot) -> Verdict:
        keys = {rank: f"{place}/{rank}" for rank in self.ranks}
        decided = f"{place}/verdict"
        self._store.set(keys[self.rank], json.dumps(asdict(ballot)))
        end, pause = time.monotonic() + self.deadline, FIRST_PAUSE
        while not self._has(*keys.values()) and not self._has(decided):
            if time.monotonic() > end or self._has("left"):
                break
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)
        texts = {rank: self._read(key) for rank, key in keys.items()}
        proposal = {
            "came": {rank: text for rank, text in texts.items() if text is not None},
            "missing": {rank: self._last_seen(rank) for rank, text in texts.items() if text is None},
            "gone": any(self._has(f"left/{rank}") for rank in self.ranks),
        }
        verdict = json.loads(self._store.compare_set(decided, "", json.dumps(proposal)))
        ballots = {int(rank): Ballot(**json.loads(text)) for rank, text in verdict["came"].items()}
        if not verdict["missing"]:
            self._forget([*keys.values(), decided])
        self._hear()
        return Verdict(ballots, {int(rank): text for rank, text in verdict["missing"].items()}, verdict["gone"])

    def excuse(self, place: str, ballot: Ballot) -> None:
        """Leaves a ballot at a place that this rank does not come to."""
        if self._excuse:
            self._store.delete_key(self._excuse)
        self._excuse = f"{place}/{self.rank}"
        self._write(self._excuse, json.dumps(asdict(ballot)))

    def at(self, place: str) -> None:
        """Lets the others know where this rank is, should it not come back."""
        self._write(f"at/{self.rank}", place)

    def leave(self, reason: str) -> None:
        """Tells the others not to wait for this rank any more."""
        self._write(f"left/{self.rank}", reason)
        self._write("left", "some")

    def alone(self, reason: str) -> None:
        """Tells the others, who need not come, that this rank has waited for them in vain."""
        self._write(f"alone/{self.rank}", reason)

    def _write(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except RuntimeError as error:  # whoever hosts the store is gone; there is something worse to tell
            logger.warning("rank %d cannot tell the others at %s: %s: %s", self.rank, key, text, error)

    def _hear(self) -> None:
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

    def _last_seen(self, rank: int) -> str:
        left = self._read(f"left/{rank}")
        if left is not None:
            return f"left: {left}"
        at = self._read(f"at/{rank}")
        return f"did not come within {self.deadline:g} s" + ("" if at is None else f", seen last at {at}")

    def _forget(self, keys: list[str]) -> None:
        """Has the first rank delete the meeting before: whoever came to this one has read that one's verdict."""
        if self.rank == self.ranks[0]:
            for key in self._past:
                self._store.delete_key(key)
        self._past = keys


def ranks_of(group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """The ranks of a group, this process's own among them.

    Raises:
        ConfigurationError: torch.distributed is not initialized, the group is none, is gone or is without this rank, or
            it has no backend for the device.
    """
    if not dist.is_initialized():
        raise ConfigurationError("a group is given, but torch.distributed is not initialized: init_process_group()")
    given: object = group
    if given is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group() returns to ranks that it leaves out
        raise ConfigurationError(f"rank {dist.get_rank()} is not in the group; wrap on its ranks alone")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(f"group is a ProcessGroup of torch.distributed, not {type(group).__name__}")
    rank = dist.get_rank()
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError) as error:
        raise ConfigurationError("this process knows no such group; it may be destroyed") from error
    if rank not in ranks:
        raise ConfigurationError(f"rank {rank} is not in the group of ranks {ranks}; wrap on those ranks alone")
    try:
        group._get_backend(device)
    except RuntimeError as error:
        raise ConfigurationError(f"the group has no backend for {device.type}: {error}") from error
    return ranks
