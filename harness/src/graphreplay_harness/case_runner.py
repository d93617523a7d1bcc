"""Supervises cases: one supervisor for each rank, which starts a process for each case and outlives it.

Supervisors meet in the store of torchrun's agent, and never in a collective. So do the processes of a case, under a
prefix of their own: whichever of them ends, the store stays. No supervisor hosts one: it would have threads, whose
locks a fork can catch held.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.rendezvous import rendezvous

from graphreplay_harness.case_child import READY, START_LIMIT, Ending, Seat, play
from graphreplay_harness.case_faults import DEATH_STATUS
from graphreplay_harness.case_model import Case, Outcome

GRACE = 1.0
"""Seconds beyond the deadline until a process is killed, for it to write its stack."""

EXIT_LIMIT = 10.0
"""Seconds for a process to destroy its process group and end, once the ranks of its case have ended."""

_STACK = "Timeout ("  # how faulthandler begins
_ENOUGH = 4000


@dataclass(frozen=True)
class Report:
    """How one rank of one case ended."""

    case: str
    rank: int
    outcome: str
    reason: str
    milliseconds: float
    """From when it was ready until it had ended, or until its supervisor gave it up."""
    exit_milliseconds: float
    """From when it was told to leave until its process was gone."""
    expected: list[str]
    says: str
    """What the reason was to contain."""
    ok: bool
    stack: str = ""
    """Of a rank that hangs."""
    log: str = field(default="", repr=False)
    """The end of its output, if it is not ok."""

    def line(self) -> str:
        """One line of JSON, without the log."""
        content = asdict(self)
        del content["log"]
        return json.dumps(content)


class Supervisor:
    """Runs cases on this rank, in step with the supervisors of the other ranks.

    Rank, number of ranks and where they meet come from the environment that torchrun sets.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        # PyTorch is imported already, which a fork keeps. A supervisor never touches a device, which would not survive.
        self._processes = multiprocessing.get_context("fork")
        agents, self.rank, self.world = next(rendezvous("env://"))
        self._store = PrefixStore("graphreplay/supervisors", agents)
        self._local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self._count = 0
        self._folder = tempfile.TemporaryDirectory(prefix="graphreplay-cases-")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._folder.cleanup()

    def run(self, case: Case) -> list[Report]:
        """Runs a case, and returns the reports of all ranks."""
        self._count += 1
        log = Path(self._folder.name, str(self._count))
        seat = Seat(
            self.rank,
            self.world,
            self._local_rank,
            self.device_type,
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            f"graphreplay/cases/{self._count}",
            str(log),
        )
        here, there = self._processes.Pipe()
        # Daemonic, so that it ends with this process, and started by nobody else, so that its id is ours to kill.
        process = self._processes.Process(target=play, args=(case, seat, there), daemon=True)
        process.start()
        there.close()
        try:
            ending, milliseconds = _supervise(case, process, here)
            self._exchange("ended", "", case)  # the others may need what this process holds
            left = 0.0 if ending.outcome == Outcome.HANG else _dismiss(process, here)
        finally:
            if process.is_alive():
                process.kill()
                process.join()
            here.close()
        mine = self._report(case, ending, milliseconds, left, log)
        texts = self._exchange("report", json.dumps(asdict(mine)), case)
        return [_lost(case, rank) if text is None else Report(**json.loads(text)) for rank, text in enumerate(texts)]

    def _report(self, case: Case, ending: Ending, milliseconds: float, left: float, log: Path) -> Report:
        if left > 1000 * EXIT_LIMIT:
            ending = Ending(Outcome.LINGERS, f"{ending.outcome}: {ending.reason}")
        expected = case.expected[self.rank]
        ok = expected.met(*ending)
        text = log.read_text(errors="replace") if log.exists() else ""
        stack = text[text.find(_STACK) :] if ending.outcome == Outcome.HANG and _STACK in text else ""
        return Report(
            case.name,
            self.rank,
            *ending,
            milliseconds=round(milliseconds, 1),
            exit_milliseconds=round(left, 1),
            expected=sorted(expected.outcomes),
            says=expected.says,
            ok=ok,
            stack=stack[:_ENOUGH],
            log="" if ok else text[-_ENOUGH:],
        )

    def _exchange(self, what: str, text: str, case: Case) -> list[str | None]:
        """What all ranks have to tell, in the order of the ranks; nobody goes on before the last one has."""
        self._store.set(f"{self._count}/{what}/{self.rank}", text)
        limit = START_LIMIT + timedelta(seconds=case.deadline + EXIT_LIMIT + 10 * GRACE)
        texts: list[str | None] = []
        for rank in range(self.world):
            key = f"{self._count}/{what}/{rank}"
            try:
                self._store.wait([key], limit)
                texts.append(self._store.get(key).decode())
            except (DistStoreError, DistNetworkError):
                texts.append(None)
        return texts

    def leave(self, ok: bool) -> bool:
        """Whether all supervisors found all well."""
        self._store.set(f"leave/{self.rank}", str(ok))
        keys = [f"leave/{rank}" for rank in range(self.world)]
        try:
            self._store.wait(keys, START_LIMIT)
            return all(self._store.get(key) == b"True" for key in keys)
        except (DistStoreError, DistNetworkError):
            return False


def _supervise(case: Case, process: Any, child: Any) -> tuple[Ending, float]:
    """Waits for the process to tell how it ended, or to end, or to be late, and for how long it ran."""
    # The store's own limit comes first, so that the process can say what it waited for.
    if not wait([child, process.sentinel], START_LIMIT.total_seconds() + 10 * GRACE):
        return Ending(Outcome.HANG, "it was never ready"), 0.0
    first = _receive(child, process)
    if first != READY:
        return first, 0.0
    start = time.perf_counter()
    if not wait([child, process.sentinel], case.deadline + GRACE):
        ending = Ending(Outcome.HANG, f"it did not end within {case.deadline:g} s")
    else:
        ending = _receive(child, process)
    return ending, 1000 * (time.perf_counter() - start)


def _dismiss(process: Any, child: Any) -> float:
    """Tells a process to leave, and how many milliseconds that took."""
    start = time.perf_counter()
    with suppress(OSError):  # it is gone already
        child.send(None)
    wait([process.sentinel], EXIT_LIMIT + GRACE)
    return 1000 * (time.perf_counter() - start)


def _lost(case: Case, rank: int) -> Report:
    expected = case.expected[rank]
    why = "its supervisor told nothing"
    return Report(case.name, rank, Outcome.LOST, why, 0.0, 0.0, sorted(expected.outcomes), expected.says, False)


def _receive(child: Any, process: Any) -> Any:
    """What the process sent; or, if it ended without a word, how it did."""
    try:
        if child.poll():
            return child.recv()
    except (EOFError, OSError):
        pass
    process.join()
    status = process.exitcode
    if status == DEATH_STATUS:
        return Ending(Outcome.DIED, "")
    return Ending(Outcome.CRASHED, f"signal {-status}" if status < 0 else f"exit status {status}")
