"""The code in the README and in docs/ runs on a CPU, and prints what it says."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "prints"), [("README.md", 0), ("docs/serving.md", 3)])
def test_the_code_runs_and_prints_what_it_says(capsys, monkeypatch, page, prints):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    names = {"__name__": "documentation"}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    said = re.findall(r"^ *print\(.*\)  # (.*)$", "\n".join(blocks), re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()
    assert blocks
    assert len(said) == prints
    if prints:  # the README's print what differs from run to run
        assert printed == said


def test_what_is_said_of_pipelines(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (setup, _, adapter, *_) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/serving.md").read_text(), re.DOTALL | re.MULTILINE
    )
    names = {"__name__": "documentation"}
    exec(setup + "net = Net().eval()\n" + adapter, names)
    net, graphed, x, t = (names[name] for name in ("net", "graphed", "x", "t"))
    forward = names["by_name"](graphed)
    with torch.inference_mode():
        assert torch.equal(forward(x, t), net(x, t))
        assert torch.equal(forward(x, t, bias=t), net(x, t, t))
        with pytest.raises(ValueError, match="argument 2 is longer"):
            forward(x, t, None, x)
        with pytest.raises(TypeError, match="multiple values for keyword argument 'x'"):
            forward(x, x=x)
    with pytest.raises(TypeError, match="cannot assign"):
        torch.nn.Sequential(net)[0] = graphed


def test_what_is_said_of_lent_outputs():
    from graphreplay import get_graphed_forward_cls

    graphed = get_graphed_forward_cls("cpu")(torch.nn.Linear(8, 8), device="cpu", clone_outputs=False)
    with torch.inference_mode():
        graphed.prepare(input=torch.randn(1, 8))
        c, u = graphed(input=torch.randn(1, 8)), graphed(input=torch.randn(1, 8))
    assert torch.equal(c - u, torch.zeros(1, 8))
