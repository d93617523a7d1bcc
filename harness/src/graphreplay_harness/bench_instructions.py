"""How many instructions of the host each case of bench_host takes, counted by valgrind.

Times on a machine that others use as well vary by more than most changes cost; counts of instructions hardly vary. Each
case is counted in several layouts of memory; printed are the median, per run, and how far the layouts lie apart.

Counts belong to one interpreter, one torch, one valgrind and one kind of machine. To see what a change costs, count
before and after it:

    python -m graphreplay_harness.bench_instructions --json before.json
    python -m graphreplay_harness.bench_instructions --against before.json

Exit codes: 0, counted; 1, a case has grown by more than --allow percent; 2, nothing could be counted or compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from graphreplay_harness.bench_host import CASES
from graphreplay_harness.bench_instructions_child import LAYOUTS, RUNS
from graphreplay_harness.bench_options import writable, write

Counts: TypeAlias = dict[str, list[float]]
"""Instructions per run by case, one number for each layout of memory."""

_CHILD = "graphreplay_harness.bench_instructions_child"

_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""One order of all sets, and one thread: what a thread does while it waits would be counted too."""

_TOTAL = re.compile(r"^totals: (\d+)$", re.MULTILINE)


class CountError(Exception):
    """Why there are no counts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Counts with these arguments (None: the process's own); returns the exit code."""
    given = _options().parse_args(argv)
    try:
        valgrind = find_valgrind()
        about = versions(valgrind)
        before = None if given.against is None else read(given.against, about)
        counts = count(valgrind)
    except CountError as error:
        print(f"graphreplay bench_instructions: {error}", file=sys.stderr)
        return 2
    write(given.json, {"versions": about, "instructions": counts})
    print(table(counts, before))
    grown = [] if before is None else grown_cases(counts, before, given.allow)
    for name in grown:
        print(f"grown by more than {given.allow:g} %: {name}")
    return 1 if grown else 0


def find_valgrind() -> str:
    """Where valgrind is.

    Raises:
        CountError: it is not here, or this torch cannot talk to it.
    """
    found = shutil.which("valgrind")
    if found is None:
        raise CountError("valgrind is not installed; it counts the instructions")
    if not torch._C._valgrind_supported_platform():
        raise CountError("this build of PyTorch cannot tell valgrind when to count")
    return found


def versions(valgrind: str) -> dict[str, str]:
    """All that has to be the same for two counts to be compared."""
    said = subprocess.run([valgrind, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "valgrind": said.removeprefix("valgrind-"),
        "machine": platform.machine(),
    }


def read(path: Path, about: Mapping[str, str]) -> Counts:
    """The counts in a file that ``--json`` wrote.

    Raises:
        CountError: there are none, or they were counted with other versions than these.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        was = dict(content["versions"])
        counts = {str(name): [float(each) for each in values] for name, values in content["instructions"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CountError(f"cannot read counts from {path}: {type(error).__name__}: {error}") from None
    if not all(values and min(values) > 0 for values in counts.values()):
        raise CountError(f"cannot read counts from {path}: some are empty or not above 0")
    other = [f"{key} {was.get(key)} and not {value}" for key, value in about.items() if was.get(key) != value]
    if other:
        raise CountError(f"{path} cannot be compared with: it was counted with {', '.join(other)}")
    return counts


def count(valgrind: str) -> Counts:
    """Runs the cases under valgrind, all in one process, since that takes most of a minute to import torch.

    Raises:
        CountError: they could not be run.
    """
    with tempfile.TemporaryDirectory(prefix="graphreplay-instructions-") as folder:
        out = Path(folder) / "out"
        options = ["--quiet", "--tool=callgrind", "--collect-atstart=no", f"--callgrind-out-file={out}"]
        command = [valgrind, *options, sys.executable, "-m", _CHILD]
        done = subprocess.run(
            command, env={**os.environ, **_ENVIRONMENT}, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode:
            raise CountError(f"the cases ended with {done.returncode}:\n{done.stderr.strip()}")
        return parse(out, list(CASES))


def parse(out: Path, names: Sequence[str]) -> Counts:
    """Counts from the files that valgrind wrote for these cases: see bench_instructions_child.

    Raises:
        CountError: a file is missing, or holds no total.
    """
    totals = [_total(out.with_name(f"{out.name}.{number}")) for number in range(1, 2 * LAYOUTS * len(names) + 1)]
    per_run = [(more - few) / RUNS for few, more in zip(totals[::2], totals[1::2], strict=True)]
    return {name: per_run[LAYOUTS * place : LAYOUTS * (place + 1)] for place, name in enumerate(names)}


def _total(path: Path) -> int:
    try:
        found = _TOTAL.search(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise CountError(f"valgrind did not write {path.name}: {error.strerror}") from None
    if found is None:
        raise CountError(f"valgrind wrote no total into {path.name}")
    return int(found[1])


def table(counts: Counts, before: Counts | None) -> str:
    """The counts, with their ratios to earlier ones where there are any."""
    width = max(map(len, {**counts, **(before or {})}))
    lines = [f"{'instructions per run':{width}} {'median':>10} {'spread':>7}" + (" ratio" if before else "")]
    for name, values in counts.items():
        spread = 100 * (max(values) - min(values)) / statistics.median(values)
        line = f"{name:{width}} {statistics.median(values):10,.0f} {spread:5.1f} %"
        if before:
            line += f" {_ratio(values, before[name]):5.3f}" if name in before else "   new"
        lines.append(line)
    return "\n".join([*lines, *(f"{name:{width}} gone" for name in before or {} if name not in counts)])


def grown_cases(counts: Counts, before: Counts, allow: float) -> list[str]:
    """The cases that take more than ``allow`` percent more than before. New ones have not grown."""
    return [name for name, now in counts.items() if name in before and _ratio(now, before[name]) > 1 + allow / 100]


def _ratio(now: Sequence[float], before: Sequence[float]) -> float:
    return statistics.median(now) / statistics.median(before)


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of percent from 0 on")
    return value


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m graphreplay_harness.bench_instructions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--json", type=writable, metavar="FILE", help="writes all counts there")
    options.add_argument("--against", type=Path, metavar="FILE", help="compares with the counts there")
    options.add_argument(
        "--allow", type=_percent, default=5.0, metavar="PERCENT", help="how much a case may grow (default: 5)"
    )
    return options


if __name__ == "__main__":
    sys.exit(main())
