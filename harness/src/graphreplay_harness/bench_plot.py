"""Plots of bench as SVG: a panel for each measure of each block, bars from left to right, whiskers at the quartiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from graphreplay_harness.bench_report import Spread
from graphreplay_harness.bench_suite import HEADINGS, SuiteResult

LOG_FROM = 10.0
"""From this ratio of the largest median to the smallest on, the axis is logarithmic."""

_LEFT, _WIDTH, _RIGHT = 220, 460, 250
_ROW, _HEAD, _GAP = 20, 46, 24
_OURS = "ours"
_COLOURS = {True: "#0b6e4f", False: "#8fa3ad"}


def svg(results: Sequence[SuiteResult]) -> str:
    """The whole picture."""
    panels, top = [], _GAP
    for result in results:
        for block in result.blocks:
            for measure, of in block.summary.items():
                panels += list(_panel(f"{result.name}: {block.title}", HEADINGS[measure], of, top))
                top += _HEAD + _ROW * len(of) + _GAP
    width = _LEFT + _WIDTH + _RIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{top}" fill="white"/>',
            *panels,
            "</svg>",
            "",
        ]
    )


class _Axis:
    """From values to places."""

    def __init__(self, spreads: Sequence[Spread]) -> None:
        lows = [spread.low for spread in spreads]
        high = max(spread.high for spread in spreads)
        medians = [spread.median for spread in spreads]
        self.log = min(lows) > 0 and max(medians) / min(medians) >= LOG_FROM
        # A logarithmic axis has no zero for bars to start at: they start below the smallest.
        self._low = min(lows) / 2 if self.log else min(0.0, *lows)
        self._high = high if high > self._low else self._low + 1

    @property
    def text(self) -> str:
        return f"log axis from {self._low:.3g}" if self.log else f"linear axis from {self._low:.3g}"

    def x(self, value: float) -> float:
        if self.log:
            return _LEFT + _WIDTH * math.log(value / self._low) / math.log(self._high / self._low)
        return _LEFT + _WIDTH * (value - self._low) / (self._high - self._low)


def _panel(title: str, heading: str, spreads: dict[str, Spread], top: int) -> Iterator[str]:
    axis = _Axis(list(spreads.values()))
    yield _text(8, top + 14, title, 'font-weight="bold"')
    yield _text(8, top + 32, f"{heading}: median, whiskers at the quartiles; {axis.text}", 'fill="#555"')
    for row, (name, spread) in enumerate(spreads.items()):
        y = top + _HEAD + row * _ROW
        low, median, high = (axis.x(value) for value in (spread.low, spread.median, spread.high))
        middle, colour = y + 7, _COLOURS[name.startswith(_OURS)]
        yield _text(_LEFT - 8, y + 11, name, 'text-anchor="end"')
        yield f'<rect x="{_LEFT}" y="{y}" width="{median - _LEFT:.1f}" height="14" fill="{colour}"/>'
        yield (
            f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {y + 3}v8M{high:.1f} {y + 3}v8" '
            'stroke="black" fill="none"/>'
        )
        yield _text(_LEFT + _WIDTH + 8, y + 11, str(spread).strip(), "")


def _text(x: int, y: int, text: str, how: str) -> str:
    return f'<text x="{x}" y="{y}" {how}>{escape(text)}</text>'
