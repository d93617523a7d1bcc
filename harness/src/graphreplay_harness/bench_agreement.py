"""What agreement costs: a capture's meetings in the store, and a replay with a group and without.

    torchrun --nproc-per-node 2 -m graphreplay_harness.bench_agreement

Rank 0 prints medians and quartiles, and writes all numbers with --json. Both wrappers hold the same forward, without
collectives, so that a replay differs in nothing but the group.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist

from graphreplay import get_graphed_forward_cls
from graphreplay.peers import Peers
from graphreplay_harness.bench_options import parser, write
from graphreplay_harness.parallel import MLP
from graphreplay_harness.soak import BACKENDS, own_device


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark with these arguments (None: the process's own); returns the exit code."""
    options = parser("bench_agreement", __doc__ or "", 30)
    options.add_argument("--device", choices=tuple(BACKENDS), default="cpu", help="(default: cpu, with gloo)")
    given = options.parse_args(argv)
    if "RANK" not in os.environ:
        options.error("start it with torchrun, or torch.distributed.run")
    device = own_device(given.device)
    dist.init_process_group(BACKENDS[device.type])
    with torch.inference_mode():
        result = measure(device, given.repeats)
    result["ranks"] = dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"{result['ranks']} ranks, {given.repeats} samples each: median (quartiles), in microseconds")
        for name in ("a meeting", "meetings of a capture", "replay with a group", "replay without a group"):
            low, middle, high = quantiles(result[name], n=4)
            print(f"{name:<24}{middle:10.1f} ({low:.1f} to {high:.1f})")
        write(given.json, result)
    dist.destroy_process_group()
    return 0


def measure(device: torch.device, repeats: int) -> dict[str, Any]:
    """Times meetings, and replays in turns; all in microseconds."""
    module = MLP(64, 128).to(device).eval()
    cls = get_graphed_forward_cls(device)
    grouped, alone = (cls(module, device=device, group=group, max_entries=1) for group in (dist.group.WORLD, None))
    assert isinstance(grouped.peers, Peers), "this needs at least two ranks"
    agreement = grouped.peers.agreement
    meet, meetings = agreement.meet, []

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        verdict = meet(*args)
        meetings.append(1e6 * (time.perf_counter() - start))
        return verdict

    agreement.meet = timed  # type: ignore[assignment, method-assign]
    inputs = [torch.randn(1, 2 + number, 64, device=device) for number in range(repeats)]
    sums = []
    for x in inputs:
        dist.barrier()  # what is measured is no wait for a rank that is late
        before = len(meetings)
        grouped(x=x)
        sums.append(sum(meetings[before:]))
    x = inputs[-1]
    alone(x=x)
    replays: dict[Any, list[float]] = {grouped: [], alone: []}
    for _ in range(repeats):
        for wrapper, times in replays.items():
            _synchronize(device)
            start = time.perf_counter()
            for _ in range(20):
                wrapper(x=x)
            times.append(1e6 / 20 * (time.perf_counter() - start))
    for wrapper in replays:
        wrapper.close()
    return {
        "a meeting": meetings,
        "meetings of a capture": sums,
        "replay with a group": replays[grouped],
        "replay without a group": replays[alone],
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
