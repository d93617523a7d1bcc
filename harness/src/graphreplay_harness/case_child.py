"""One rank of one case, in a process of its own: makes the calls, and tells how it ended."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from graphreplay import get_graphed_forward_cls
from graphreplay_harness.case_faults import Faults
from graphreplay_harness.case_model import Case, Outcome

START_LIMIT = timedelta(seconds=120)
"""For all ranks of a case to be ready."""

_BACKENDS = {"cpu": ("gloo", timedelta(seconds=3)), "cuda": ("nccl", timedelta(minutes=10))}
"""The backend by device type, and its timeout: a collective of gloo that waits in vain wakes by it, before the deadline
of the case. That of NCCL would end the whole process."""

READY = "ready"


class Ending(NamedTuple):
    """How the calls of a rank ended."""

    outcome: str
    reason: str


@dataclass(frozen=True)
class Seat:
    """Where a child belongs."""

    rank: int
    world: int
    local_rank: int
    device_type: str
    host: str
    port: int
    """Of the store, which no child holds."""
    prefix: str
    """Of the case's keys in it."""
    log: str
    """The file that takes all output."""

    @property
    def device(self) -> torch.device:
        return torch.device(f"cuda:{self.local_rank}" if self.device_type == "cuda" else self.device_type)


def play(case: Case, seat: Seat, supervisor: Connection) -> None:
    """Runs the case on this rank and ends the process: sends READY, then an Ending; destroys the process group and
    leaves when told to."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(seat.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(log)
    try:
        try:
            with _process_group(seat) as group:
                ending = _run(case, seat, group, supervisor)
        except Exception as error:
            traceback.print_exc()
            ending = Ending(Outcome.BROKEN, f"{type(error).__name__}: {error}")
        supervisor.send(ending)
        supervisor.recv()  # the others may still need what this process holds
        if dist.is_initialized():
            dist.destroy_process_group()
    except (EOFError, OSError):
        pass  # the supervisor is gone
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@contextmanager
def _process_group(seat: Seat) -> Iterator[dist.ProcessGroup]:
    store = TCPStore(seat.host, seat.port, is_master=False, timeout=START_LIMIT)
    own = PrefixStore(seat.prefix, store)
    own.set(f"here/{seat.rank}", "")
    own.wait([f"here/{rank}" for rank in range(seat.world)], START_LIMIT)
    if seat.device_type == "cuda":
        torch.cuda.set_device(seat.device)
    backend, timeout = _BACKENDS[seat.device_type]
    dist.init_process_group(backend, store=own, rank=seat.rank, world_size=seat.world, timeout=timeout)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD


def _run(case: Case, seat: Seat, group: dist.ProcessGroup, supervisor: Connection) -> Ending:
    torch.manual_seed(0)
    faults = Faults(case, seat.rank, seat.device)
    module = case.module(group).to(seat.device).eval()
    faults.watch(module)
    inputs = [_input(shape, seat, call) for call, shape in enumerate(case.calls[seat.rank])]
    with torch.inference_mode():
        wanted = [module(x=x) for x in inputs]  # all ranks are well, so that all collectives end
    supervisor.send(READY)
    faulthandler.dump_traceback_later(case.deadline, file=1)
    faults.arm()
    with faults.patches():
        ending = _call(case, seat, group, faults, module, list(zip(inputs, wanted, strict=True)))
    faulthandler.cancel_dump_traceback_later()
    if seat.rank in case.ranks and not faults.fired and not case.silent:
        return Ending(Outcome.BROKEN, f"no call came to {case.place}; else it is {ending.outcome}: {ending.reason}")
    return ending


def _call(
    case: Case,
    seat: Seat,
    group: dist.ProcessGroup,
    faults: Faults,
    module: torch.nn.Module,
    calls: list[tuple[Tensor, Tensor]],
) -> Ending:
    """Makes the calls until one raises, and closes the wrapper."""
    cls = faults.backend(get_graphed_forward_cls(seat.device_type))
    graphed = cls(
        module,
        device=seat.device,
        max_entries=case.entries_of(seat.rank),
        group=group if case.grouped else None,
        deadline=case.agree_within,
        capture_context=faults.capture_context,
    )
    was_on, error, wrong = graphed.enabled, None, ""
    try:
        for number, (x, want) in enumerate(calls):
            with torch.inference_mode():
                got = graphed(x=x)
            wrong = wrong or _difference(number, got, want)
    except Exception as raised:
        error = raised
    try:
        graphed.close()
    except Exception as raised:
        error = error or raised
        graphed.close()  # graphs have to go before their group
    if error is not None:
        traceback.print_exception(error)
    return _ending(wrong, error, graphed.stats(), was_on)


def _ending(wrong: str, error: Exception | None, stats: dict[str, Any], was_on: bool) -> Ending:
    print(stats)
    disabled = stats["disabled_reason"]
    if wrong:
        return Ending(Outcome.WRONG, wrong)
    if error is not None:
        return Ending(f"error:{type(error).__name__}", str(error))
    if disabled is not None:
        return Ending(Outcome.DISABLED if was_on else Outcome.EAGER, disabled)
    if stats["eager_reasons"]:
        return Ending(Outcome.REFUSED, "; ".join(stats["eager_reasons"]))
    return Ending(Outcome.GRAPHED if stats["captures"] else Outcome.EAGER, "")


def _difference(number: int, got: Tensor, want: Tensor) -> str:
    if got.shape != want.shape:
        return f"call {number} has shape {tuple(got.shape)} and not {tuple(want.shape)}"
    if torch.allclose(got, want, rtol=1e-5, atol=1e-6):
        return ""
    return f"call {number} is off by {(got - want).abs().max().item():g}"


def _input(shape: tuple[int, ...], seat: Seat, call: int) -> Tensor:
    """Values of its own for each rank and call, so that an old result is a wrong one."""
    generator = torch.Generator().manual_seed(1000 * seat.rank + call)
    return torch.randn(shape, generator=generator).to(seat.device)
