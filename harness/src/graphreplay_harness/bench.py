"""What graphs cost: ours beside eager calls, bare replays, graphs made by hand, and what torch and tensordict offer.

suites, of which all run in this order:
  memory      what one more shape takes from the device, before others have left its memory in pieces
  call        a call of a module of 25 parameters: 1, 4, 15 and 64 tensors, flat and nested, one and eight outputs
  dit         an audio teacher's nine steps per request, a text encoder of six layers, and a compute-bound forward
  first-call  the first call of a shape against an eager one, and the steps of its capture

All contenders of a block run interleaved, on the same inputs, and those that return something other than the eager
forward are left out. Host times are of time.perf_counter_ns, with nothing recorded in between; device times are of
events, in samples of their own. Tables give medians, with the quartiles in brackets, and medians as ratios to those of
the contender that has 1.000; for calls back to back there is one sample to ten of the others. On a CPU the reference
backend stands in for device graphs: it shows that all this works; its times mean little, and so do targets missed
there.

Exit codes: 0, measured; 2, nothing could be measured, or bad options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch

from graphreplay_harness import bench_call, bench_first, bench_memory
from graphreplay_harness.bench_options import Progress, has_device, parser, versions, whole, writable, write
from graphreplay_harness.bench_plot import svg
from graphreplay_harness.bench_suite import Setting, SuiteResult


def _dit(setting: Setting, given: argparse.Namespace) -> SuiteResult:
    from graphreplay_harness import bench_dit  # it needs the extra "demo"

    return bench_dit.run(setting)


SUITES: dict[str, Callable[[Setting, argparse.Namespace], SuiteResult]] = {
    "memory": lambda setting, given: bench_memory.run(setting),
    "call": lambda setting, given: bench_call.run(setting, given.counts),
    "dit": _dit,
    "first-call": lambda setting, given: bench_first.run(setting),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark with these arguments (None: the process's own); returns the exit code."""
    given = _options().parse_args(argv)
    if given.device == "cuda" and not has_device("bench"):
        return 2
    kind = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    setting = Setting(device, given.repeats, Progress())
    about = {"versions": versions(kind), "device": str(device), "repeats": given.repeats}
    results: list[SuiteResult] = []
    for name in SUITES if given.suite == "all" else [given.suite]:
        try:
            with torch.inference_mode():
                result = SUITES[name](setting, given)
        except ImportError as error:
            print(f"graphreplay bench: the suite {name} is left out: {error}; install the extra demo", file=sys.stderr)
            continue
        print(result.text(), end="\n\n", flush=True)
        results.append(result)
        # After each suite, so that one which fails later takes nothing away.
        write(given.json, {**about, "suites": [result.as_json() for result in results]})
        if given.plot is not None:
            given.plot.write_text(svg(results), encoding="utf-8")
    return 0 if results else 2


def _options() -> argparse.ArgumentParser:
    options = parser("bench", __doc__ or "", repeats=100)
    options.add_argument("--suite", choices=[*SUITES, "all"], default="all", help="default: all")
    options.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda, where there is such a device")
    options.add_argument("--plot", type=writable, metavar="FILE", help="draws all medians there, as SVG")
    options.add_argument(
        "--counts",
        type=whole(1),
        nargs="+",
        default=list(bench_call.COUNTS),
        help="numbers of tensors in the suite call (default: 1 4 15 64)",
    )
    return options


if __name__ == "__main__":
    sys.exit(main())
