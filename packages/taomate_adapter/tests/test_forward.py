"""GraphedForward under TaoMate's arguments: which class it becomes, and what it does where nothing can capture."""

import inspect
import logging
import subprocess
import sys
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import graphreplay
import graphreplay_taomate
from graphreplay import registry
from graphreplay_taomate import GraphedForward, capture_context, get_graphed_forward_cls

NOT_INSTALLED = (
    "which is not installed; install it from where graphreplay-core came (in a clone: pip install ./packages"
)


class Scaled(nn.Module):
    def forward(self, *, x):
        return x * 2


@pytest.fixture
def backends(monkeypatch):
    """Makes these entry points, by device type, all that are installed."""

    def make(**targets):
        entries = [
            EntryPoint(name, target, registry.GROUP)
            if isinstance(target, str)
            else SimpleNamespace(name=name, load=lambda target=target: target)
            for name, target in targets.items()
        ]
        monkeypatch.setattr(registry, "entry_points", lambda group: entries)

    return make


class ForMeta(graphreplay.GraphedForward):
    """A backend for a device that every machine has."""

    @classmethod
    def resolve_device(cls, device):
        return torch.device(device.type)

    def _graphs_supported(self):
        return None


class Gone(graphreplay.GraphedForward):
    @classmethod
    def resolve_device(cls, device):
        raise graphreplay.BackendUnavailableError(f"no driver for {device}")


def test_arguments_in_taomates_order_and_with_its_defaults():
    parameters = inspect.signature(GraphedForward).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert next(iter(parameters)) == "module"
    assert list(defaults.items())[1:7] == [
        ("max_entries", 16),
        ("warmup_iters", 2),
        ("group", None),
        ("name", None),
        ("enabled", True),
        ("capture_context", None),
    ]
    assert next(iter(defaults)) == "device"
    assert defaults["device"] is inspect.Parameter.empty


def test_on_a_cpu_calls_are_plain_forwards(caplog):
    graphed = GraphedForward(Scaled(), device="cpu", name="teacher")
    assert isinstance(graphed, GraphedForward)
    assert isinstance(graphed, graphreplay.GraphedForward)
    assert not isinstance(graphed, graphreplay.ReferenceGraphedForward)
    assert caplog.text == ""  # nothing is amiss
    result = graphed(variant=("teacher", "lora_off"), keep_alive=(object(),), pin=True, x=torch.ones(3))
    assert torch.equal(result, torch.full((3,), 2.0))
    assert not graphed.enabled
    assert graphed.disabled_reason == (
        "a CPU replays no faster than it runs eagerly; reference=True captures there all the same"
    )
    stats = graphed.stats()
    documented = ("graphs", "pinned", "captures", "replays", "evictions", "eager_calls")
    assert [stats[key] for key in documented] == [0, 0, 0, 0, 0, 1]
    assert graphed.captures == graphed.num_graphs == 0


@torch.inference_mode()
def test_the_reference_backend_on_request():
    with GraphedForward(Scaled(), device="cpu", reference=True, max_entries=1, name="teacher") as graphed:
        assert isinstance(graphed, GraphedForward)
        assert isinstance(graphed, graphreplay.ReferenceGraphedForward)
        for _ in range(3):
            assert torch.equal(graphed(x=torch.ones(3)), torch.full((3,), 2.0))
        graphed(pin=True, x=torch.ones(4))
        stats = graphed.stats()
        assert (stats["captures"], stats["replays"], stats["evictions"], stats["pinned"]) == (2, 2, 1, 1)
        assert graphed.enabled
        assert repr(graphed) == "<GraphedForward[ReferenceGraphedForward] teacher on cpu: 1 graphs>"
        graphed.disable("TaoMate says so")
        assert (graphed.enabled, graphed.disabled_reason) == (False, "TaoMate says so")
    with pytest.raises(graphreplay.ClosedError):
        graphed(x=torch.ones(3))


