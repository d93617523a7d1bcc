"""What loops and branches on the device cost: while and if nodes against the same kernels captured without them.

A body has three kernels. A while node is compared with a graph that holds the body as often as the loop runs it.

Exit codes: 0, measured; 1, a graph computes something wrong; 2, no CUDA device or too old a driver, or bad options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from graphreplay_cuda import CUDAGraph, FeatureUnavailableError, graph
from graphreplay_harness.bench_clock import device_us, interleave
from graphreplay_harness.bench_options import Progress, has_device, parser, versions, whole, write
from graphreplay_harness.bench_report import Spread, Summary, rounded, summarize, table

WARM_UP = 10
"""Repeats that do not count."""

TAKEN, SKIPPED, PLAIN, LEAD = "if node, taken", "if node, not taken", "the kernels alone", "neither"


def loop_name(trips: int) -> str:
    return f"while node, {trips} trips"


def unrolled_name(trips: int) -> str:
    return f"unrolled, {trips} trips"


# ------------------------------------------------------------------------------------------- arithmetic


def per_iteration(device: dict[str, Spread], trips: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Device microseconds of an iteration, in a while node and unrolled: what is beyond no iteration, shared out."""

    def share(name: Callable[[int], str], count: int) -> float:
        return (device[name(count)].median - device[name(0)].median) / count

    return {count: (share(loop_name, count), share(unrolled_name, count)) for count in trips if count}


def branch_costs(device: dict[str, Spread]) -> tuple[float, float]:
    """Device microseconds that an if node adds, taken and not taken."""
    median = {name: device[name].median for name in (TAKEN, SKIPPED, PLAIN, LEAD)}
    return median[TAKEN] - median[PLAIN], median[SKIPPED] - median[LEAD]


def report(summary: Summary, trips: Sequence[int]) -> str:
    """Ratios first, then the table."""
    device = summary["device"]
    taken, skipped = branch_costs(device)
    lines = ["A body of three kernels, device time of an iteration:"]
    for count, (loop, unrolled) in per_iteration(device, trips).items():
        ratio = f"{loop / unrolled:.2f} times" if unrolled > 0 else "against"  # one iteration may drown in noise
        lines.append(f"{count:>5} trips: while node {loop:.2f} us, {ratio} the unrolled {unrolled:.2f} us")
    lines.append(f"An if node adds {taken:+.2f} us where it is taken and {skipped:+.2f} us where it is not.")
    return "\n".join([*lines, "", *table(summary)])


# ----------------------------------------------------------------------------------------------- device


@dataclass(frozen=True)
class Case:
    """A graph to replay."""

    prepare: Callable[[], object]
    """Sets what the device will decide by."""
    replay: Callable[[], object]
    trips: int
    """How often the body should run."""


class Graphs:
    """The graphs, over one set of tensors."""

    def __init__(self, trips: Sequence[int]) -> None:
        self.x = torch.zeros(1024, device="cuda")
        self._count, self._limit = (torch.zeros((), dtype=torch.int32, device="cuda") for _ in range(2))
        self._go, self._flag = (torch.zeros((), dtype=torch.bool, device="cuda") for _ in range(2))
        self._loop, self._branch = CUDAGraph(), CUDAGraph()
        self._body()  # what loads at its first use should not do so in a capture
        with graph(self._loop):
            self._lead()
            with self._loop.while_node(self._go) as node:
                self._body()
                node.set(self._go)
        with graph(self._branch):
            self.x.zero_()
            with self._branch.if_node(self._flag):
                self._body()
        self.cases = dict(self._cases(trips))

    def reset(self) -> None:
        self._loop.reset()
        self._branch.reset()

    def _lead(self) -> None:
        self.x.zero_()
        self._count.zero_()
        torch.lt(self._count, self._limit, out=self._go)

    def _body(self) -> None:
        self.x.add_(1)
        self._count.add_(1)
        torch.lt(self._count, self._limit, out=self._go)

    def _cases(self, trips: Sequence[int]) -> Iterator[tuple[str, Case]]:
        for count in trips:
            yield loop_name(count), Case(self._set(self._limit, count), self._loop.replay, count)
            yield unrolled_name(count), Case(lambda: None, self._plain(self._lead, count), count)
        yield TAKEN, Case(self._set(self._flag, True), self._branch.replay, 1)
        yield SKIPPED, Case(self._set(self._flag, False), self._branch.replay, 0)
        yield PLAIN, Case(lambda: None, self._plain(self.x.zero_, 1), 1)
        yield LEAD, Case(lambda: None, self._plain(self.x.zero_, 0), 0)

    def _plain(self, lead: Callable[[], object], trips: int) -> Callable[[], object]:
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made):
            lead()
            for _ in range(trips):
                self._body()
        return made.replay

    def _set(self, what: torch.Tensor, value: int) -> Callable[[], object]:
        return lambda: what.fill_(value)


def wrong_results(graphs: Graphs) -> list[str]:
    """Which graphs run their body more or less often than they should."""
    wrong = []
    for name, case in graphs.cases.items():
        case.prepare()
        case.replay()
        if not bool((graphs.x == case.trips).all()):
            wrong.append(f"{name}: the body should run {case.trips} times, not {graphs.x[0].item():g}")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark with these arguments (None: the process's own); returns the exit code."""
    options = parser("bench_loop", __doc__ or "", repeats=100)
    options.add_argument(
        "--trips", type=whole(0), nargs="+", default=[1, 10, 100, 1000], help="iterations (default: 1 10 100 1000)"
    )
    given = options.parse_args(argv)
    trips = sorted({0, *given.trips})  # the others are measured against none
    if not has_device("bench_loop"):
        return 2
    say = Progress()
    say("capturing")
    try:
        graphs = Graphs(trips)
    except FeatureUnavailableError as error:
        print(f"graphreplay bench_loop: {error}", file=sys.stderr)
        return 2
    try:
        wrong = wrong_results(graphs)
        if wrong:
            print(*(f"FAILED: {each}" for each in wrong), sep="\n", file=sys.stderr)
            return 1

        def sample(name: str, repeat: int) -> float:
            graphs.cases[name].prepare()
            return device_us(lambda _: graphs.cases[name].replay(), None)

        interleave(list(graphs.cases), WARM_UP, sample)
        say("device time")
        samples = {"device": interleave(list(graphs.cases), given.repeats, sample)}
    finally:
        graphs.reset()
    summary = summarize(samples)
    print(report(summary, trips))
    spreads = {name: asdict(each) for name, each in summary["device"].items()}
    taken, skipped = branch_costs(summary["device"])
    iterations = {
        count: {"while_node": loop, "unrolled": unrolled}
        for count, (loop, unrolled) in per_iteration(summary["device"], trips).items()
    }
    costs = {"iteration_us": iterations, "if_taken_us": taken, "if_skipped_us": skipped}
    about = {"versions": versions(), "repeats": given.repeats}
    write(given.json, rounded({**about, **costs, "summary": {"device": spreads}, "samples": samples}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
