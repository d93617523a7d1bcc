"""What the package calls of torch.xpu is there, and takes the arguments that it is given; so is what is emulated.

The list of uses is read from the package's own source, see torch_uses.py.
"""

import inspect
from pathlib import Path

import pytest
import torch
import xpu_emulation
from torch_uses import CLASSES, Source, Use, check

import graphreplay_xpu

SOURCE = Source(path.read_text() for path in sorted(Path(graphreplay_xpu.__file__).parent.glob("*.py")))


def test_every_owner_is_clear():
    assert SOURCE.unclear == []


def test_the_list_is_not_missing_what_matters():
    names = {(use.owner, use.name) for use in SOURCE.uses}
    assert {
        ("torch.xpu", "XPUGraph"),
        ("torch.xpu.XPUGraph", "capture_begin"),
        ("torch.xpu.XPUGraph", "capture_end"),
        ("torch.xpu.XPUGraph", "replay"),
        ("torch.xpu.XPUGraph", "reset"),
        ("torch.xpu.Stream", "wait_stream"),
        ("torch.xpu.Event", "record"),
        ("torch.xpu.Event", "synchronize"),
        ("torch.xpu", "current_stream"),
        ("torch._C", "_xpu_endAllocateToPool"),
    } <= names
    assert Use("torch.xpu.XPUGraph", "capture_begin", True, 0, ("pool",)) in SOURCE.uses


@pytest.mark.parametrize("use", sorted(SOURCE.uses, key=str), ids=str)
def test_torch_has_it(use):
    check(use)


def test_nothing_waits_for_the_device_or_is_of_cuda():
    forbidden = {("torch.xpu", name) for name in ("synchronize", "empty_cache", "graph", "make_graphed_callables")}
    assert {(use.owner, use.name) for use in SOURCE.uses} & forbidden == set()
    assert [use for use in SOURCE.uses if use.owner == "torch.cuda"] == []


@pytest.mark.parametrize(
    "code",
    [
        "torch.xpu.current_streams()",
        "torch.xpu.current_stream(index=0)",
        "torch.xpu.graph_pool_handle(0)",
        "torch.xpu.Stream(0, 0, 0)",
        "torch.xpu.XPUGraph(mode='relaxed')",
        "torch.xpu.XPUGraph().capture_begin(capture_error_mode='relaxed')",
        "graph = torch.xpu.XPUGraph()\ngraph.capture_begin(None, None)",
        "graph = torch.xpu.XPUGraph()\nif graph:\n    graph.launch()",
        "def f(event: torch.xpu.Event | None):\n    event.record(None, None)",
        "class A:\n def __init__(self):\n  self.e = torch.xpu.Event()\n def f(self):\n  self.e.wait(1, 2)",
        "torch.xpu.current_stream().wait_stream()",
        "torch._C._xpu_releasePool(0)",
        "torch._C._xpu_releasePools(0, 0)",
    ],
)
def test_a_wrong_use_is_found(code):
    source = Source([code])
    assert source.uses
    with pytest.raises((AssertionError, TypeError)):
        for use in source.uses:
            check(use)


@pytest.mark.parametrize(
    ("code", "unclear"),
    [
        ("def f(graph):\n    graph.capture_begin()", "graph.capture_begin"),
        ("xpu = torch.xpu\nxpu.synchronize()", "torch.xpu"),
        ("getattr(torch.xpu, name)()", "torch.xpu"),
        ("from torch.xpu import synchronize", "from torch.xpu import synchronize"),
        ("from torch import Tensor, xpu", "xpu"),
        ("import torch as t", "torch"),
    ],
)
def test_a_use_that_cannot_be_told_is_found(code, unclear):
    assert unclear in Source([code]).unclear


def _parameters(function):
    return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values() if p.name != "self"]


def _callable(owner):
    return (owner.__new__ if "__new__" in vars(owner) else owner.__init__) if inspect.isclass(owner) else owner


@pytest.mark.parametrize("stand_in", xpu_emulation.EMULATED, ids=lambda stand_in: stand_in.__name__)
def test_the_emulation_takes_the_arguments_that_torch_takes(stand_in):
    real = getattr(torch.xpu, stand_in.__name__)
    own, theirs = (
        [parameter for parameter in _parameters(_callable(target)) if parameter[0] != "cls"]
        for target in (stand_in, real)
    )
    assert own == theirs
    methods = [name for name in vars(stand_in) if not name.startswith("_") and name not in ("work", "queue")]
    if f"torch.xpu.{stand_in.__name__}" in CLASSES:
        assert methods
        for name in methods:
            assert _parameters(getattr(stand_in, name)) == _parameters(getattr(real, name)), name
        used = {use.name for use in SOURCE.uses if use.owner == f"torch.xpu.{stand_in.__name__}"}
        assert used <= set(methods)


def test_whatever_is_used_is_emulated():
    known = {stand_in.__name__ for stand_in in xpu_emulation.EMULATED} | set(xpu_emulation.EMULATED_IN_C)
    assert {use.name for use in SOURCE.uses if use.owner in ("torch.xpu", "torch._C")} <= known
