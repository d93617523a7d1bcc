"""The examples as a user runs them, in this process."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from graphreplay_harness import demo_models, demo_options, demo_requests

EXAMPLES = Path(__file__).parents[2] / "examples"
CPU = torch.device("cpu")


@pytest.fixture
def nine_steps(monkeypatch):
    spec = importlib.util.spec_from_file_location("nine_steps", EXAMPLES / "nine_steps.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where its dataclass looks for it
    spec.loader.exec_module(module)
    return module


def rows(out):
    """The table, without its headings."""
    lines = [line.split() for line in out.splitlines()]
    return [[float(cell) for cell in line] for line in lines if line and line[0].isdecimal()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_cpu_the_loop_is_compared_eagerly(capsys, nine_steps, dtype):
    assert nine_steps.main(["--device", "cpu", "--dtype", dtype]) == 0
    out, err = capsys.readouterr()
    assert rows(out) == [[steps, 0] for steps in (9, 4, 9, 1, 0, 20)]
    assert "eager is compared with while_loop as a Python loop. Nothing is captured or timed." in out
    assert "FAILED" not in err


@pytest.mark.parametrize(("found", "why"), [(False, "No GPU was found: "), (True, "On the CPU, as asked: ")])
def test_why_it_runs_on_the_cpu(capsys, monkeypatch, nine_steps, found, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    monkeypatch.setattr(nine_steps, "run", lambda device, *rest: [])
    assert nine_steps.main(["--device", "cpu"] if found else []) == 0
    assert capsys.readouterr().out.startswith(why)


def test_a_gpu_that_is_not_there_is_exit_code_2(capsys, monkeypatch, nine_steps):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        nine_steps.main(["--device", "cuda"])
    assert "invalid choice: 'cuda'" in capsys.readouterr().err


@pytest.mark.parametrize("spoil", [lambda x: x.nextafter(torch.tensor(torch.inf)), lambda x: x * torch.nan])
def test_a_wrong_result_of_the_loop_fails(capsys, monkeypatch, nine_steps, spoil):
    right = nine_steps.while_loop

    def wrong(*arguments):
        latents, done = right(*arguments)
        return spoil(latents), done

    monkeypatch.setattr(nine_steps, "STEP_COUNTS", (2, 1))
    monkeypatch.setattr(nine_steps, "while_loop", wrong)
    assert nine_steps.main(["--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert [steps for steps, _ in rows(out)] == [2, 1]
    assert "FAILED: 2 steps: loop is off eager by " in err
    assert "FAILED: 1 steps: loop is off eager by " in err


def test_replay_has_to_be_equal_even_where_eager_need_not_be(monkeypatch, nine_steps):
    def ways_of(teacher, first):
        def off(request):
            return teacher.eager(request).nextafter(torch.tensor(torch.inf))

        return {"eager": teacher.eager, "replay": off, "loop": teacher.eager}

    monkeypatch.setattr(nine_steps, "STEP_COUNTS", (2,))
    monkeypatch.setattr(nine_steps, "ways_of", ways_of)
    monkeypatch.setattr(nine_steps, "allowed_difference", lambda device, dtype: 1.0)
    (failure,) = nine_steps.run(CPU, torch.float32, 1, 0)
    assert failure.startswith("2 steps: loop is off replay by ")
    assert failure.endswith("; 0 is allowed")


@torch.inference_mode()
def test_the_loop_takes_the_steps_of_the_demo(nine_steps):
    models = demo_models.load_models(CPU, torch.float32, 0)
    request = demo_requests.make_request(models, demo_options.PROMPTS[0], 0, 0, CPU)
    teacher = nine_steps.Teacher(CPU, torch.float32, 0)
    for steps in (1, 4, 9):
        expected = demo_requests.generate(models.encoder, models.dit, request, steps)
        latents = teacher.loop(request.noise, torch.tensor([steps]))
        torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_one_graph_serves_all_step_counts(capsys, nine_steps, dtype):
    assert nine_steps.main(["--device", "cuda", "--dtype", dtype, "--repeats", "2"]) == 0
    out, err = capsys.readouterr()
    table = rows(out)
    assert [row[0] for row in table] == [9, 4, 9, 1, 0, 20]
    assert [row[2] for row in table] == [0] * 6
    assert {len(row) for row in table} == {10}
    assert "FAILED" not in err
