"""The code in this package's README runs, and prints what it says."""

import re
from pathlib import Path

import pytest

BLOCKS = re.findall(r"^```python\n(.*?)^```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL | re.M)


def test_there_are_two_blocks():
    assert len(BLOCKS) == 2


@pytest.mark.cuda
def test_a_graph_by_hand(capsys):
    exec(BLOCKS[0], {})
    assert float(capsys.readouterr().out) > 0


@pytest.mark.cuda
def test_branches_and_loops(capsys):
    exec(BLOCKS[1], {})
    assert capsys.readouterr().out.splitlines() == ["108.0 3", "101.0 0", "1124.0 10"]
    assert "# 108.0 3, then 101.0 0, then 1124.0 10" in BLOCKS[1]
