"""Writes docs/behaviour.md from the tables at the head of the test modules, or checks that it says the same.

Run as `python tools/behaviour.py` to write it, `python tools/behaviour.py --check` to check.
"""

import ast
import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "behaviour.md"
TESTING = ROOT / "packages" / "core" / "src" / "graphreplay" / "testing"

SOURCES = {
    "Keys": TESTING / "contract_keys.py",
    "What runs eagerly": TESTING / "contract_refusal.py",
    "Process state": TESTING / "contract_ambient.py",
    "Capture": TESTING / "contract_capture.py",
    "Faults at any step": TESTING / "contract_faults.py",
    "What hides from a capture": TESTING / "contract_hidden.py",
    "What comes back in turns": TESTING / "contract_turns.py",
    "Replay": TESTING / "contract_replay.py",
    "Random numbers": TESTING / "contract_random.py",
    "Module state": TESTING / "contract_state.py",
    "Life of a wrapper": TESTING / "contract_life.py",
    "Arguments, bounds, pools": TESTING / "contract_surface.py",
    "Less work a call": TESTING / "contract_options.py",
    "Comparison with eager": TESTING / "contract_verify.py",
    "Ranks": ROOT / "packages" / "core" / "tests" / "test_ranks.py",
    "CUDA alone": ROOT / "packages" / "cuda" / "tests" / "test_contract.py",
}
"""The headings of the page, in order, and where each table stands."""

HEAD = """# What happens, hazard by hazard

A call returns what the eager forward would have returned, or it raises; it never returns a wrong tensor silently,
within the [limits](../README.md#limits) of what it can see: a plain Python attribute that changes between calls, such
as a LoRA scale, is named by `variant=`. Where a graph cannot give the result, the call runs eagerly, and `stats()` says
why.

This page is for graphreplay-core {version}. It is written by `tools/behaviour.py` from the tables that the test modules
open with; each row names its tests. Every backend runs those of `graphreplay.testing`: the CPU reference, CUDA, and
XPU (there on an emulation only).
"""


@dataclass(frozen=True)
class Row:
    """One hazard."""

    kind: str
    outcome: str
    tests: tuple[str, ...]
    """Names of test functions, where * stands for anything, or of one of their cases, in brackets."""


def rows_of(source: Path) -> list[Row]:
    """The table in the docstring of a test module.

    Raises:
        ValueError: there is none, or a row names a test that the module does not have.
    """
    tree = ast.parse(source.read_text(encoding="utf-8"))
    lines = [line for line in (ast.get_docstring(tree) or "").splitlines() if line.startswith("|")]
    if not lines or not lines[0].startswith("| kind"):
        raise ValueError(f"{source.relative_to(ROOT)} opens with no table of kinds, outcomes and tests")
    cases = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    rows = []
    for line in lines[2:]:
        kind, outcome, tests = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
        row = Row(kind, outcome, tuple(re.split(r",\s*(?=test_)", tests)))
        for test in row.tests:
            function, _, case = test.partition("[")
            if not any(fnmatchcase(name, function) for name in names) or case.rstrip("]") not in cases | {""}:
                raise ValueError(f"{source.relative_to(ROOT)} names {test} for {kind!r}, and has no such test")
        rows.append(row)
    return rows


def version() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "packages/core/pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found.group(1)


def page() -> str:
    """The page as it should be."""
    parts = [HEAD.format(version=version())]
    for heading, source in SOURCES.items():
        path = f"../{source.relative_to(ROOT).as_posix()}"
        parts.append(f"\n## {heading}\n\n| kind | outcome | tests |\n| --- | --- | --- |\n")
        for row in rows_of(source):
            tests = ", ".join(f"[`{test}`]({path})" for test in row.tests)
            parts.append(f"| {row.kind} | {row.outcome} | {tests} |\n")
    return "".join(parts)


def main() -> int:
    """Writes or checks the page; 1 if it is not as it should be."""
    try:
        wanted = page()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") != wanted:
            print("docs/behaviour.md is not what the tests say; run python tools/behaviour.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
