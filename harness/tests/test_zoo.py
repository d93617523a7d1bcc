"""The zoo on the CPU: each model as declared, the page that lists them, and that faults are found."""

import json
import logging
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from graphreplay import GraphedForward, ReferenceGraphedForward
from graphreplay_harness import zoo, zoo_visit
from graphreplay_harness.zoo_compare import differences
from graphreplay_harness.zoo_model import Model
from graphreplay_harness.zoo_models import MODELS
from graphreplay_harness.zoo_report import markdown
from graphreplay_harness.zoo_visit import Outcome, visit

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def graphs_on(monkeypatch):
    monkeypatch.delenv("GRAPHREPLAY_DISABLE", raising=False)


@pytest.fixture
def use_class(monkeypatch):
    """Has the zoo graph its forwards with another class."""
    return lambda cls: monkeypatch.setattr(zoo_visit, "get_graphed_forward_cls", lambda device: cls)


def linear(**changes):
    model = Model(
        "linear",
        "torch Linear",
        lambda: nn.Linear(4, 4),
        lambda batch: {"input": torch.randn(batch, 4)},
        ((1,), (2,)),
    )
    return replace(model, **changes)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_model_is_as_declared_and_equals_eager(name):
    outcome = visit(MODELS[name], CPU)
    if outcome.outcome == "skipped":
        pytest.skip(outcome.reason)
    assert outcome.faults == []
    assert outcome.equal


def test_page_lists_these_models_with_these_outcomes():
    declared = [Outcome(model, model.expected("cpu")) for model in MODELS.values()]
    assert PAGE.read_text(encoding="utf-8") == markdown(declared)


def test_names_are_unique_and_every_eager_one_is_explained():
    assert all(name == model.name for name, model in MODELS.items())
    assert all(model.note for model in MODELS.values() if model.eager)
    assert all(len(set(model.shapes)) >= 2 for model in MODELS.values())


def test_a_replay_that_is_off_by_one_bit_is_a_fault(use_class):
    class Off(ReferenceGraphedForward):
        def __call__(self, **kwargs):
            result = super().__call__(**kwargs)
            return result.nextafter(torch.tensor(torch.inf)) if self.stats()["replays"] else result

    use_class(Off)
    outcome = visit(linear(), CPU)
    assert not outcome.equal
    assert [fault.split(" is off")[0] for fault in outcome.faults] == [
        f"call {number}, of {shape}: result" for number, shape in [(3, (1,)), (4, (2,)), (5, (1,)), (6, (2,))]
    ]


def test_a_buffer_that_replays_do_not_write_is_a_fault(use_class):
    class Plain(ReferenceGraphedForward):
        def __call__(self, **kwargs):
            result = super().__call__(**kwargs)
            self.module[1].running_mean.zero_()
            return result

    use_class(Plain)
    model = linear(build=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), shapes=((2,), (3,)), training=True)
    (fault,) = visit(model, CPU).faults
    assert fault.startswith("afterwards, buffer['1.running_mean'] is off by up to ")


def test_an_outcome_that_is_not_declared_is_a_fault(use_class):
    assert visit(linear(), CPU).faults == []
    assert visit(linear(eager="waits"), CPU).faults == ["graphed and not eager, as declared: "]
    use_class(GraphedForward)
    (fault,) = visit(linear(), CPU).faults
    assert fault.startswith("eager and not graphed, as declared: no backend serves")
    (fault,) = visit(linear(eager="waits"), CPU).faults
    assert fault.startswith("eager for another reason than 'waits': no backend serves")


def test_graphs_that_are_captured_again_are_mixed(use_class):
    class Forgetful(ReferenceGraphedForward):
        def __call__(self, **kwargs):
            self.reset()
            return super().__call__(**kwargs)

    use_class(Forgetful)
    outcome = visit(linear(), CPU)
    assert (outcome.outcome, outcome.captures, outcome.equal) == ("mixed", 6, True)
    assert outcome.faults == ["mixed and not graphed, as declared: "]


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        (lambda batch: {"input": torch.ones(batch, 4)}, "eager's result is the same for other inputs"),
        (lambda batch: {"input": torch.randn(batch, 4) / 0}, "result is not finite"),
    ],
)
def test_inputs_that_would_hide_a_wrong_result_are_a_fault(inputs, what):
    outcome = visit(linear(inputs=inputs), CPU)
    assert outcome.equal
    assert any(fault.endswith(what) for fault in outcome.faults)


def test_a_visit_leaves_the_generators_as_they_were():
    before = torch.get_rng_state()
    visit(linear(), CPU)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("got", "wanted", "what"),
    [
        ({"a": torch.ones(2)}, OrderedDict(a=torch.ones(2)), "is <class 'dict'> and not"),
        ([torch.ones(2), 1], [torch.ones(2), 2], "[1] is 1 and not 2"),
        ((torch.ones(2),), (torch.ones(2), 1), "is where eager has [1]"),
        ({"a": [torch.ones(2)]}, {"a": [torch.ones(3)]}, "['a'][0] has shape torch.Size([2]) and not"),
        (torch.tensor(0.0), torch.tensor(-0.0), "is off by up to 0;"),
        (torch.ones(2), torch.ones(2).double(), "has dtype torch.float32 and not torch.float64"),
        (torch.ones(2), None, "is tensor("),
        (nn.Identity(), nn.Flatten(), "is <class"),
    ],
)
def test_differences_in_containers_and_leaves(got, wanted, what):
    assert not list(differences(wanted, wanted, CPU))
    assert what in next(differences(got, wanted, CPU))


def test_rounding_is_allowed_on_a_gpu_alone():
    one, other = torch.tensor([1.0, 8.0]), torch.tensor([1.00001, 8.0])
    assert list(differences(one, other, CPU))
    assert not list(differences(one, other, torch.device("cuda")))
    assert list(differences(one, other + 0.01, torch.device("cuda")))


def test_command_line(capsys, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.ERROR, "graphreplay")
    models = {
        "linear": linear(),
        "gone": linear(name="gone", build=lambda: __import__("no_such_library"), eager="waits", note="it waits"),
        "broken": linear(name="broken", inputs=lambda batch: {"input": torch.randn(batch, 5)}),
    }
    monkeypatch.setattr(zoo, "MODELS", models)
    assert zoo.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(models)

    assert zoo.main(["--model", "linear", "gone", "--json", str(tmp_path / "zoo.json")]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[:5] for line in out.splitlines()[1:]] == [
        ["linear", "graphed", "2", "4", "yes"],
        ["gone", "skipped", "-", "-", "-"],
    ]
    assert "No module named 'no_such_library'" in out
    assert "1 of 2: linear" in err
    written = json.loads((tmp_path / "zoo.json").read_text())
    assert [each["outcome"] for each in written["models"]] == ["graphed", "skipped"]

    assert zoo.main(["--markdown", str(tmp_path / "models.md")]) == 1
    out, err = capsys.readouterr()
    assert "    FAULT: RuntimeError: mat1 and mat2 shapes cannot be multiplied" in out
    assert "Traceback" in err
    rows = (tmp_path / "models.md").read_text().splitlines()[-3:]
    assert rows[0] == "| linear | torch Linear | graphed | |"
    assert rows[1] == "| gone | torch Linear | eager | it waits |"
    assert "| failed |" in rows[2]


@pytest.mark.parametrize(
    "arguments",
    [["--model", "no-such"], ["--device", "tpu"], ["--json", "no/such/file"], ["--model", "bert", "--markdown", "x"]],
)
def test_bad_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        zoo.main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err
