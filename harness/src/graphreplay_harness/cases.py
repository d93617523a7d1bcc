"""Cases of several ranks: faults brought about on some of them, and how every rank is to end.

    torchrun --nproc-per-node 2 -m graphreplay_harness.cases

Rank 0 prints a line of JSON for each rank of each case, and what a rank wrote on stderr if it did not end as expected.
The last lines of stderr say how many cases went how.

Exit codes: 0, every rank of every case ended as expected; 1, one did not; 2, bad options.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import distributed as dist
from torch import nn

from graphreplay_harness.case_faults import combinations
from graphreplay_harness.case_model import Case, Expected, Fault, Outcome, Place, Shape
from graphreplay_harness.case_modules import Plain, SharedMean
from graphreplay_harness.case_runner import Report, Supervisor
from graphreplay_harness.parallel import Block
from graphreplay_harness.rank_options import add_device, check_ranks, count_gpus

A: Shape = (1, 6, 8)
B: Shape = (1, 4, 8)
UNEVEN: Shape = (1, 5, 8)
"""A call of this shape among others of shape A."""

DISAGREEMENT = "error:RankDisagreementError"
INJECTED = {Fault.RAISE: "error:InjectedFault", Fault.MEMORY: "error:OutOfMemoryError"}
CUT_OFF = frozenset({"error:RuntimeError", "error:DistBackendError"})
"""How a collective ends whose peer does not come."""
BEHIND_THE_MEETING = (
    Place.CONTEXT_ENTER, Place.PROBE, Place.WARM_UP, Place.BETWEEN, Place.CAPTURE, Place.INSTANTIATE,
    Place.CONTEXT_EXIT,
)  # fmt: skip
"""Where the ranks have agreed to capture."""


HEADS = 4
"""Of the sequence-parallel block; its ranks share them."""

TAKE_A_DEADLINE = (Fault.SHAPE, Fault.CAPACITY, Fault.DEATH)
"""Faults that make a rank wait for others that do not come."""
DEADLINE = 2.0
"""The wrapper's own in those cases, in seconds."""

ON_ULYSSES = (Fault.RAISE, Fault.CAPACITY)
"""Faults that the sequence-parallel block sees as well."""


def outcomes(fault: Fault, place: Place, ranks: tuple[int, ...], world: int) -> tuple[Expected, ...]:
    """How each rank is to end, where the fault is on these."""
    here, elsewhere = _outcomes(fault, place, alone=len(ranks) < world)
    names = f"rank {ranks[0]}: " if ranks else ""
    # Whoever has failed says why, and the others who it was.
    captured_not = (Outcome.DISABLED, DISAGREEMENT)
    says = names if place is not Place.CLOSE and elsewhere and set(elsewhere) <= set(captured_not) else ""
    return tuple(
        Expected(frozenset(here)) if rank in ranks else Expected(frozenset(elsewhere), says) for rank in range(world)
    )


def _outcomes(fault: Fault, place: Place, *, alone: bool) -> tuple[set[str], set[str]]:
    """On the ranks that have the fault, and on the others."""
    if fault in (Fault.NONE, Fault.DELAY):
        return {Outcome.GRAPHED}, {Outcome.GRAPHED}
    if fault in (Fault.SHAPE, Fault.CAPACITY):  # a rank that misses alone waits once, and runs eagerly
        return {Outcome.REFUSED}, {Outcome.GRAPHED}
    if fault is Fault.DEATH:
        if place in BEHIND_THE_MEETING:
            return {Outcome.DIED}, {DISAGREEMENT}
        # Before a meeting nobody can tell a rank that is gone from one that replays; the next collective does.
        return {Outcome.DIED}, {Outcome.GRAPHED} if place is Place.CLOSE else {DISAGREEMENT, *CUT_OFF}
    if place is Place.EVICTION:
        return {Outcome.GRAPHED}, {Outcome.GRAPHED}
    if place is Place.CLOSE:
        return {INJECTED[fault]}, {Outcome.GRAPHED}
    if place is Place.REPLAY:  # it may have run half of its collectives
        return {INJECTED[fault]}, set(CUT_OFF)
    # A forward that waits for the device is let to its end, all collectives included.
    cut_short = place in (Place.BETWEEN, Place.BETWEEN_IN_CAPTURE) and fault is not Fault.HOST_SYNC
    if alone and (cut_short or fault is Fault.ALWAYS):
        return {DISAGREEMENT}, {DISAGREEMENT}
    return {Outcome.DISABLED}, {Outcome.DISABLED}