def test_the_same_class_each_time():
    made = [GraphedForward(Scaled(), device="cpu", reference=True) for _ in range(2)]
    assert type(made[0]) is type(made[1])
    assert type(made[0]) is not GraphedForward


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize(
    "argument",
    [
        {"max_entries": 0},
        {"max_entries": -1},
        {"warmup_iters": 0},
        {"capture_context": 3},
        {"pool": 3},
        {"check_module": None},
        {"clone_outputs": 1},
    ],
    ids=str,
)
def test_bad_arguments(reference, argument):
    with pytest.raises(ValueError, match=next(iter(argument))) as caught:
        GraphedForward(Scaled(), device="cpu", reference=reference, **argument)
    assert isinstance(caught.value, graphreplay.ConfigurationError)


def test_other_arguments_of_the_core():
    pool = graphreplay.GraphPool()
    assert GraphedForward(Scaled(), device="cpu", reference=True, pool=pool).pool is pool
    with pytest.raises(TypeError, match="max_graphs"):
        GraphedForward(Scaled(), device="cpu", max_graphs=3)


def test_lent_outputs_and_unchecked_modules():
    linear = nn.Linear(4, 4)
    graphed = GraphedForward(linear, device="cpu", reference=True, clone_outputs=False, check_module=False)
    with torch.inference_mode():
        y = wanted = torch.ones(2, 4)
        addresses = []
        for _ in range(4):
            y, wanted = graphed(input=y), linear(wanted)
            assert torch.equal(y, wanted)
            addresses.append(y.data_ptr())
        assert len(set(addresses[1:])) == 1, "the memory of the graph"
        before = linear(torch.ones(2, 4))
        linear.bias.data = linear.bias.data + 1
        assert torch.equal(graphed(input=torch.ones(2, 4)), before)
        graphed.reset()
        for _ in range(2):
            assert torch.equal(graphed(input=torch.ones(2, 4)), linear(torch.ones(2, 4)))
    assert graphed.captures == 2
    plain = GraphedForward(linear, device="cpu", clone_outputs=False, check_module=False)
    with torch.inference_mode():
        assert torch.equal(plain(input=torch.ones(2, 4)), linear(torch.ones(2, 4)))


def test_turned_off_by_argument_or_environment(monkeypatch):
    off = GraphedForward(Scaled(), device="cpu", reference=True, enabled=False)
    assert off.disabled_reason == "built with enabled=False"
    monkeypatch.setenv("GRAPHREPLAY_DISABLE", "1")
    off = GraphedForward(Scaled(), device="cpu", reference=True)
    assert off.disabled_reason == "the environment variable GRAPHREPLAY_DISABLE is set"


@torch.inference_mode()
def test_a_context_of_ones_own_surrounds_the_bypass():
    module, order = Scaled(), []
    module.adaln_cache = SimpleNamespace(max_bytes=5)

    @contextmanager
    def own():
        order.append(("in", module.adaln_cache.max_bytes))
        module.adaln_cache = SimpleNamespace(max_bytes=9)  # the one to be bypassed
        yield
        order.append(("out", module.adaln_cache.max_bytes))

    module.forward = lambda *, x: (order.append(("forward", module.adaln_cache.max_bytes)), x * 2)[1]
    graphed = GraphedForward(module, device="cpu", reference=True, capture_context=own, warmup_iters=1)
    graphed(x=torch.ones(2))
    assert order == [("forward", 5), ("in", 5), ("forward", 0), ("forward", 0), ("out", 9)]
    assert graphed.captures == 1


def test_the_backend_of_the_device(backends):
    backends(meta=ForMeta)
    graphed = GraphedForward(Scaled(), device="meta:0", reference=True)  # which is about CPUs alone
    assert isinstance(graphed, GraphedForward)
    assert isinstance(graphed, ForMeta)
    assert graphed.enabled
    assert graphed.device == torch.device("meta")


def test_hooks_of_a_subclass_count(backends):
    class OfTaoMate(GraphedForward):
        def _graphs_supported(self):
            return "says TaoMate"

    backends(meta=ForMeta)
    graphed = OfTaoMate(Scaled(), device="meta")
    assert isinstance(graphed, OfTaoMate)
    assert isinstance(graphed, ForMeta)
    assert graphed.disabled_reason == "says TaoMate"

    class Both(GraphedForward, ForMeta):
        pass

    assert type(Both(Scaled(), device="meta")) is Both


