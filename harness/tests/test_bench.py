"""The benchmark of everything: its options, and its suites on the reference backend; on a GPU, short runs."""

import json
from xml.etree import ElementTree

import pytest
import torch

from graphreplay import get_graphed_forward_cls
from graphreplay_harness import bench, bench_call, bench_dit, bench_first, bench_memory
from graphreplay_harness.bench_call import Module
from graphreplay_harness.bench_peers import BARE, CONTENDERS, EAGER, LOOP, OURS, OURS_ALL, SEED
from graphreplay_harness.bench_suite import Block, Setting

CPU = torch.device("cpu")
ON_CPU = {EAGER, BARE, LOOP, SEED, *OURS_ALL}


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def setting():
    return Setting(CPU, 1, lambda what: None)


# ---------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "argv",
    [["--suite", "all of them"], ["--device", "tpu"], ["--repeats", "0"], ["--counts", "0"], ["--plot", "/"], ["more"]],
)
def test_bad_options_are_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        bench.main(argv)
    assert exit_info.value.code == 2
    assert argv[0].removeprefix("more") in capsys.readouterr().err


def test_cuda_without_a_device_is_one_line_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--device", "cuda"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "graphreplay bench: this benchmark needs a CUDA device, and PyTorch finds none\n"


def test_a_suite_without_its_libraries_is_left_out(capsys, monkeypatch):
    def missing(setting, given):
        raise ImportError("No module named 'diffusers'")

    monkeypatch.setitem(bench.SUITES, "dit", missing)
    assert bench.main(["--suite", "dit", "--device", "cpu"]) == 2
    assert "the suite dit is left out: No module named 'diffusers'" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------- suites


def test_a_run_prints_and_writes_all_it_measured(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_call, "QUEUED", 2)
    path, plot = tmp_path / "out.json", tmp_path / "out.svg"
    argv = ["--suite", "call", "--device", "cpu", "--counts", "15", "--repeats", "1"]
    assert bench.main([*argv, "--json", str(path), "--plot", str(plot)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "== call =="
    assert lines[1].startswith("15 tensors, flat, one output: host us in those of hand-written loop: eager ")
    assert sum(line.startswith("target: call, 15 tensors, flat, one output: ") for line in lines) == 4
    assert "measured nothing (without a device there is no device time)" in out
    assert "building ours, comparing it with eager" in err

    content = json.loads(path.read_text())
    assert content.keys() == {"versions", "device", "repeats", "suites"}
    assert content["versions"]["torch"] == torch.__version__
    assert content["device"] == "cpu"
    (suite,) = content["suites"]
    assert suite.keys() == {"name", "blocks", "targets"}
    assert [each["title"] for each in suite["blocks"]] == [
        f"15 tensors, {nesting}, {outputs}" for nesting in ("flat", "nested") for outputs in ("one output", "8 outputs")
    ]
    for each in suite["blocks"]:
        assert each.keys() == {"title", "baseline", "left_out", "ratios", "summary", "samples"}
        assert set(each["left_out"]) == set(CONTENDERS) - ON_CPU
        for measure in ("host", "queued"):
            assert each["summary"][measure].keys() == each["ratios"][measure].keys() == ON_CPU
            assert all(of.keys() == {"median", "low", "high"} for of in each["summary"][measure].values())
    assert len(suite["targets"]) == 4
    ElementTree.parse(plot)


def test_dit(setting):
    result = bench_dit.run(setting, steps=1)
    assert [block.title for block in result.blocks] == [
        "text encoder, one prompt",
        "teacher of 4 layers, 1 steps",
        "compute-bound, eight products of 64 rows",
    ]
    for block in result.blocks:
        assert block.left_out == {}
        assert {measure: set(of) for measure, of in block.samples.items()} == {
            "whole": {EAGER, BARE, LOOP, OURS},
            "host": {EAGER, BARE, LOOP, OURS},
        }
    (target,) = result.targets
    assert target.measured == result.blocks[1].ratio("whole", OURS, BARE)


def test_first_call(setting, monkeypatch):
    def missing(setting):
        raise ImportError("No module named 'diffusers'")

    monkeypatch.setattr(bench_first, "_teacher", missing)
    result = bench_first.run(setting)
    calls, steps = result.blocks
    assert set(calls.samples["whole"]) == {bench_first.EAGER, bench_first.FIRST, bench_first.REPLAY}
    assert set(steps.samples["step"]) == set(bench_first.STEPS)
    # All functions that are timed from outside must have been gone through.
    assert all(samples[0] > 0 for samples in steps.samples["step"].values())
    left_out, small = result.targets
    assert left_out.measured is None
    assert "left out: No module named 'diffusers'" in str(left_out)
    assert small.measured == calls.ratio("whole", bench_first.FIRST, bench_first.EAGER)


def test_timing_steps_leaves_the_library_as_it_was():
    import graphreplay.capture
    import graphreplay.road

    def found():
        return graphreplay.road.build_entry, graphreplay.capture.clone_static, graphreplay.capture.Entry

    before = found()
    with get_graphed_forward_cls("cpu")(Module(1).eval(), device="cpu") as graphed:
        with bench_first.steps_timed(graphed):
            assert all(ours is not theirs for ours, theirs in zip(found(), before, strict=True))
            graphed(x=torch.ones(2, 256))
        assert not {"_warmup_stream", "_sync_probe", "_capture_graph"} & vars(graphed).keys()
        assert graphed.stats()["captures"] == 1
    assert found() == before


def test_steps_add_up_to_the_call():
    build = {"build_entry": 80.0, bench_first.CLONE: 1.0, bench_first.PROBED: 20.0, bench_first.WARM_UP: 35.0}
    times = {**build, bench_first.CAPTURE: 30.0, bench_first.ENTRY: 2.0}
    steps = bench_first.divided(100.0, times)
    assert steps.keys() == set(bench_first.STEPS)
    assert sum(steps.values()) == 100
    assert steps[bench_first.WARM_UP] == 15
    assert steps[bench_first.CHECKS] == 12
    assert steps[bench_first.OWN] == 20


def test_memory(setting):
    result = bench_memory.run(setting)
    (block,) = result.blocks
    assert set(block.samples["reserved"]) == {bench_memory.OURS, bench_memory.NEEDED}
    assert {len(samples) for samples in block.samples["reserved"].values()} == {bench_memory.SHAPES}
    assert set(block.left_out) == {bench_memory.PRIVATE}
    assert result.targets[0].measured is None


def test_the_memory_target_is_about_all_shapes_together():
    samples = {bench_memory.OURS: [0.0, 6.0, 0.0], bench_memory.NEEDED: [2.0, 2.0, 1.0]}
    target = bench_memory.target(Block("", {"reserved": samples}, bench_memory.NEEDED), shares=True)
    assert target.measured == 1.2
    assert not target.met


# ------------------------------------------------------------------------------------------------- GPU


@pytest.mark.cuda
def test_a_short_run_on_a_gpu(capsys, tmp_path):
    path = tmp_path / "out.json"
    argv = ["--suite", "call", "--counts", "15", "--repeats", "3", "--json", str(path)]
    assert bench.main(argv) == 0
    suite = json.loads(path.read_text())["suites"][0]
    for each in suite["blocks"]:
        assert {EAGER, BARE, LOOP, SEED, OURS} <= each["summary"]["device"].keys()
    assert all(target["measured"] for target in suite["targets"])


@pytest.mark.cuda
def test_memory_on_a_gpu(capsys):
    assert bench.main(["--suite", "memory"]) == 0
    assert bench_memory.PRIVATE in capsys.readouterr().out
