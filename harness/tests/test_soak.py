"""The soak of several ranks, small, on CPU ranks: what it counts, and that its processes go."""

import json
import os
import subprocess
import sys
import time

import pytest

from graphreplay_harness import soak


def launch(*arguments):
    """Runs the soak on two ranks; their reports, the exit status, and seconds from the last report to the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "graphreplay_harness.soak", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    ended = time.time()
    reports = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda report: report["rank"])
    assert done.returncode == 0, done.stderr
    return reports, ended - max(report["ended_at"] for report in reports)


@pytest.mark.parametrize("ending", soak.ENDINGS["cpu"])
def test_all_is_right_and_the_processes_go(ending):
    reports, lingering = launch("--calls", "60", "--shapes", "5", "--entries", "2", "--ending", ending)
    assert lingering < 10
    lengths = soak.shapes(60, 5)
    kept, misses = [], 0
    for length in lengths:  # the least recently used of two goes
        misses += length not in kept
        kept = [length, *(other for other in kept if other != length)][:2]
    for rank, report in enumerate(reports):
        assert (report["rank"], report["calls"], report["wrong"], report["largest_difference"]) == (rank, 60, 0, 0)
        assert report["captures"] == misses > 5
        assert report["replays"] == 60 - misses
        assert report["evictions"] == misses - 2
        assert report["eager_reasons"] == {}


def test_lengths_are_the_same_on_all_ranks_and_all_occur():
    assert soak.shapes(200, 5) == soak.shapes(200, 5)
    assert set(soak.shapes(200, 5)) == set(range(soak.SHORTEST, soak.SHORTEST + 5))


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        ({"wrong": 1}, False),
        ({"replays": 0}, False),
        ({"disabled_reason": "no more"}, False),
        ({"reserved_bytes_grown_in_second_half": 64 << 20}, True),
        ({"reserved_bytes_grown_in_second_half": (64 << 20) + 1}, False),
    ],
)
def test_what_is_right(change, right):
    well = {"wrong": 0, "replays": 1, "disabled_reason": None, "reserved_bytes_grown_in_second_half": 0}
    assert soak.is_right(well | change) is right


@pytest.mark.parametrize(
    "arguments", [["--calls", "0"], ["--device", "tpu"], ["--ending", "never"], ["--ending", "exit"], []]
)
def test_bad_options_are_refused(arguments, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as caught:
        soak.main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err