@pytest.mark.parametrize(
    ("installed", "device", "reason"),
    [
        ({}, "cuda", f"device cuda needs graphreplay-cuda, {NOT_INSTALLED}/cuda)"),
        ({}, "xpu:1", f"device xpu:1 needs graphreplay-xpu, {NOT_INSTALLED}/xpu)"),
        ({}, "meta", "no graphreplay backend for device type 'meta'; there are cpu, cuda, xpu"),
        ({"meta": "not_there:Class"}, "meta", "the backend for meta cannot be imported: No module named 'not_there'"),
    ],
)
def test_without_a_backend_calls_are_plain_forwards_and_say_so(caplog, backends, installed, device, reason):
    backends(**installed)
    with caplog.at_level(logging.WARNING, "graphreplay"):
        graphed = GraphedForward(Scaled(), device=device, name="teacher")
    assert caplog.messages == [f"teacher captures no graphs: {reason}"]
    assert (graphed.enabled, graphed.disabled_reason) == (False, reason)
    assert isinstance(graphed, GraphedForward)
    assert torch.equal(graphed(x=torch.ones(2)), torch.full((2,), 2.0))
    assert graphed.stats()["eager_reasons"] == {reason: 1}


@pytest.mark.parametrize("turned_off", ["by argument", "by environment"])
def test_no_warning_where_graphs_are_not_wanted(caplog, backends, monkeypatch, turned_off):
    backends()
    if turned_off == "by environment":
        monkeypatch.setenv("GRAPHREPLAY_DISABLE", "1")
    with caplog.at_level(logging.WARNING, "graphreplay"):
        graphed = GraphedForward(Scaled(), device="cuda", enabled=turned_off != "by argument")
    assert not graphed.enabled
    assert "graphreplay-cuda" not in graphed.disabled_reason
    assert caplog.messages == []


def test_a_device_that_is_not_there_is_an_error(backends):
    backends(meta=Gone)
    with pytest.raises(graphreplay.BackendUnavailableError, match="no driver for meta"):
        GraphedForward(Scaled(), device="meta")
    with pytest.raises(graphreplay.UnknownDeviceError, match="'gpu' is no device"):
        GraphedForward(Scaled(), device="gpu")


def test_the_platform_hook_answers_the_class():
    cls = get_graphed_forward_cls()
    assert cls is GraphedForward
    assert not cls(Scaled(), device=torch.device("cpu")).enabled


def test_the_cores_functions_under_taomates_names():
    static = graphreplay_taomate.clone_static({"x": torch.zeros(2)})
    assert graphreplay_taomate.copy_into(static, {"x": torch.ones(2)}) == 1
    assert graphreplay_taomate.kwargs_signature(static) == graphreplay_taomate.kwargs_signature({"x": torch.ones(2)})
    assert graphreplay_taomate.__all__ == sorted(graphreplay_taomate.__all__)


def test_importing_it_imports_no_vllm_and_no_backend():
    code = (
        "import sys, graphreplay_taomate as t\n"
        "t.GraphedForward(print, device='cpu')\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(roots & {'vllm', 'vllm_omni', 'graphreplay_cuda', 'graphreplay_xpu', 'graphreplay', 'torch'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "['graphreplay', 'torch']\n"


@pytest.mark.cuda
@torch.inference_mode()
def test_on_a_gpu():
    from graphreplay_cuda import CUDAGraphedForward

    linear = nn.Linear(16, 16, device="cuda")
    linear.adaln_cache = SimpleNamespace(max_bytes=5)
    graphed = GraphedForward(linear, device="cuda")
    assert isinstance(graphed, GraphedForward)
    assert isinstance(graphed, CUDAGraphedForward)
    for _ in range(3):
        x = torch.randn(4, 16, device="cuda")
        torch.testing.assert_close(graphed(input=x), linear(x))
    assert (graphed.captures, graphed.stats()["replays"]) == (1, 2)
    assert linear.adaln_cache.max_bytes == 5
    with capture_context(linear):
        assert linear.adaln_cache.max_bytes == 0
