"""The benchmark of staged inputs: its arithmetic, its order, its clocks and its text; and, on a GPU, a short run."""

import gc
import json
import re

import pytest
import torch

from graphreplay_harness import bench_clock, bench_report, bench_staging
from graphreplay_harness.bench_clock import interleave
from graphreplay_harness.bench_contenders import Contender, make_forward
from graphreplay_harness.bench_report import BARE, CONTENDERS, COPY, LAUNCH, NOTHING, Result, Spread, spread

CPU = torch.device("cpu")
NBYTES = 15 * 64 * 256 * 2


@pytest.fixture
def samples():
    """A bare replay takes 4 µs of the host and 30 of the device, a launch 8 and 33, the copy 9 and 2; the rest 100."""
    medians = {"host": {BARE: 4, LAUNCH: 8, COPY: 9}, "device": {BARE: 30, LAUNCH: 33, COPY: 2}, "queued": {}}
    return {
        measure: {name: [m - 1.0, m + 3.0, float(m)] for name in CONTENDERS for m in [known.get(name, 100)]}
        for measure, known in medians.items()
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([5.0], (5, 5, 5)),
        ([4.0, 2.0], (3, 2.5, 3.5)),
        ([1.0, 2.0, 3.0, 4.0, 1000.0], (3, 2, 4)),
        (list(range(101)), (50, 25, 75)),
    ],
)
def test_median_and_quartiles(given, expected):
    assert spread(given) == Spread(*expected)


def test_a_launch_is_judged_by_medians(samples):
    verdict = Result.of(15, NBYTES, samples).verdict
    assert verdict.host_ratio == 2
    assert verdict.device_extra_us == 3
    assert verdict.copy_us == 2
    assert verdict.bandwidth_gb_s == pytest.approx(2 * NBYTES / 2e-6 / 1e9)
    assert verdict.device_us == 33
    assert verdict.device_limit_us == pytest.approx(1.05 * 30 + 2)