def matrix(world: int, device_type: str = "cpu") -> tuple[list[Case], list[tuple[str, str]]]:
    """Every fault at every place that it can be at; and the names of the other pairs, with the reason."""
    cases, left_out = [_case("none", world, Fault.NONE, Place.EAGER, ())], []
    for fault, place, ranks, reason in combinations(world):
        on = "all" if len(ranks) == world else str(ranks[0])
        name = f"{fault}:{place}:{on}"
        if device_type != "cpu" and reason is None:
            reason = _why_not_on_gpus(fault, place, ranks, world)
        if reason is not None:
            left_out.append((name, reason))
        else:
            cases.append(_case(name, world, fault, place, ranks))
    if HEADS % world:
        left_out.append(("ulysses:*", f"{HEADS} heads do not divide among {world} ranks"))
        return cases, left_out
    # The same on a forward that people run; between its collectives there is no module to strike in.
    for case in tuple(cases):
        if case.fault is Fault.NONE or (case.fault in ON_ULYSSES and not case.place.startswith(Place.BETWEEN)):
            cases.append(replace(case, name=f"ulysses:{case.name}", module=ulysses, between=""))
    return cases, left_out


def _why_not_on_gpus(fault: Fault, place: Place, ranks: tuple[int, ...], world: int) -> str | None:
    if place is Place.BETWEEN_IN_CAPTURE:
        return "a capture of a GPU issues no collectives"
    cut_off = any(CUT_OFF & expected.outcomes for expected in outcomes(fault, place, ranks, world))
    if cut_off:
        return "nothing but the end of its process ends a collective on a GPU whose peer does not come"
    return None


def ulysses(group: dist.ProcessGroup) -> nn.Module:
    """A transformer block over a sequence that the ranks share."""
    return Block(8, HEADS, 16, group)


def _case(name: str, world: int, fault: Fault, place: Place, ranks: tuple[int, ...]) -> Case:
    evicting = place is Place.EVICTION
    calls = [(A, B, A, B, A) if evicting else (A, A, B, A)] * world
    entries = [1 if evicting and fault is not Fault.CAPACITY else 4] * world
    for rank in ranks:
        if fault is Fault.SHAPE:
            calls[rank] = (A, UNEVEN, B, UNEVEN)
        if fault is Fault.CAPACITY:
            entries[rank] = 1
    return Case(
        name,
        SharedMean,
        tuple(calls),
        outcomes(fault, place, ranks, world),
        fault=fault,
        place=place,
        ranks=ranks,
        between=SharedMean.between,
        max_entries=tuple(entries),
        agree_within=DEADLINE if fault in TAKE_A_DEADLINE else Case.agree_within,
    )


