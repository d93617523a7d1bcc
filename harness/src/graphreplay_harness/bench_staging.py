"""What it costs to give a graph its inputs: copies before a replay, against copies inside the graph's launch.

Every way gets the same fresh bf16 inputs and replays the same forward: the sum of the inputs, then ten linear layers.
Before anything is timed, each must give what the eager forward gives, bit for bit.

Exit codes: 0, measured; 1, a result differs from the eager one; 2, no CUDA device, or bad options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from graphreplay_cuda import CUDAGraph
from graphreplay_harness.bench_clock import device_us, host_us, interleave, queued_us
from graphreplay_harness.bench_contenders import (
    LAYERS,
    SHAPE,
    Contender,
    Forward,
    Inputs,
    make_contenders,
    make_forward,
)
from graphreplay_harness.bench_options import Progress, has_device, parser, versions, whole, write
from graphreplay_harness.bench_report import Result, counted, report

LISTS = 8
"""Lists of inputs that calls take in turn, so that addresses change with each call; and calls in a row."""

QUEUED = 200
"""Calls put back to back for one sample."""

SAMPLES_PER_QUEUED = 30
"""Samples of single calls to one of calls back to back, which takes that much longer."""

WARM_UP = 30
"""Repeats that do not count."""


class WrongResult(Exception):
    """A contender gives something other than the eager forward."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark with these arguments (None: the process's own); returns the exit code."""
    options = parser("bench_staging", __doc__ or "", repeats=100)
    options.add_argument(
        "--counts", type=whole(1), nargs="+", default=[1, 4, 15, 64], help="numbers of inputs (default: 1 4 15 64)"
    )
    given = options.parse_args(argv)
    if not has_device("bench_staging"):
        return 2
    say = Progress()
    try:
        with torch.inference_mode():
            forward = make_forward(torch.device("cuda"))
            results = [compare(count, forward, given.repeats, say) for count in dict.fromkeys(given.counts)]
    except WrongResult as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    print(report(results))
    about = {"versions": versions(), "repeats": given.repeats, "shape": SHAPE, "layers": LAYERS}
    write(given.json, {**about, "results": [result.as_json() for result in results]})
    return 0


def compare(count: int, forward: Forward, repeats: int, say: Callable[[str], None]) -> Result:
    """Measures all contenders with so many inputs.

    Raises:
        WrongResult: one of them gives something other than the eager forward.
    """
    lists = [[torch.randn(SHAPE, device="cuda").bfloat16() for _ in range(count)] for _ in range(LISTS)]
    graphs = [CUDAGraph() for _ in range(3)]
    try:
        contenders = make_contenders(graphs, forward, lists[0])
        say(f"{counted(count)}: comparing with the eager forward")
        check(contenders, forward, lists)
        nbytes = sum(x.nbytes for x in lists[0])
        return Result.of(count, nbytes, measure(contenders, lists, repeats, say))
    finally:
        for each in graphs:
            each.reset()


def check(contenders: Sequence[Contender], forward: Forward, lists: Sequence[Inputs]) -> None:
    """Compares the contenders with the eager forward, bit for bit, over calls that do not wait for each other.

    Raises:
        WrongResult: a result differs.
    """
    expected = [forward(inputs) for inputs in lists]
    for contender in contenders:
        if contender.output is None:
            continue
        results = []
        for inputs in lists:
            if not contender.stages:
                torch._foreach_copy_(contender.statics, inputs)
            contender.call(inputs)
            results.append(contender.output.clone())
        wrong = sum(not torch.equal(ours, right) for ours, right in zip(results, expected, strict=True))
        if wrong:
            what = f"{contender.name}, {counted(len(lists[0]))}"
            raise WrongResult(f"{what}: {wrong} of {len(lists)} results differ from the eager ones")


def measure(
    contenders: Sequence[Contender], lists: Sequence[Inputs], repeats: int, say: Callable[[str], None]
) -> dict[str, dict[str, list[float]]]:
    """Microseconds of every contender, by measure."""
    calls = {contender.name: contender.call for contender in contenders}
    names, inputs = list(calls), counted(len(lists[0]))

    def host(name: str, repeat: int) -> float:
        return host_us(calls[name], lists)

    def device(name: str, repeat: int) -> float:
        return device_us(calls[name], lists[repeat % len(lists)])

    def queued(name: str, repeat: int) -> float:
        return queued_us(calls[name], lists, QUEUED)

    interleave(names, WARM_UP, host)
    say(f"{inputs}: host time, each call from an idle device")
    on_host = interleave(names, repeats, host)
    say(f"{inputs}: device time")
    on_device = interleave(names, repeats, device)
    say(f"{inputs}: {QUEUED} calls back to back")
    in_queue = interleave(names, max(1, repeats // SAMPLES_PER_QUEUED), queued)
    return {"host": on_host, "device": on_device, "queued": in_queue}


if __name__ == "__main__":
    sys.exit(main())
