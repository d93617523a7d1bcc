"""The suite ``call``: what a call costs, by number and nesting of its tensors and by number of outputs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from sys import intern
from typing import Any

import torch
from torch import Tensor, nn

from graphreplay_harness import bench_peers as peers
from graphreplay_harness.bench_clock import device_us, host_us, interleave, queued_us
from graphreplay_harness.bench_handmade import Call, leaves
from graphreplay_harness.bench_suite import Block, Setting, SuiteResult, Target

COUNTS = (1, 4, 15, 64)
OUTPUTS = (1, 8)
PARAMETERS = 25

SHAPE = (64, 256)
"""Of every tensor."""

CALLS = 8
"""Different kwargs that calls take in turn, so that addresses change with each; and calls for one sample."""

QUEUED = 100
"""Calls put back to back for one sample."""

SAMPLES_PER_QUEUED = 10
"""Samples of single calls to one of calls back to back, which takes that much longer."""

CHECKED_TARGET, UNCHECKED_TARGET, PEER_TARGET, DEVICE_TARGET = 1.3, 1.0, 0.35, 1.02
TARGET_CASES = ("15 tensors, flat, one output", "64 tensors, flat, one output")


@dataclass(frozen=True)
class Case:
    """A kind of call."""

    tensors: int
    nested: bool
    outputs: int

    def __str__(self) -> str:
        tensors = f"{self.tensors} tensor{'s' if self.tensors > 1 else ''}"
        outputs = "one output" if self.outputs == 1 else f"{self.outputs} outputs"
        return f"{tensors}, {'nested' if self.nested else 'flat'}, {outputs}"


class Module(nn.Module):
    """Sums its tensors and sends the sum through twelve layers: with a scale, 25 parameters."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SHAPE[1], SHAPE[1]) for _ in range((PARAMETERS - 1) // 2))
        self.scale = nn.Parameter(torch.ones(SHAPE[1]))
        self._outputs = outputs
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.mul_(3**0.5)  # type: ignore[operator]  # so that values do not die out on their way

    def forward(self, **inputs: Any) -> Tensor | tuple[Tensor, ...]:
        """The last layer's values, or those of the last eight."""
        first, *rest = leaves(inputs)
        y = first * self.scale
        for x in rest:
            y = y + x
        values = []
        for layer in self.layers:
            y = layer(y)
            values.append(y)
        return y if self._outputs == 1 else tuple(values[-self._outputs :])


def make_kwargs(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Random kwargs; the nested ones are lists in dicts in a dict."""
    tensors = [torch.randn(SHAPE, device=device, dtype=dtype) for _ in range(case.tensors)]
    if not case.nested:
        return {intern(f"x{number}"): x for number, x in enumerate(tensors)}  # as names in source code are
    half = (len(tensors) + 1) // 2
    return {"x": {"front": {"first": tensors[0], "more": tensors[1:half]}, "back": tensors[half:]}}


def run(setting: Setting, counts: Sequence[int]) -> SuiteResult:
    """Measures every case with so many tensors."""
    cases = [Case(*each) for each in product(counts, (False, True), OUTPUTS)]
    blocks = [measure(case, setting) for case in cases]
    return SuiteResult("call", blocks, [target for block in blocks for target in targets(block)])


def measure(case: Case, setting: Setting) -> Block:
    """All contenders on one case."""
    device = setting.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        module = Module(case.outputs).to(device, dtype).eval().requires_grad_(False)
        calls = [Call.of(make_kwargs(case, device, dtype)) for _ in range(CALLS)]

    def say(what: str) -> None:
        setting.say(f"call: {case}: {what}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what others warn of is not the user's affair
        contenders, left_out = peers.make_all(peers.CONTENDERS, module, calls, device, say)
        try:
            return Block(str(case), _samples(contenders, calls, setting, say), peers.LOOP, left_out)
        finally:
            for contender in contenders.values():
                contender.close()
            contenders.clear()
            if device.type == "cuda":
                torch._dynamo.reset()  # it frees its graphs, and would refuse a forward met in too many cases
            gc.collect()  # so that the next case finds the memory


def _samples(
    contenders: dict[str, peers.Contender], calls: Sequence[Call], setting: Setting, say: Any
) -> dict[str, dict[str, list[float]]]:
    names = list(contenders)

    def host(name: str, repeat: int) -> float:
        return host_us(contenders[name].call, calls)

    def device(name: str, repeat: int) -> float:
        return device_us(contenders[name].call, calls[repeat % len(calls)])

    def queued(name: str, repeat: int) -> float:
        return queued_us(contenders[name].call, calls, QUEUED)

    interleave(names, 1 + setting.repeats // 10, host)  # does not count
    say("host time, each call from an idle device")
    samples = {"host": interleave(names, setting.repeats, host)}
    if setting.device.type == "cuda":
        say("device time")
        alone = [name for name in names if _has_device_time(contenders[name], calls[0])]
        samples["device"] = interleave(alone, setting.repeats, device)
    say(f"{QUEUED} calls back to back")
    samples["queued"] = interleave(names, max(1, setting.repeats // SAMPLES_PER_QUEUED), queued)
    return samples


def _has_device_time(contender: peers.Contender, call: Call) -> bool:
    """Whether its calls do not wait for the device, so that it can be timed on the device alone."""
    try:
        device_us(contender.call, call)
    except RuntimeError:
        return False
    return True


def targets(block: Block) -> Iterator[Target]:
    """What a case that the targets are about says of them."""
    if block.title not in TARGET_CASES:
        return
    fastest = block.fastest("host", peers.PEERS)
    on_device = "" if "device" in block.samples else "without a device there is no device time"
    for what, measure, ours, theirs, limit, note in (
        ("every check on / loop", "host", peers.OURS, peers.LOOP, CHECKED_TARGET, ""),
        ("check_module=False / loop", "host", peers.UNCHECKED, peers.LOOP, UNCHECKED_TARGET, ""),
        ("check_module=False / fastest peer", "host", peers.UNCHECKED, fastest, PEER_TARGET, f"that is {fastest}"),
        ("every check on / loop", "device", peers.OURS, peers.LOOP, DEVICE_TARGET, on_device),
    ):
        yield Target(f"call, {block.title}: {measure}, {what}", limit, block.ratio(measure, ours, theirs), note)