def selftest(world: int) -> list[Case]:
    """Cases of the runner itself: without a group, so that every rank goes its own way."""
    graphed = Expected(frozenset({Outcome.GRAPHED}))
    last = world - 1

    def case(name: str, fault: Fault, expected: Expected, place: Place = Place.EAGER, deadline: float = 30) -> Case:
        return Case(
            f"selftest:{name}",
            Plain,
            ((A, A, B, A),) * world,
            tuple(expected if rank == last else graphed for rank in range(world)),
            fault=fault,
            place=place,
            ranks=(last,),
            grouped=False,
            deadline=deadline,
            delay=0.1,
        )

    def ends(outcome: str, says: str = "") -> Expected:
        return Expected(frozenset({outcome}), says)

    cases = [
        case("none", Fault.NONE, graphed),
        case("raise", Fault.RAISE, ends("error:InjectedFault")),
        case("death", Fault.DEATH, ends(Outcome.DIED)),
        case("hang", Fault.HANG, ends(Outcome.HANG), deadline=1),
        case("wrong", Fault.WRONG, ends(Outcome.WRONG)),
        case("unexpected", Fault.RAISE, graphed),
        case("unreached", Fault.RAISE, graphed, Place.BETWEEN),  # there are no collectives
    ]
    if world > 1:
        cut_off = tuple(ends("error:InjectedFault") if rank == last else Expected(CUT_OFF) for rank in range(world))
        cases.append(replace(cases[1], name="selftest:cut-off", module=SharedMean, expected=cut_off))
    for fault, place, ranks, reason in combinations(world):
        if fault in (Fault.RAISE, Fault.HOST_SYNC, Fault.MEMORY, Fault.DELAY) and ranks == (last,) and not reason:
            # There are no collectives, and room for all graphs.
            if place in (Place.BETWEEN, Place.BETWEEN_IN_CAPTURE, Place.EVICTION):
                continue
            if fault is Fault.DELAY:
                expected = graphed
            elif place is Place.CLOSE:
                expected = ends(INJECTED[fault])
            else:
                expected = ends(Outcome.DISABLED, "" if fault is Fault.HOST_SYNC else f"injected {fault} at {place}")
            cases.append(case(f"{fault}:{place}", fault, expected, place))
    return [*cases, case("none-at-last", Fault.NONE, graphed)]


def choose(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """The cases whose names match one of the patterns; all of them without any.

    Raises:
        ValueError: nothing matches a pattern.
    """
    for pattern in patterns:
        if not any(fnmatchcase(case.name, pattern) for case in cases):
            raise ValueError(f"no case is called {pattern}; --list shows their names")
    return [case for case in cases if not patterns or any(fnmatchcase(case.name, pattern) for pattern in patterns)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases with these arguments (None: the process's own); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m graphreplay_harness.cases",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", nargs="+", default=[], metavar="NAME", help="only these; * stands for anything")
    add_device(parser)
    parser.add_argument("--list", action="store_true", help="print the names, and what is left out and why, and exit")
    parser.add_argument("--selftest", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    world, rank = int(os.environ.get("WORLD_SIZE", "2")), int(os.environ.get("RANK", "0"))
    cases, left_out = (selftest(world), []) if given.selftest else matrix(world, given.device)
    try:
        cases = choose(cases, given.case)
    except ValueError as error:
        parser.error(str(error))
    if given.list:
        if rank == 0:
            print(*(case.name for case in cases), *(f"# {name}: {why}" for name, why in left_out), sep="\n")
        return 0
    check_ranks(parser, given.device, _count_gpus_elsewhere)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what a supervisor has started ends with it
    with Supervisor(given.device) as supervisor:
        failed = [case.name for case in cases if not _run(supervisor, case)]
        ok = supervisor.leave(not failed)
    if rank == 0:
        print(f"{len(cases) - len(failed)} cases ended as expected, {len(failed)} did not", *failed, file=sys.stderr)
    return 0 if ok else 1


def _count_gpus_elsewhere() -> int:
    """Counts them in a process of its own: each case is a fork of this one, which must not have set CUDA up."""
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(count_gpus()))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(supervisor: Supervisor, case: Case) -> bool:
    reports = supervisor.run(case)
    if supervisor.rank == 0:
        for report in reports:
            _show(report)
    return all(report.ok for report in reports)


def _show(report: Report) -> None:
    sys.stdout.write(report.line() + "\n")
    sys.stdout.flush()
    if report.log:
        print(f"---- {report.case}, rank {report.rank}", report.log, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