def test_report_has_ratios_then_tables_then_the_target(samples):
    lines = bench_report.report([Result.of(1, NBYTES // 15, samples), Result.of(15, NBYTES, samples)]).splitlines()
    assert lines[1] == "1 input: host 2.00 times, device +3.00 us; the bytes' own time 2.00 us (33 GB/s)"
    assert lines[2] == "15 inputs: host 2.00 times, device +3.00 us; the bytes' own time 2.00 us (492 GB/s)"
    assert lines[4] == "1 input, 0.03 MiB"
    table = lines[lines.index("15 inputs, 0.47 MiB") + 1 : -3]
    assert table[0].endswith("  device us (quartiles)     back to back us (quartiles)")
    assert [re.split(r"  +", row)[0] for row in table[1:]] == list(CONTENDERS)
    row = re.split(r"  +", table[1 + CONTENDERS.index(LAUNCH)])
    assert row[1:] == ["8.00 (7.50 to 9.50)", "33.00 (32.50 to 34.50)", "100.00 (99.50 to 101.50)"]
    assert len({len(row) for row in table}) == 1
    assert lines[-3:] == [
        "",
        "host: 2.00 times bare replay (target 2.2)",
        "device: 33.00 us against 1.05 * bare + copy alone = 33.50 us",
    ]


def test_no_target_without_its_number_of_inputs(samples):
    assert "target" not in bench_report.report([Result.of(4, NBYTES, samples)])


def test_json_holds_every_number(samples):
    samples["host"][BARE][0] = 2.00049
    result = json.loads(json.dumps(Result.of(15, NBYTES, samples).as_json()))
    assert result.keys() == {"inputs", "nbytes", "samples", "summary", "verdict"}
    assert result["samples"]["host"][BARE] == [2.0, 7, 4]
    assert result["samples"]["device"] == samples["device"]
    assert result["summary"]["device"][LAUNCH] == {"median": 33, "low": 32.5, "high": 34.5}
    assert result["verdict"]["host_ratio"] == 2


def test_every_contender_is_sampled_once_in_each_repeat():
    seen = []

    def sample(name, repeat):
        assert not gc.isenabled()
        seen.append((repeat, name))
        return float(len(seen))

    samples = interleave("abcd", 20, sample)
    assert gc.isenabled()
    assert [repeat for repeat, _ in seen] == [repeat for repeat in range(20) for _ in range(4)]
    rounds = [tuple(name for _, name in seen[start : start + 4]) for start in range(0, 80, 4)]
    assert {frozenset(each) for each in rounds} == {frozenset("abcd")}
    assert len(set(rounds)) > 5
    assert samples["b"] == [1.0 + i for i, (_, name) in enumerate(seen) if name == "b"]


def test_the_device_is_kept_busy_until_the_call_has_returned(monkeypatch):
    slept, calls = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(calls)

        def query(self):
            return slept[-1] < 700_000  # the device was through before the call was

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return (end.at - self.at) * 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    assert bench_clock.device_us(calls.append, "x") == 250
    assert slept == [200_000, 400_000, 800_000]
    assert calls == ["x"] * 3
    monkeypatch.setattr(Event, "query", lambda self: True)
    with pytest.raises(RuntimeError, match="waits for the device"):
        bench_clock.device_us(calls.append, "x")


def test_calls_back_to_back_take_their_inputs_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = []
    assert bench_clock.queued_us(calls.append, ["a", "b", "c"], 7) > 0
    assert "".join(calls) == "abcabca"
    assert bench_clock.host_us(calls.append, "def") > 0
    assert "".join(calls[7:]) == "fdef"


def test_the_forward_sums_its_inputs_and_stays_within_bounds():
    forward = make_forward(CPU)
    inputs = [torch.randn(64, 256).bfloat16() for _ in range(3)]
    y = forward(inputs)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, forward([inputs[0] + inputs[1], inputs[2]]))
    assert 0.1 < y.float().std() < 10


def test_a_contender_with_stale_inputs_fails():
    lists = [[torch.randn(64, 256).bfloat16() for _ in range(2)] for _ in range(4)]
    forward = make_forward(CPU)

    def contender(name, copied, stages=True):
        statics = [torch.zeros_like(x) for x in lists[0]]
        output = forward(statics)

        def call(inputs):
            for static, x in zip(statics[:copied], inputs, strict=False):
                static.copy_(x)
            output.copy_(forward(statics))

        return Contender(name, call, statics, output, stages)

    nothing = Contender(NOTHING, lambda inputs: None, [], None, False)
    bench_staging.check([contender("all", 2), contender("bare", 0, stages=False), nothing], forward, lists)
    with pytest.raises(bench_staging.WrongResult, match=r"^one, 2 inputs: 4 of 4 results differ"):
        bench_staging.check([contender("all", 2), contender("one", 1)], forward, lists)


def test_a_wrong_result_is_exit_code_1(capsys, monkeypatch):
    def wrong(*_):
        raise bench_staging.WrongResult("copy_ each, replay, 4 inputs: 1 of 8 results differ")

    monkeypatch.setattr(bench_staging, "has_device", lambda prog: True)
    monkeypatch.setattr(bench_staging, "make_forward", lambda device: None)
    monkeypatch.setattr(bench_staging, "compare", wrong)
    assert bench_staging.main(["--counts", "4"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "FAILED: copy_ each, replay, 4 inputs: 1 of 8 results differ\n"


def test_without_a_device_it_is_one_line_and_exit_code_2(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_staging.main(["--json", str(tmp_path / "out.json")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "graphreplay bench_staging: this benchmark needs a CUDA device, and PyTorch finds none\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--counts", "0"], "'0' is not a whole number from 1 on"),
        (["--counts"], "expected at least one argument"),
        (["--repeats", "-3"], "'-3' is not"),
        (["--json", "no/such/folder/out.json"], "cannot write no/such/folder/out.json"),
    ],
)
def test_bad_options_are_exit_code_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as raised:
        bench_staging.main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.cuda
def test_a_short_run(capsys, tmp_path):
    path = tmp_path / "out.json"
    assert bench_staging.main(["--counts", "1", "15", "--repeats", "3", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "FAILED" not in err
    assert re.search(r"^host: [\d.]+ times bare replay \(target 2\.2\)$", out, re.MULTILINE)
    content = json.loads(path.read_text())
    assert content.keys() == {"versions", "repeats", "shape", "layers", "results"}
    assert content["versions"].keys() == {"torch", "cuda", "device", "python", "graphreplay-cuda"}
    assert [result["inputs"] for result in content["results"]] == [1, 15]
    for result in content["results"]:
        assert result["nbytes"] == result["inputs"] * 64 * 256 * 2
        assert result["samples"].keys() == result["summary"].keys() == {"host", "device", "queued"}
        for measure, repeats in (("host", 3), ("device", 3), ("queued", 1)):
            assert tuple(result["samples"][measure]) == CONTENDERS
            assert {len(each) for each in result["samples"][measure].values()} == {repeats}
        assert all(value > 0 for value in (result["verdict"][key] for key in ("host_ratio", "device_us", "copy_us")))
