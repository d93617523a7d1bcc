"""A wrapper's place among the ranks of its process group."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import distributed as dist

from graphreplay.abort import CollectiveAbort, wait_for_aborts
from graphreplay.agreement import Agreement, Ballot
from graphreplay.digest import key_digest
from graphreplay.errors import ConfigurationError, RankDisagreementError
from graphreplay.request import Key
from graphreplay.together import Alone, Together

_out_of_step: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
"""Why this process is out of step with others, by the world that it was in then. Groups share ranks and wrappers share
groups, so that one capture that falls out of step spoils the collectives of all: they may mix, or have been aborted,
and a graph that holds some would leave behind whatever was there."""


class NoPeers:
    """Of a wrapper without a group, or alone in it: nobody is asked, and nobody told."""

    alone = True
    """Whether ``check`` and ``next_call`` may be left out."""

    def __init__(self, ranks: list[int] | None) -> None:
        self.ranks = ranks
        """Those that run the forward's collectives; None: it may have none."""

    def check(self) -> None:
        """Raises RankDisagreementError if this process is out of step with others."""

    def next_call(self) -> str:
        """A name for the call that begins, the same on all ranks."""
        return ""

    def excuse(self, call: str, reason: str) -> None:
        """Tells the other ranks, who may miss at this call, that this one does not, and why."""

    def together(self, call: str, key: Key, holds: str, warm_ups: int, *, captures_run: bool) -> Alone:
        """The meetings of a capture; see Together."""
        return Alone()

    def leave(self, reason: str) -> None:
        """Tells the other ranks not to wait for this wrapper any more."""

    def close(self) -> None:
        """Leaves, when all graphs of the wrapper are gone."""

    def forget(self, wrapper: object) -> None:
        """Leaves when the wrapper goes."""


class Peers(NoPeers):
    """Of a wrapper in a group of several ranks."""

    alone = False

    def __init__(
        self, group: dist.ProcessGroup, ranks: list[int], name: str, device: torch.device, deadline: float
    ) -> None:
        super().__init__(ranks)
        self.agreement = Agreement.of_group(ranks, hashlib.sha256(name.encode(errors="replace")).hexdigest(), deadline)
        self._group, self._device = group, device
        self._calls = 0

    def check(self) -> None:
        if not _out_of_step:  # every call comes by here
            return
        world = dist.group.WORLD
        reason = None if world is None else _out_of_step.get(world)
        if reason is not None:
            raise RankDisagreementError(f"this process is out of step with other ranks: {reason}")

    def next_call(self) -> str:
        self._calls += 1
        return f"call {self._calls}"

    def excuse(self, call: str, reason: str) -> None:
        self.agreement.excuse(f"{call}/before", Ballot("", reason, "skip", excused=True))

    def together(self, call: str, key: Key, holds: str, warm_ups: int, *, captures_run: bool) -> Alone:
        digest = f"{key_digest(key, self._device)}, warm-ups: {warm_ups}"
        abort = CollectiveAbort(self._group, self._device, self.agreement.deadline)

        def break_off(reason: str, groups: set[dist.ProcessGroup]) -> None:
            fall_out_of_step(reason)
            abort(groups)

        return Together(self.agreement, call, digest, holds, warm_ups, captures_run=captures_run, break_off=break_off)

    def leave(self, reason: str) -> None:
        self.agreement.leave(reason)

    def close(self) -> None:
        self.leave("it was closed")
        wait_for_aborts()

    def forget(self, wrapper: object) -> None:
        finalize(wrapper, self.agreement.leave, "its wrapper was dropped").atexit = False


def fall_out_of_step(reason: str) -> None:
    """Lets every wrapper of this process know that collectives cannot be trusted any more."""
    world = dist.group.WORLD
    if world is not None:
        _out_of_step.setdefault(world, reason)


def peers_of(group: dist.ProcessGroup | None, name: str, device: torch.device, deadline: float) -> NoPeers:
    """The peers of a wrapper on this device.

    Raises:
        ConfigurationError: see ``ranks_of``.
    """
    if group is None:
        return NoPeers(None)
    ranks = ranks_of(group, device)
    return NoPeers(ranks) if len(ranks) == 1 else Peers(group, ranks, name, device, deadline)


def ranks_of(group: Any, device: torch.device) -> list[int]:
    """The ranks of a group, this process's own among them.

    Raises:
        ConfigurationError: torch.distributed is not initialized, the group is none, is gone or is without this rank, or
            it has no backend for the device.
    """
    if not dist.is_initialized():
        raise ConfigurationError("a group is given, but torch.distributed is not initialized: init_process_group()")
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group() returns to ranks that it leaves out
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
