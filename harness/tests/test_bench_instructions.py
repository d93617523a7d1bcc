"""Counts of instructions: options, what is read of valgrind's files, comparison, and one real run."""

import json
import shutil

import pytest
import torch

from graphreplay_harness import bench_instructions as tool
from graphreplay_harness.bench_host import CASES
from graphreplay_harness.bench_instructions_child import LAYOUTS, RUNS

ABOUT = {"python": "3.11.7", "torch": "2.13.0", "valgrind": "3.19.0", "machine": "x86_64"}
BEFORE = {"match": [100.0, 101.0, 99.0], "hit": [1000.0, 1000.0, 1002.0]}


@pytest.fixture
def counted(monkeypatch):
    """A tool that counts what the test puts in here."""
    counts = {name: list(values) for name, values in BEFORE.items()}
    monkeypatch.setattr(tool, "find_valgrind", lambda: "valgrind")
    monkeypatch.setattr(tool, "versions", lambda valgrind: ABOUT)
    monkeypatch.setattr(tool, "count", lambda valgrind: counts)
    return counts


@pytest.fixture
def before(tmp_path):
    path = tmp_path / "before.json"
    path.write_text(json.dumps({"versions": ABOUT, "instructions": BEFORE}))
    return path


# ---------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "argv", [["--json", "/"], ["--allow", "-1"], ["--allow", "nan"], ["--allow", "five"], ["--against"], ["more"]]
)
def test_bad_options_are_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        tool.main(argv)
    assert exit_info.value.code == 2
    assert argv[0].removeprefix("more") in capsys.readouterr().err


def test_without_valgrind_it_is_one_line_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert tool.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "graphreplay bench_instructions: valgrind is not installed; it counts the instructions\n"


def test_a_torch_without_valgrind_is_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/valgrind")
    monkeypatch.setattr(torch._C, "_valgrind_supported_platform", lambda: False)
    assert tool.main([]) == 2
    assert "this build of PyTorch cannot tell valgrind when to count" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- parsing


def write_totals(out, totals):
    for number, total in enumerate(totals, start=1):
        out.with_name(f"out.{number}").write_text(f"events: Ir\nfn=(1)\n1 7\ntotals: {total}\n")


def test_a_count_is_the_difference_of_two_by_the_runs_between(tmp_path):
    first = [total for layout in range(LAYOUTS) for total in (500, 500 + RUNS * (10 + layout))]
    second = [total for layout in range(LAYOUTS) for total in (900, 900 + RUNS * 2)]
    write_totals(tmp_path / "out", first + second)
    counts = tool.parse(tmp_path / "out", ["first", "second"])
    assert counts == {"first": [10.0 + layout for layout in range(LAYOUTS)], "second": [2.0] * LAYOUTS}


def test_a_missing_file_is_told(tmp_path):
    write_totals(tmp_path / "out", [1] * (2 * LAYOUTS - 1))
    with pytest.raises(tool.CountError, match=f"did not write out.{2 * LAYOUTS}"):
        tool.parse(tmp_path / "out", ["first"])


def test_a_file_without_a_total_is_told(tmp_path):
    write_totals(tmp_path / "out", [1] * 2 * LAYOUTS)
    (tmp_path / "out.2").write_text("events: Ir\n")
    with pytest.raises(tool.CountError, match=r"no total into out\.2"):
        tool.parse(tmp_path / "out", ["first"])


def test_a_process_that_fails_is_told_with_what_it_said(tmp_path):
    fake = tmp_path / "valgrind"
    fake.write_text("#!/bin/sh\necho 'no such tool' >&2\nexit 3\n")
    fake.chmod(0o755)
    with pytest.raises(tool.CountError, match="ended with 3:\nno such tool"):
        tool.count(str(fake))


# ------------------------------------------------------------------------------------------- comparison


def test_what_one_run_writes_another_compares_with(counted, capsys, tmp_path):
    path = tmp_path / "counts.json"
    assert tool.main(["--json", str(path)]) == 0
    assert "ratio" not in capsys.readouterr().out
    assert tool.main(["--against", str(path), "--allow", "0"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["ratio", "1.000", "1.000"]


def test_a_case_that_grows_is_named_and_exit_code_1(counted, before, capsys):
    counted["hit"] = [1060.0, 1051.0, 1050.0]
    assert tool.main(["--against", str(before)]) == 1
    out = capsys.readouterr().out
    assert "1.051" in out
    assert out.splitlines()[-1] == "grown by more than 5 %: hit"
    assert tool.main(["--against", str(before), "--allow", "6"]) == 0


def test_growth_of_exactly_what_is_allowed_is_allowed(counted, before):
    counted["hit"] = [1050.0]
    assert tool.main(["--against", str(before)]) == 0


def test_a_case_that_shrinks_makes_up_for_no_other(counted, before):
    counted["match"], counted["hit"] = [10.0], [1100.0]
    assert tool.grown_cases(counted, BEFORE, 5.0) == ["hit"]


def test_new_and_gone_cases_are_shown_and_do_not_count(counted, before, capsys):
    counted["copy"] = counted.pop("match")
    assert tool.main(["--against", str(before)]) == 0
    lines = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines()}
    assert lines == {"instructions": "ratio", "hit": "1.000", "copy": "new", "match": "gone"}


@pytest.mark.parametrize("key", ABOUT)
def test_counts_of_other_versions_are_not_compared(counted, before, capsys, monkeypatch, key):
    monkeypatch.setattr(tool, "count", lambda valgrind: pytest.fail("counted in vain"))
    monkeypatch.setattr(tool, "versions", lambda valgrind: {**ABOUT, key: "another"})
    assert tool.main(["--against", str(before)]) == 2
    assert f"{key} {ABOUT[key]} and not another" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"versions": {}, "instructions": []}', '{"versions": {}, "instructions": {"hit": []}}']
)
def test_files_without_counts_are_exit_code_2(counted, before, capsys, text):
    before.write_text(text)
    assert tool.main(["--against", str(before)]) == 2
    assert f"cannot read counts from {before}" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_exit_code_2(counted, tmp_path, capsys):
    assert tool.main(["--against", str(tmp_path / "none.json")]) == 2
    assert "cannot read counts from" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- for real


@pytest.mark.deep  # minutes, most of them to import torch and to capture
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_a_real_run_counts_every_case(capsys, tmp_path):
    path = tmp_path / "counts.json"
    assert tool.main(["--json", str(path)]) == 0, capsys.readouterr().err
    counts = json.loads(path.read_text())["instructions"]
    assert list(counts) == list(CASES)
    assert all(len(values) == LAYOUTS and min(values) > 100 for values in counts.values())
    assert counts["hit, 64 tensors, flat, module checked"] > counts["hit, 15 tensors, flat, module checked"]
    assert counts["hit by key, nested"] > counts["hit, 15 tensors, nested, module checked"]
