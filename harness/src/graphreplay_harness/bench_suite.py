"""What a suite of bench gets and gives: its setting, blocks of samples, targets, and their text and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphreplay_harness.bench_report import Samples, Spread, Summary, rounded, summarize

HEADINGS = {
    "host": "host us",
    "device": "device us",
    "queued": "back to back us",
    "whole": "us until the device is idle",
    "step": "host us, each step awaited",
    "reserved": "MiB for one more shape",
}
"""What the measures of a block are called in tables and plots."""


@dataclass(frozen=True)
class Setting:
    """What the suites share."""

    device: torch.device
    repeats: int
    say: Callable[[str], None]
    """Tells the user what is being measured."""


@dataclass(frozen=True)
class Block:
    """Samples of several contenders that ran interleaved, on the same inputs."""

    title: str
    samples: Samples
    """By measure and contender."""
    baseline: str | None
    """The contender that ratios are against."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Contenders that were not measured, and why."""

    @property
    def summary(self) -> Summary:
        return summarize(self.samples)

    def median(self, measure: str, name: str) -> float | None:
        """None for what was not measured."""
        samples = self.samples.get(measure, {}).get(name)
        return None if samples is None else summarize({measure: {name: samples}})[measure][name].median

    def ratio(self, measure: str, name: str | None, to: str | None) -> float | None:
        """Of two medians; None unless both were measured."""
        if name is None or to is None:
            return None
        above, below = self.median(measure, name), self.median(measure, to)
        return above / below if above is not None and below else None

    def fastest(self, measure: str, among: tuple[str, ...]) -> str | None:
        """Who has the lowest median, or None if none of them was measured."""
        medians = {name: median for name in among if (median := self.median(measure, name)) is not None}
        return min(medians, key=lambda name: medians[name], default=None)


@dataclass(frozen=True)
class Target:
    """A bound, and what was measured."""

    what: str
    limit: float
    measured: float | None
    note: str = ""
    """What the reader should know about the measured figure, or why there is none."""

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else self.measured <= self.limit

    def __str__(self) -> str:
        figure = "nothing" if self.measured is None else f"{self.measured:.3f}"
        verdict = {None: "", True: ", met", False: ", missed"}[self.met]
        note = f" ({self.note})" if self.note else ""
        return f"target: {self.what} <= {self.limit:g}; measured {figure}{verdict}{note}"


@dataclass(frozen=True)
class SuiteResult:
    """What a suite has measured."""

    name: str
    blocks: list[Block]
    targets: list[Target]

    def as_json(self) -> dict[str, Any]:
        """All of it, to three places."""
        blocks = [
            {
                "title": block.title,
                "baseline": block.baseline,
                "left_out": dict(block.left_out),
                "ratios": {
                    measure: {name: block.ratio(measure, name, block.baseline) for name in of}
                    for measure, of in block.samples.items()
                },
                "summary": {
                    measure: {name: vars(spread) for name, spread in of.items()}
                    for measure, of in block.summary.items()
                },
                "samples": block.samples,
            }
            for block in self.blocks
        ]
        targets = [{**vars(target), "met": target.met} for target in self.targets]
        return rounded({"name": self.name, "blocks": blocks, "targets": targets})  # type: ignore[no-any-return]

    def text(self) -> str:
        """Ratios of all blocks, a table for each, and the targets."""
        lines = [f"== {self.name} =="]
        for block in self.blocks:
            lines += _ratios(block)
        for block in self.blocks:
            lines += ["", *_table(block)]
        return "\n".join([*lines, *([""] if self.targets else []), *map(str, self.targets)])


def _ratios(block: Block) -> Iterator[str]:
    measure = next(iter(block.samples))
    ratios = {name: block.ratio(measure, name, block.baseline) for name in block.samples[measure]}
    figures = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio is not None)
    if figures:
        yield f"{block.title}: {HEADINGS[measure]} in those of {block.baseline}: {figures}"


def _table(block: Block) -> Iterator[str]:
    names = list(dict.fromkeys(name for of in block.samples.values() for name in of))
    width = max(map(len, [*names, *block.left_out]))
    yield block.title
    yield f"{'':{width}}  " + "  ".join(f"{'ratio':>7} {HEADINGS[measure]:>31}" for measure in block.samples)
    summary = block.summary
    for name in names:
        cells = (_cell(block.ratio(measure, name, block.baseline), of.get(name)) for measure, of in summary.items())
        yield f"{name:{width}}  " + "  ".join(cells)
    for name, why in block.left_out.items():
        yield f"{name:{width}}  left out: {why}"


def _cell(ratio: float | None, spread: Spread | None) -> str:
    return f"{'' if ratio is None else f'{ratio:.3f}':>7} {'-' if spread is None else str(spread):>31}"
