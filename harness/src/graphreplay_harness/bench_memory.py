"""The suite ``memory``: what one more shape takes from the device, in a shared pool and with a pool for each graph."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn

from graphreplay import get_graphed_forward_cls
from graphreplay_harness.bench_handmade import Captured, capture
from graphreplay_harness.bench_suite import Block, Setting, SuiteResult, Target

SHAPES = 16
"""Beside the first, which pays for what all share."""

TARGET = 1.1
"""Times static inputs and outputs."""

OURS, PRIVATE, NEEDED = "ours", "one private pool per graph", "static inputs and outputs"
_MIB = 2**20


class Mlp(nn.Module):
    """Whose values inside are four times as wide as its input and its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, *, x: Tensor) -> Tensor:
        return self.narrow(nn.functional.gelu(self.widen(x)))  # type: ignore[no-any-return]


def run(setting: Setting) -> SuiteResult:
    """Measures shapes from the largest to the smallest, as one captures them up front: a pool then grows by what stays
    alone. Tensors are so large on a GPU that the allocator's rounding, to 2 MiB, is small beside them."""
    device = setting.device
    on_gpu = device.type == "cuda"
    width, most, less = (2048, 8192, 128) if on_gpu else (64, 256, 4)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    module = Mlp(width).to(device, dtype).eval().requires_grad_(False)
    rows = [most - less * number for number in range(SHAPES + 1)]

    def make(count: int) -> Tensor:
        return torch.randn(count, width, device=device, dtype=dtype)

    setting.say("memory: ours")
    samples = {OURS: _ours(module, make, rows, setting)}
    left_out = {}
    if on_gpu:
        setting.say("memory: one private pool per graph")
        samples[PRIVATE] = _private(module, make, rows, setting)
    else:
        left_out[PRIVATE] = "what is reserved is known of a CUDA device only"
    samples[NEEDED] = [2 * count * width * dtype.itemsize / _MIB for count in rows[1:]]
    block = Block(f"{SHAPES} more shapes", {"reserved": samples}, NEEDED, left_out)
    return SuiteResult("memory", [block], [target(block, shares=on_gpu)])


def target(block: Block, *, shares: bool) -> Target:
    """Of all shapes together, since a pool grows in leaps."""
    samples = block.samples["reserved"]
    return Target(
        "memory, all shapes: ours / static inputs and outputs",
        TARGET,
        sum(samples[OURS]) / sum(samples[NEEDED]) if shares else None,
        "a pool grows by whole blocks, so that some of it may serve later shapes"
        if shares
        else "the reference backend shares no memory between its graphs",
    )


def _ours(module: nn.Module, make: Callable[[int], Tensor], rows: list[int], setting: Setting) -> list[float]:
    cls = get_graphed_forward_cls(setting.device)
    with cls(module, device=setting.device, max_entries=len(rows)) as graphed:

        def held() -> int:
            return _reserved() if setting.device.type == "cuda" else int(graphed.stats()["bytes"])

        return _growth(lambda count: graphed(x=make(count)), held, rows)


def _private(module: nn.Module, make: Callable[[int], Tensor], rows: list[int], setting: Setting) -> list[float]:
    kept: list[Captured] = []
    return _growth(lambda count: kept.append(capture(module, {"x": make(count)}, setting.device)), _reserved, rows)


def _growth(add: Callable[[int], object], held: Callable[[], int], rows: list[int]) -> list[float]:
    """By how many MiB each shape but the first makes more of what is held."""
    growth = []
    add(rows[0])
    before = held()
    for count in rows[1:]:
        add(count)
        now = held()
        growth.append((now - before) / _MIB)
        before = now
    return growth


def _reserved() -> int:
    """What the process holds of the device, without what is cached for nobody."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
