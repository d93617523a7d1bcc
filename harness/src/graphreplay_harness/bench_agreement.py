"""What agreement costs: a capture's meetings in the store, and a replay with a group and without.

    torchrun --nproc-per-node 2 -m graphreplay_harness.bench_agreement

Rank 0 prints medians and quartiles, and writes all numbers with --json. Both wrappers hold the same forward, without
collectives, so that a replay differs in nothing but the group.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from graphreplay import get_graphed_forward_cls
from graphreplay.peers import Peers
from graphreplay_harness.bench_clock import interleave
from graphreplay_harness.bench_options import parser, write
from graphreplay_harness.bench_report import rounded, spread
from graphreplay_harness.parallel import MLP
from graphreplay_harness.rank_options import BACKENDS, add_device, check_ranks, own_device

MEETING, CAPTURE = "a meeting", "meetings of a capture"
GROUPED, ALONE = "replay with a group", "replay without a group"

REPLAYS = 20
"""In a row, for one sample."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark with these arguments (None: the process's own); returns the exit code."""
    options = parser("bench_agreement", __doc__ or "", 30)
    add_device(options)
    given = options.parse_args(argv)
    ranks = check_ranks(options, given.device)
    if ranks < 2:
        options.error("one rank has nobody to agree with; start two or more, with torchrun --nproc-per-node 2")
    device = own_device(given.device)
    dist.init_process_group(BACKENDS[device.type])
    with torch.inference_mode():
        samples = measure(device, given.repeats)
    if dist.get_rank() == 0:
        print(f"{ranks} ranks, {given.repeats} samples each: median (quartiles), in microseconds")
        for name, each in samples.items():
            print(f"{name:<24}{spread(each)}")
        write(given.json, rounded({"ranks": ranks, **samples}))
    dist.destroy_process_group()
    return 0


def measure(device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Times meetings, and replays in turns; all in microseconds."""
    module = MLP(64, 128).to(device).eval()
    cls = get_graphed_forward_cls(device)
    grouped, alone = (cls(module, device=device, group=group, max_entries=1) for group in (dist.group.WORLD, None))
    assert isinstance(grouped.peers, Peers)  # there are other ranks
    agreement = grouped.peers.agreement
    meet, meetings = agreement.meet, []

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        verdict = meet(*args)
        meetings.append(1e6 * (time.perf_counter() - start))
        return verdict

    agreement.meet = timed  # type: ignore[assignment, method-assign]
    inputs = [torch.randn(1, 2 + number, 64, device=device) for number in range(repeats)]
    captures = []
    for x in inputs:
        dist.barrier()  # what is measured is no wait for a rank that is late
        before = len(meetings)
        grouped(x=x)
        captures.append(sum(meetings[before:]))
    x = inputs[-1]
    alone(x=x)
    wrappers = {GROUPED: grouped, ALONE: alone}

    def replay(name: str, _repeat: int) -> float:
        wrapper = wrappers[name]
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(REPLAYS):
            wrapper(x=x)
        return 1e6 / REPLAYS * (time.perf_counter() - start)

    replays = interleave(list(wrappers), repeats, replay)
    for wrapper in wrappers.values():
        wrapper.close()
    return {MEETING: meetings, CAPTURE: captures, **replays}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
