"""The ways to give a graph its inputs that bench_staging compares, and the forward that they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphreplay_cuda import CUDAGraph, graph
from graphreplay_harness import bench_report as names

SHAPE = (64, 256)
"""Of every input."""

LAYERS = 10

Inputs = list[Tensor]
Forward = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Contender:
    """One way to run the graph."""

    name: str
    call: Callable[[Inputs], object]
    statics: Inputs
    """What its graph reads."""
    output: Tensor | None
    """What its graph writes, if it has one."""
    stages: bool
    """Whether a call copies its inputs; otherwise the graph runs on what the statics hold."""


def make_forward(device: torch.device) -> Forward:
    """The forward that is captured: one kernel less than its inputs, and one for each layer."""
    width = SHAPE[1]
    generator = torch.Generator(device).manual_seed(0)
    # Scaled so that values neither die out nor grow on their way.
    weights = [
        (torch.randn(width, width, device=device, generator=generator) / width**0.5).bfloat16() for _ in range(LAYERS)
    ]

    def forward(inputs: Inputs) -> Tensor:
        y = inputs[0]
        for x in inputs[1:]:
            y = y + x
        for weight in weights:
            y = torch.nn.functional.linear(y, weight)
        return y

    return forward


def make_contenders(graphs: Sequence[CUDAGraph], forward: Forward, example: Inputs) -> list[Contender]:
    """All of them, each with a graph and static inputs of its own, so that none profits from another's copies.

    Args:
        graphs: three new ones, for ours. They are the caller's to reset.
    """

    def plain() -> tuple[torch.cuda.CUDAGraph, Inputs, Tensor]:
        statics = [x.clone() for x in example]
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made, stream=side):
            output = forward(statics)
        return made, statics, output

    def ours(into: CUDAGraph) -> tuple[CUDAGraph, Inputs, Tensor]:
        statics = [x.clone() for x in example]
        with graph(into):
            output = forward(statics)
        return into, statics, output

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what libraries allocate at their first use must not become memory of a graph
        forward(example)
    torch.cuda.current_stream().wait_stream(side)

    bare, bare_statics, bare_output = plain()
    each, each_statics, each_output = plain()
    foreach, foreach_statics, foreach_output = plain()
    checked, checked_statics, checked_output = ours(graphs[0])
    launched, launched_statics, launched_output = ours(graphs[1])
    unstaged, unstaged_statics, unstaged_output = ours(graphs[2])
    alone = [x.clone() for x in example]
    launch = launched.staging(launched_statics).launch

    def copy_each(inputs: Inputs) -> None:
        for static, x in zip(each_statics, inputs, strict=True):
            static.copy_(x)
        each.replay()

    def copy_foreach(inputs: Inputs) -> None:
        torch._foreach_copy_(foreach_statics, inputs)
        foreach.replay()

    return [
        Contender(names.BARE, lambda inputs: bare.replay(), bare_statics, bare_output, False),
        Contender(names.EACH, copy_each, each_statics, each_output, True),
        Contender(names.FOREACH, copy_foreach, foreach_statics, foreach_output, True),
        Contender(
            names.CHECKED,
            lambda inputs: checked.stage_and_launch(checked_statics, inputs),
            checked_statics,
            checked_output,
            True,
        ),
        Contender(names.LAUNCH, lambda inputs: launch(inputs), launched_statics, launched_output, True),
        Contender(names.OURS, lambda inputs: unstaged.replay(), unstaged_statics, unstaged_output, False),
        Contender(names.COPY, lambda inputs: torch._foreach_copy_(alone, inputs), alone, None, True),
        Contender(names.NOTHING, lambda inputs: None, [], None, False),
    ]
