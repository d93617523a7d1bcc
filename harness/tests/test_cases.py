"""The runner of cases of several ranks, by cases whose end is known, under torchrun."""

import json
import os
import subprocess
import sys

import pytest

from graphreplay_harness import cases
from graphreplay_harness.case_faults import combinations, why_not
from graphreplay_harness.case_model import Expected, Fault, Place
from graphreplay_harness.case_runner import GRACE

WORLD = 2


def launch(*arguments, world=WORLD):
    """Runs cases under torchrun; the reports by case and rank, the exit status, and what stands on stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [*command, "--standalone", "-m", "graphreplay_harness.cases", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return {(each["case"], each["rank"]): each for each in reports}, done.returncode, done.stderr


@pytest.fixture(scope="module")
def well():
    """What is to be told apart, with each expected as it is."""
    names = ("none", "hang", "death", "raise", "wrong", "raise:*", "host-sync:*", "delay:capture", "none-at-last")
    reports, status, err = launch("--selftest", "--case", *(f"selftest:{name}" for name in names))
    assert status == 0, err
    return reports


def outcome(reports, name, rank):
    return reports[f"selftest:{name}", rank]["outcome"]


def test_each_rank_of_each_case_has_one_line_in_order(well):
    names = list(dict.fromkeys(name for name, _ in well))
    assert list(well) == [(name, rank) for name in names for rank in range(WORLD)]
    assert all(report["ok"] for report in well.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", "graphed"),
        ("raise", "error:InjectedFault"),
        ("death", "died"),
        ("wrong", "wrong"),
        ("hang", "hang"),
        ("delay:capture", "graphed"),
    ],
)
def test_outcomes_are_told_apart_and_other_ranks_go_on(well, name, expected):
    assert outcome(well, name, 1) == expected
    assert outcome(well, name, 0) == "graphed"


def test_a_hang_comes_with_the_stack_and_the_run_goes_on(well):
    report = well["selftest:hang", 1]
    assert "case_faults.py" in report["stack"].splitlines()[2]
    assert 1000 * (1 + GRACE) <= report["milliseconds"] < 10_000  # its deadline is 1 s
    assert outcome(well, "none-at-last", 1) == "graphed"


@pytest.mark.parametrize("place", ["clone", "probe", "warm-up", "capture", "instantiate", "replay"])
def test_a_fault_happens_where_it_should(well, place):
    assert f"injected raise at {place}" in well[f"selftest:raise:{place}", 1]["reason"]


@pytest.mark.parametrize("place", ["probe", "warm-up", "capture"])
def test_a_host_sync_is_one(well, place):
    assert "makes the host wait for the device" in well[f"selftest:host-sync:{place}", 1]["reason"]


def test_a_collective_whose_peer_does_not_come_wakes_up():
    reports, status, err = launch("--selftest", "--case", "selftest:cut-off")
    assert status == 0, err
    assert outcome(reports, "cut-off", 0).startswith("error:")
    assert reports["selftest:cut-off", 0]["milliseconds"] < 10_000


def test_what_is_not_expected_fails_the_run_and_shows_its_output():
    reports, status, err = launch("--selftest", "--case", "selftest:unexpected", "selftest:unreached")
    assert status == 1
    assert [report["ok"] for report in reports.values()] == [True, False, True, False]
    assert "InjectedFault: injected raise at eager" in err
    assert outcome(reports, "unreached", 1) == "broken"
    assert "2 did not selftest:unexpected selftest:unreached" in err


FAULTS = ["none", "raise", "always", "host-sync", "out-of-memory", "delay", "death", "shape", "capacity", "ulysses"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_the_matrix(fault, world):
    reports, status, err = launch("--case", fault if fault == "none" else f"{fault}:*", world=world)
    missed = {each: report for each, report in reports.items() if not report["ok"]}
    assert (status, missed) == (0, {}), err
    known = [case.name for case in cases.matrix(world)[0] if case.name.partition(":")[0] == fault]
    assert {name for name, _ in reports} == set(known)


def test_the_matrix_is_whole():
    assert {case.name.partition(":")[0] for case in cases.matrix(WORLD)[0]} == set(FAULTS)


def test_an_unknown_name_is_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        cases.main(["--case", "nobody"])
    assert "no case is called nobody" in capsys.readouterr().err


def test_the_list_says_what_is_left_out_and_why(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert cases.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "raise:capture:1" in lines
    assert "# death:capture:all: nobody is left to see it" in lines


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_matrix_has_each_pair_once(world):
    pairs = [(fault, place, ranks) for fault, place, ranks, _ in combinations(world)]
    assert len(pairs) == len(set(pairs))
    made, left_out = cases.matrix(world)
    assert len([case for case in made if case.module is not cases.ulysses]) + len(left_out) == len(pairs) + 1
    assert all(len(case.calls) == len(case.expected) == len(case.max_entries) == world for case in made)
    assert len({case.name for case in made}) == len(made)


def test_only_cases_that_let_a_deadline_pass_have_a_short_one():
    short = {case.fault for case in cases.matrix(WORLD)[0] if case.agree_within == 2}
    assert short == {Fault.SHAPE, Fault.CAPACITY, Fault.DEATH}
    assert {case.agree_within for case in cases.matrix(WORLD)[0] if case.fault not in short} == {20}


@pytest.mark.parametrize(
    ("name", "expected", "why"),
    [
        ("raise:between-in-capture:1", [[cases.DISAGREEMENT]] * 2, "a capture of a GPU issues no collectives"),
        ("out-of-memory:between-in-capture:all", [["disabled"]] * 2, "a capture of a GPU issues no collectives"),
        (
            "raise:replay:0",
            [["error:InjectedFault"], sorted(cases.CUT_OFF)],
            "nothing but the end of its process ends a collective",
        ),
    ],
)
def test_what_a_gpu_leaves_out_is_a_case_on_the_cpu(name, expected, why):
    (case,) = cases.choose(cases.matrix(WORLD)[0], [name])
    assert [sorted(each.outcomes) for each in case.expected] == expected
    made, left_out = cases.matrix(WORLD, "cuda")
    assert name not in {case.name for case in made}
    assert dict(left_out)[name].startswith(why)


def test_ranks_that_cannot_share_the_heads_leave_the_sequence_parallel_cases_out():
    made, left_out = cases.matrix(3)
    assert not [case for case in made if case.module is cases.ulysses]
    assert ("ulysses:*", "4 heads do not divide among 3 ranks") in left_out


def test_impossible_pairs_have_a_reason():
    assert (
        why_not(Fault.HOST_SYNC, Place.CLONE, (0,), 2) == "only the probe and the capture mind who waits for the device"
    )
    assert why_not(Fault.RAISE, Place.CLONE, (0, 1), 2) is None


def test_what_is_expected_may_need_a_reason():
    expected = Expected(frozenset({"disabled"}), "rank 1: ")
    assert expected.met("disabled", "rank 1: no")
    assert not expected.met("disabled", "no")
    assert not expected.met("graphed", "rank 1: ")
