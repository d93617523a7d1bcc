"""What the zoo says: a table on the terminal, and the one of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphreplay_harness.zoo_visit import ROUNDS, Outcome

_PROSE = f"""# Models

Modules that others wrote, and what graphreplay makes of them: built small, with random weights, called {ROUNDS} times
with each of two or three shapes and with new inputs each time, and compared with a plain copy: results and buffers bit
for bit on a CPU, and up to the rounding of their dtype on a GPU. The outcomes below are those on a CPU; on a GPU (an
H200) they were the same but where it is said.

"graphed" means that each shape was captured once and that all later calls were replays; "eager" that no call was. An
eager call is right as well, only not faster. Where the same model stands here twice, the call that is graphed is the
one to make. Run them with `.venv/bin/python -m graphreplay_harness.zoo`, whose `--markdown` writes this page.

| name | model | outcome | how it is called, or why it runs eagerly |
| --- | --- | --- | --- |
"""


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each model, its faults below it."""
    rows = [("model", "outcome", "captures", "replays", "equal", "reason")]
    for each in outcomes:
        skipped = each.outcome == "skipped"
        counts = ("-", "-", "-") if skipped else (str(each.captures), str(each.replays), "yes" if each.equal else "NO")
        rows.append((each.model.name, each.outcome, *counts, each.reason))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = []
    for row, faults in zip(rows, [(), *(each.faults for each in outcomes)], strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
        lines += [f"    FAULT: {fault}" for fault in faults]
    return "\n".join(lines)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The page of the documentation, from a run on a CPU; models that were skipped are on it as declared."""
    rows = []
    for each in outcomes:
        outcome = each.model.expected("cpu") if each.outcome == "skipped" else each.outcome
        if each.model.expected("cuda") != each.model.expected("cpu"):
            outcome += f"; on a GPU {each.model.expected('cuda')}"
        rows.append(
            f"| {each.model.name} | {each.model.made_of} | {outcome} | {each.model.note} |\n".replace("|  |", "| |")
        )
    return _PROSE + "".join(rows)


def as_json(outcomes: Sequence[Outcome], device_type: str) -> list[dict[str, Any]]:
    return [
        {
            "name": each.model.name,
            "made_of": each.model.made_of,
            "declared": each.model.expected(device_type),
            "outcome": each.outcome,
            "captures": each.captures,
            "replays": each.replays,
            "equal": each.equal,
            "reason": each.reason,
            "faults": each.faults,
        }
        for each in outcomes
    ]
