"""The teacher session as a user runs it, in this process and on the CPU, with the memo that the harness has itself."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graphreplay_harness import teacher, teacher_session
from graphreplay_harness.teacher_memo import ProjectionMemo, single_rank_vllm


@pytest.fixture(autouse=True)
def graphs_on(monkeypatch):
    monkeypatch.delenv("GRAPHREPLAY_DISABLE", raising=False)


def run(*arguments):
    return teacher.main(["--repeats", "1", *arguments])


def rows(out):
    return [line.split() for line in out.splitlines() if line.split()[0] in ("off", "on")]


def test_the_session_agrees_with_eager(capsys, tmp_path):
    assert run("--json", str(tmp_path / "out.json")) == 0
    out, err = capsys.readouterr()
    assert err == ""
    latents = [["1", "207", "0"], ["2", "198", "24"], ["3", "198", "24"], ["4", "199", "24"]]
    assert [row[:4] for row in rows(out)] == [[lora, *row] for lora in ("off", "on") for row in latents]
    assert [row[7] for row in rows(out)] == ["0"] * 8
    assert "AdaLN memo: one of ours, in place of TaoMate's" in out
    assert "\n6 captures, 6 pinned, 72 replays, 0 evictions, 0 eager_calls\n" in out
    # Six forwards to capture, and two runs of 72 forwards, with 4 projections each; one schedule of nine steps.
    assert out.endswith(f"memo: {(6 + 144 - 9) * 4} hits, {9 * 4} misses, all by eager forwards\n")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["failures"] == []
    assert written["stats"]["captures"] == 6
    assert [request["latents"] for request in written["requests"]] == [207, 198, 198, 199] * 2
    assert all(request["eager_ms"] > 0 and request["graphed_ms"] > 0 for request in written["requests"])


def test_the_memo_class_of_a_file(capsys, tmp_path):
    file = tmp_path / "memo.py"
    file.write_text("from graphreplay_harness.teacher_memo import ProjectionMemo as ExactProjectionCache\n")
    assert run("--cache", str(file)) == 0
    assert f"AdaLN memo: TaoMate's, from {file}\n" in capsys.readouterr().out
    assert "vllm" not in sys.modules


def test_a_wrong_result_is_exit_code_1(capsys, monkeypatch):
    replayed = teacher_session.Session._replayed

    def off(session, **kwargs):
        result = replayed(session, **kwargs)
        return result * 1.0001 if session.teacher.lora_on else result

    monkeypatch.setattr(teacher_session.Session, "_replayed", off)
    assert run() == 1
    failures = re.findall(r"^FAILED: (request \d, LoRA \w+): graphed and eager differ", capsys.readouterr().err, re.M)
    assert failures == [f"request {number}, LoRA on" for number in (1, 2, 3, 4)]


def test_graphs_that_are_off_are_exit_code_1(capsys, monkeypatch):
    monkeypatch.setenv("GRAPHREPLAY_DISABLE", "1")
    assert run() == 1
    err = capsys.readouterr().err
    assert "FAILED: request 1, LoRA off: 0 replays in place of 9\n" in err
    assert "FAILED: 0 captures in place of 6; eager because: {'the environment variable GRAPHREPLAY_DISABLE is" in err


def test_one_capture_too_many_is_exit_code_1(capsys, monkeypatch):
    warm_up = teacher_session.Session.warm_up

    def twice(session):
        warm_up(session)
        session.graphed.reset()
        warm_up(session)

    monkeypatch.setattr(teacher_session.Session, "warm_up", twice)
    assert run() == 1
    assert capsys.readouterr().err == "FAILED: 12 captures in place of 6; eager because: {}\n"


def test_what_is_not_finite_fails():
    outcome = teacher_session.Outcome("off", 1, 207, 0, 1.0, 1.0, float("nan"), float("nan"), False, 8, 3)
    stats = {"captures": 6, "pinned": 6, "replays": 72, "evictions": 0, "eager_calls": 0, "eager_reasons": {}}
    assert list(teacher.faults([outcome], stats, 0.0, 1)) == [
        "request 1, LoRA off: its latents are not finite",
        "request 1, LoRA off: 8 replays in place of 9",
        "request 1, LoRA off: 3 lookups in the memo by replays",
    ]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "x = (",
        "import no_such_module",
        "x = 1",
        "x = 1 / 0",
        "class ExactProjectionCache:\n    def __init__(self, size): ...",
        "class ExactProjectionCache:\n    def __init__(self): raise ValueError('not here')",
        "ExactProjectionCache = None",
    ],
)
def test_a_file_without_the_class_is_exit_code_2(capsys, tmp_path, content):
    file = tmp_path / "memo.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        run("--cache", str(file))
    assert f"error: --cache {file}: " in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("--device", "cuda") == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_a_few_roundings_are_allowed_on_a_gpu_alone():
    assert teacher.allowed_difference(torch.device("cpu"), torch.float32) == 0
    assert teacher.allowed_difference(torch.device("cuda"), torch.bfloat16) == 8 * 2**-7


@torch.inference_mode()
def test_our_memo_remembers_by_content_within_its_budget():
    memo, linear = ProjectionMemo(max_bytes=100), nn.Linear(2, 8)  # room for three
    answers = iter(range(100))

    def project(name, value):
        embedding = torch.full((1, 2), value)
        memo.prepare(embedding)
        return memo.project(name, linear, embedding, lambda: torch.full((1, 8), float(next(answers))))[0, 0].item()

    assert [project("a", 1.0), project("a", 2.0), project("b", 1.0), project("a", 1.0)] == [0, 1, 2, 0]
    assert (memo.hits, memo.misses) == (1, 3)
    assert [project("c", 1.0), project("c", 1.0)] == [3, 4]  # it is full
    assert [project("a", 2.0), project("b", 1.0)] == [1, 2]
    memo.max_bytes = 0
    assert [project("a", 1.0), project("a", 1.0)] == [5, 6]
    assert (memo.hits, memo.misses) == (3, 5)
    memo.max_bytes = 100
    with torch.inference_mode(False), torch.enable_grad():
        assert project("a", 1.0) == 7
    assert project("a", 1.0) == 0


@torch.inference_mode()
def test_our_memo_computes_for_another_tensor_than_the_prepared_one():
    memo, linear, calls = ProjectionMemo(), nn.Linear(2, 8), []

    def project(embedding):
        memo.project("a", linear, embedding, lambda: calls.append(1) or torch.ones(1, 8))
        return len(calls), memo.hits, memo.misses

    first, second = torch.ones(1, 2), torch.ones(1, 2)
    assert project(first) == (1, 0, 0)
    memo.prepare(first)
    assert project(second) == (2, 0, 0)
    assert project(first) == (3, 0, 1)
    assert project(first) == (3, 1, 1)
    memo.prepare(second)
    assert project(first) == (4, 1, 1)
    assert project(second) == (4, 2, 1)  # of the same content
    with torch.inference_mode(False), torch.enable_grad():
        assert project(second) == (5, 2, 1)


def test_the_stand_in_for_vllm_gives_way_to_the_real_one(monkeypatch):
    real = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "vllm", real)
    with single_rank_vllm():
        assert sys.modules["vllm"] is real


@pytest.mark.cuda
def test_on_a_gpu(capsys):
    assert run("--device", "cuda") == 0
    assert "\n6 captures, 6 pinned, 72 replays, 0 evictions, 0 eager_calls\n" in capsys.readouterr().out
