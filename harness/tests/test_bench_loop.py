"""The benchmark of loops and branches: its arithmetic and text; and, on a GPU, a short run."""

import json

import pytest
import torch

from graphreplay_harness import bench_loop
from graphreplay_harness.bench_loop import LEAD, PLAIN, SKIPPED, TAKEN, loop_name, unrolled_name
from graphreplay_harness.bench_report import summarize

TRIPS = (0, 1, 10)


@pytest.fixture
def summary():
    """A loop starts at 5 µs and takes 6 an iteration, unrolled 3 and 4; an if node adds 1 taken and 0.5 not taken."""
    device = {}
    for count in TRIPS:
        device[loop_name(count)] = [5.0 + 6 * count]
        device[unrolled_name(count)] = [3.0 + 4 * count]
    device |= {TAKEN: [8.0], SKIPPED: [2.5], PLAIN: [7.0], LEAD: [2.0]}
    return summarize({"device": device})


def test_an_iteration_costs_what_is_beyond_none(summary):
    assert bench_loop.per_iteration(summary["device"], TRIPS) == {1: (6, 4), 10: (6, 4)}


def test_a_branch_costs_what_is_beyond_its_kernels(summary):
    assert bench_loop.branch_costs(summary["device"]) == (1, 0.5)


def test_report(summary):
    lines = bench_loop.report(summary, TRIPS).splitlines()
    assert lines[1] == "    1 trips: while node 6.00 us, 1.50 times the unrolled 4.00 us"
    assert lines[2] == "   10 trips: while node 6.00 us, 1.50 times the unrolled 4.00 us"
    assert lines[3] == "An if node adds +1.00 us where it is taken and +0.50 us where it is not."
    assert lines[4] == ""
    assert len(lines) == 6 + 2 * len(TRIPS) + 4


def test_an_iteration_that_drowns_in_noise_has_no_ratio(summary):
    summary["device"][unrolled_name(1)] = summary["device"][unrolled_name(0)]
    assert "1 trips: while node 6.00 us, against the unrolled 0.00 us" in bench_loop.report(summary, TRIPS)


def test_without_a_device_it_is_one_line_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_loop.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "graphreplay bench_loop: this benchmark needs a CUDA device, and PyTorch finds none\n"


@pytest.mark.cuda
def test_a_short_run(capsys, tmp_path):
    path = tmp_path / "out.json"
    assert bench_loop.main(["--trips", "1", "10", "--repeats", "3", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "FAILED" not in err
    assert "An if node adds" in out
    content = json.loads(path.read_text())
    assert content.keys() == {
        "versions", "repeats", "iteration_us", "if_taken_us", "if_skipped_us", "summary", "samples",
    }  # fmt: skip
    assert content["iteration_us"].keys() == {"1", "10"}
    assert content["iteration_us"]["10"].keys() == {"while_node", "unrolled"}
    assert {len(each) for each in content["samples"]["device"].values()} == {3}
