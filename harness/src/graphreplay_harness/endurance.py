"""Many calls of many shapes from several threads, with few graphs and a module that changes, against eager.

    python -m graphreplay_harness.endurance --device cuda

Between two rounds of calls, when no thread is in one, the module or the wrapper changes: weights in place, weights in
other memory, replaced parameters and submodules, evictions, resets. One line of JSON at the end.

Exit codes: 0, all results are right and memory stayed flat; 1, not so; 2, bad options.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from graphreplay import GraphedForward, get_graphed_forward_cls
from graphreplay_harness.bench_options import Progress, whole

WIDTH = 64
ROUND = 250
"""Calls between two changes."""
STAY = 0.6
"""How likely a call has the shape of the one before in its thread."""
FLAT_AFTER = 1000
"""Calls after which memory may not grow any more."""
FLAT_BYTES = 64 << 20
"""What still counts as flat: a library's workspace, a segment of the allocator."""
TOLERANCE = {"cpu": 0.0, "cuda": 1e-5}
"""The largest difference, as a part of the largest value, to be taken for rounding: on a GPU a library may choose other
kernels in a capture."""


class Network(nn.Module):
    """A few layers, with a view among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: Tensor, scale: float) -> dict[str, Tensor]:
        hidden = self.norm(self.first(x).relu()) * scale
        return {"hidden": hidden[:1], "out": self.second(hidden) + x}


def _replace(module: Network) -> None:
    device = module.first.weight.device
    torch.manual_seed(1)
    module.second = nn.Linear(WIDTH, WIDTH).to(device)


CHANGES: dict[str, Callable[[Network], object]] = {
    "in place": lambda module: module.first.weight.mul_(-1.0),
    "moved": lambda module: setattr(module.first.weight, "data", module.first.weight.data * 0.5),
    "parameter": lambda module: setattr(module.norm, "bias", nn.Parameter(module.norm.bias + 0.1)),
    "submodule": _replace,
}
"""What may happen to the module between two rounds."""


class Endurance:
    """The wrapper, the plain module beside it, and what was found."""

    def __init__(self, device: torch.device, shapes: int, entries: int) -> None:
        torch.manual_seed(0)
        self.module = Network().to(device).eval()
        self.plain = copy.deepcopy(self.module)
        self.graphed: GraphedForward = get_graphed_forward_cls(device)(
            self.module, device=device, max_entries=entries, name="endurance"
        )
        self.device, self.shapes = device, shapes
        self.wrong = 0
        self.largest = 0.0
        self._draw = random.Random(0)
        self._thread = threading.local()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def take_stream(self) -> None:
        """Gives the calling thread a stream for the whole run: torch keeps a workspace of cuBLAS (32 MB on Hopper) for
        each stream that a thread computes on, which would look as if graphs took ever more memory."""
        self._thread.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def calls(self, seed: int, count: int) -> tuple[int, float]:
        """``count`` calls of one thread, which has its stream: how many were wrong, and the largest difference."""
        draw, stream = random.Random(seed), self._thread.stream
        wrong, largest, length = 0, 0.0, self._length(draw)
        with torch.inference_mode(), torch.cuda.stream(stream) if stream else nullcontext():
            for _ in range(count):
                if draw.random() > STAY:
                    length = self._length(draw)
                x = torch.full((length, WIDTH), draw.random(), device=self.device)
                x += torch.arange(WIDTH, device=self.device) * draw.random()
                got, wanted = self.graphed(x=x, scale=2.0), self.plain(x=x, scale=2.0)
                for name, value in wanted.items():
                    part = _part(got[name], value)
                    wrong, largest = wrong + (part > TOLERANCE[self.device.type]), max(largest, part)
        return wrong, largest

    def _length(self, draw: random.Random) -> int:
        """Short ones come often, so that some graphs are there when the module has changed."""
        return 1 + int(self.shapes * draw.random() ** 4)

    def change(self) -> str:
        """Changes the module, or what the wrapper keeps."""
        what = self._draw.choice([*CHANGES, "evict", "reset", "nothing"])
        with torch.inference_mode(False), torch.no_grad():
            for module in (self.module, self.plain) if what in CHANGES else ():
                CHANGES[what](module)
        if what == "evict":
            with torch.inference_mode():
                for length in range(1, self.shapes + 1, 3):
                    self.graphed.evict(x=torch.empty(length, WIDTH, device=self.device), scale=2.0)
        if what == "reset":
            self.graphed.reset()
        return what

    def reserved(self) -> int:
        """The most memory that the run has had so far; what it has just now may be little, after a reset."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0


def _part(got: Tensor, wanted: Tensor) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))


def endure(device: torch.device, calls: int, shapes: int, entries: int, threads: int) -> dict[str, Any]:
    """Runs it; see the module."""
    progress = Progress()
    run = Endurance(device, shapes, entries)
    made, base, changes = 0, None, 0
    with ThreadPoolExecutor(threads, initializer=run.take_stream) as pool:
        while made < calls:
            counts = [min(ROUND, calls - made) // threads or 1] * threads
            results = pool.map(run.calls, range(made, made + threads), counts)
            for wrong, largest in results:
                run.wrong, run.largest = run.wrong + wrong, max(run.largest, largest)
            made += sum(counts)
            changes += run.change() != "nothing"
            if base is None and made >= FLAT_AFTER:
                base = run.reserved()
            if made // 2500 != (made - sum(counts)) // 2500:
                progress(f"{made} calls, {run.wrong} wrong, {run.graphed.num_graphs} graphs")
    grown = 0 if base is None else run.reserved() - base
    stats = run.graphed.stats()
    run.graphed.close()
    return {
        "calls": made,
        "wrong": run.wrong,
        "largest_difference": run.largest,
        "changes": changes,
        **{name: stats[name] for name in ("captures", "replays", "evictions", "eager_reasons", "disabled_reason")},
        "reserved_bytes_grown": grown,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs with these arguments (None: the process's own); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m graphreplay_harness.endurance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    for name, default in {"calls": 20_000, "shapes": 200, "entries": 16, "threads": 4}.items():
        parser.add_argument(f"--{name}", type=whole(1), default=default, help=f"(default: {default})")
    given = parser.parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CUDA build of PyTorch warns where there is no driver
        if given.device == "cuda" and not torch.cuda.is_available():
            parser.error("--device cuda: PyTorch finds no GPU here")
    device = torch.device("cuda", torch.cuda.current_device()) if given.device == "cuda" else torch.device("cpu")
    report = endure(device, given.calls, given.shapes, given.entries, given.threads)
    print(json.dumps(report))
    right = report["wrong"] == 0 and report["replays"] > 0 and report["disabled_reason"] is None
    return 0 if right and report["reserved_bytes_grown"] <= FLAT_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
