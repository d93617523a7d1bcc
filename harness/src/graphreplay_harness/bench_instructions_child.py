"""The process whose instructions bench_instructions counts; it runs under valgrind, and is of no use without.

Valgrind writes one file per count: for each case, in each of several layouts of memory, one of a few runs and one of
that many and ``RUNS`` more. In the difference nothing is left of what it takes to begin and end a count.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from itertools import repeat

import torch

from graphreplay_harness.bench_host import CASES

LAYOUTS = 5
"""How often a case is made. Addresses decide where hash tables of objects have collisions: in a single layout, a change
that has nothing to do with a case can move its count by some percent."""

WARM_UP = 24
"""Runs before any is counted: caches fill, and Python has specialized what it runs."""

FEW, RUNS = 4, 16


def main() -> int:
    gc.disable()  # it would come at some allocation or other
    with torch.inference_mode():
        for name, make in CASES.items():
            for layout in range(LAYOUTS):
                gc.collect()
                around = _scattered(random.Random(layout))
                case = make()
                del around
                _run(case.run, WARM_UP)
                for runs in (FEW, FEW + RUNS):
                    torch._C._valgrind_toggle()
                    _run(case.run, runs)
                    torch._C._valgrind_toggle_and_dump_stats()
                if not case.check():
                    print(f"{name}: the runs did not do what was to be counted", file=sys.stderr)
                    return 1
    return 0


def _scattered(chance: random.Random) -> list[torch.Tensor]:
    """Tensors with holes between them, which those of a case then fill."""
    tensors = [torch.empty(chance.choice((1, 32, 500))) for _ in range(400)]
    return [tensor for tensor in tensors if chance.random() < 0.5]


def _run(run: Callable[[], object], times: int) -> None:
    for _ in repeat(None, times):
        run()


if __name__ == "__main__":
    sys.exit(main())
