"""Many calls of many shapes with few graphs, on several ranks: every result against the plain module's.

    torchrun --nproc-per-node 2 -m graphreplay_harness.soak --device cuda

Each rank holds a piece of a sequence and runs a transformer block with two all-to-all exchanges; between two calls come
eager collectives, the plain module's and others. At the end the wrapper is closed and the process group destroyed.
Every rank prints a line of JSON.

Exit codes: 0, all is right; 1, a result was wrong, nothing was replayed, captures were given up, or a GPU's reserved
memory grew by more than 64 MiB in the second half of the calls; 2, bad options.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphreplay import GraphedForward, get_graphed_forward_cls
from graphreplay_harness.bench_options import Progress, whole
from graphreplay_harness.parallel import Block
from graphreplay_harness.rank_options import BACKENDS, add_device, check_ranks, own_device

DIM, HEADS, HIDDEN = 64, 8, 128
SHORTEST = 4
"""The least tokens of a rank's piece; each further shape has one more."""
STAY = 0.7
"""How likely a call has the shape of the call before."""
TOLERANCE = {"cpu": 0.0, "cuda": 1e-5}
"""The largest difference to be taken for rounding. On a GPU a library may choose other kernels in a capture."""
GROWTH_LIMIT = 64 << 20
"""Bytes by which reserved memory may grow in the second half of the calls, when every shape has had its graph: some
segments of the allocator."""
ENDINGS = {"cpu": ("close", "destroy"), "cuda": ("close", "exit")}
"""By device type. NCCL waits for graphs before it lets a group be destroyed; a group of gloo that is left to the end of
the interpreter brings the process down, with graphs or without."""


def shapes(calls: int, kinds: int) -> list[int]:
    """How long a rank's piece is at each call; the same on all ranks."""
    draw = random.Random(0)
    lengths = [SHORTEST]
    while len(lengths) < calls:
        lengths.append(lengths[-1] if draw.random() < STAY else SHORTEST + draw.randrange(kinds))
    return lengths


def soak(block: Block, graphed: GraphedForward, lengths: Sequence[int], progress: Progress) -> dict[str, Any]:
    """Makes a call of each length, and counts what is wrong."""
    device, rank = graphed.device, dist.get_rank()
    wrong, largest, reserved = 0, 0.0, 0
    generator = torch.Generator(device).manual_seed(rank)
    for number, length in enumerate(lengths):
        if number % 500 == 0 and rank == 0:
            progress(f"{number} calls, {graphed.num_graphs} graphs")
        x = torch.randn(1, length, DIM, device=device, generator=generator)
        result = graphed(x=x)
        difference = _difference(result, block(x=x))
        wrong, largest = wrong + (difference > TOLERANCE[device.type]), max(largest, difference)
        total = torch.full((), float(rank), device=device)
        dist.all_reduce(total)  # a collective of the program's own
        ranks = dist.get_world_size()
        wrong += total.item() != ranks * (ranks - 1) / 2
        if device.type == "cuda" and number == len(lengths) // 2:
            reserved = torch.cuda.memory_reserved()
    grown = torch.cuda.memory_reserved() - reserved if device.type == "cuda" else 0
    stats = graphed.stats()
    return {
        "rank": rank,
        "calls": len(lengths),
        "wrong": wrong,
        "largest_difference": largest,
        **{name: stats[name] for name in ("captures", "replays", "evictions", "eager_reasons", "disabled_reason")},
        "reserved_bytes_grown_in_second_half": grown,
    }


def _difference(got: Tensor, want: Tensor) -> float:
    return (got - want).abs().max().item() if got.shape == want.shape else float("inf")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the soak with these arguments (None: the process's own); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m graphreplay_harness.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_device(parser)
    parser.add_argument("--calls", type=whole(1), default=2000, help="(default: 2000)")
    parser.add_argument("--shapes", type=whole(1), default=12, help="how many shapes there are (default: 12)")
    parser.add_argument("--entries", type=whole(1), default=4, help="how many graphs are kept (default: 4)")
    parser.add_argument(
        "--ending",
        choices=("close", "destroy", "exit"),
        default="close",
        help="close: close the wrapper, destroy the group, exit (default); destroy (CPU): leave the first out; exit "
        "(CUDA): leave both out",
    )
    given = parser.parse_args(argv)
    if given.ending not in ENDINGS[given.device]:
        parser.error(f"--ending {given.ending} does not end on {given.device}: a group must not outlive its graphs")
    ranks = check_ranks(parser, given.device)
    if HEADS % ranks:
        fitting = [str(count) for count in range(1, HEADS + 1) if HEADS % count == 0]
        parser.error(
            f"{ranks} ranks cannot share {HEADS} heads evenly; start {', '.join(fitting[:-1])} or {fitting[-1]}"
        )
    device = own_device(given.device)
    dist.init_process_group(BACKENDS[device.type], timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    block = Block(DIM, HEADS, HIDDEN, dist.group.WORLD).to(device).eval()
    cls = get_graphed_forward_cls(device)
    graphed = cls(block, device=device, group=dist.group.WORLD, max_entries=given.entries)
    with torch.inference_mode():
        report = soak(block, graphed, shapes(given.calls, given.shapes), Progress())
    if given.ending == "close":
        graphed.close()
    if given.ending != "exit":
        dist.destroy_process_group()
    report["ending"], report["ended_at"] = given.ending, time.time()
    sys.stdout.write(json.dumps(report) + "\n")  # in one piece: the ranks share the output
    sys.stdout.flush()
    return 0 if is_right(report) else 1


def is_right(report: dict[str, Any]) -> bool:
    """Whether a rank's report is of calls that all went well."""
    return bool(
        report["wrong"] == 0
        and report["replays"] > 0
        and report["disabled_reason"] is None
        and report["reserved_bytes_grown_in_second_half"] <= GROWTH_LIMIT
    )


if __name__ == "__main__":
    sys.exit(main())
