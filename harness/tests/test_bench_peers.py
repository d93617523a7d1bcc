"""What the benchmark compares: results of all contenders, and graphs made by hand."""

import math

import pytest
import torch
from torch import nn

from graphreplay_harness import bench_call, bench_peers
from graphreplay_harness.bench_call import Case, Module, make_kwargs
from graphreplay_harness.bench_handmade import Call, SeedStyleWrapper, capture, cloned, leaves
from graphreplay_harness.bench_peers import BARE, CONTENDERS, EAGER, LOOP, OURS, OURS_ALL, SEED

CPU = torch.device("cpu")
ON_CPU = {EAGER, BARE, LOOP, SEED, *OURS_ALL}


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def small_calls(case, count=2):
    return [Call.of(make_kwargs(case, CPU, torch.float32)) for _ in range(count)]


@pytest.mark.parametrize("case", [Case(1, False, 1), Case(4, True, 8), Case(15, True, 1)], ids=str)
def test_contenders_agree_with_eager(case):
    module = Module(case.outputs).eval().requires_grad_(False)
    calls = small_calls(case)
    ready, left_out = bench_peers.make_all(CONTENDERS, module, calls, CPU, lambda what: None)
    assert set(ready) == ON_CPU
    assert set(left_out.values()) == {"it needs a CUDA device"}
    for call in calls:
        right = leaves(module(**call.kwargs))
        assert len(right) == case.outputs
        for contender in ready.values():
            contender.stage(call)
            mine = leaves(contender.call(call))
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(mine, right, strict=True))
    for contender in ready.values():
        contender.close()


def test_a_wrong_contender_is_left_out(monkeypatch):
    def stale(forward, example, device):
        return bench_peers.Contender(lambda call: forward(**example.kwargs))

    monkeypatch.setitem(bench_peers._MAKERS, SEED, stale)
    calls = small_calls(Case(1, False, 1))
    ready, left_out = bench_peers.make_all([EAGER, SEED], Module(1).eval(), calls, CPU, lambda what: None)
    assert list(ready) == [EAGER]
    assert left_out == {SEED: "1 of the results of 2 calls differ from the eager ones"}


def test_what_frees_workspaces_is_built_before_all_graphs(monkeypatch):
    built = []

    def make(name, forward, example, device):
        built.append(name)
        return bench_peers.Contender(lambda call: forward(**call.kwargs))

    monkeypatch.setattr(bench_peers, "make", make)
    calls = small_calls(Case(1, False, 1))
    ready, left_out = bench_peers.make_all(CONTENDERS, Module(1).eval(), calls, CPU, lambda what: None)
    assert built[:2] == list(bench_peers.BUILT_FIRST)
    assert tuple(ready) == CONTENDERS
    assert left_out == {}


def test_ours_is_left_out_where_it_would_run_eagerly(monkeypatch):
    monkeypatch.setenv("GRAPHREPLAY_DISABLE", "1")
    ready, left_out = bench_peers.make_all(
        [OURS], Module(1).eval(), small_calls(Case(1, False, 1)), CPU, lambda what: None
    )
    assert ready == {}
    assert left_out[OURS].startswith("it runs eagerly: the environment variable GRAPHREPLAY_DISABLE")


def test_rounding_is_no_difference_where_kernels_may_differ():
    right = torch.tensor([1.0, -100.0])
    assert bench_peers.same(right + 0.01, right, exact=False)
    assert not bench_peers.same(right + 0.01, right, exact=True)
    assert not bench_peers.same(right + 1, right, exact=False)
    assert not bench_peers.same(right * math.nan, right, exact=False)


def test_the_seed_style_wrapper_keeps_a_graph_for_each_shape():
    module = nn.ReLU()

    def forward(*, x, scales):
        return {"y": module(x) * scales[0]}

    wrapper = SeedStyleWrapper(forward, CPU)
    for rows in (2, 3, 2):
        x = torch.randn(rows, 4)
        assert torch.equal(wrapper(x=x, scales=[x[0]])["y"], x.relu() * x[0])
    assert len(wrapper._graphs) == 2


def test_outputs_of_the_handmade_are_clones():
    captured = capture(lambda *, x: (x + 1, x + 2), {"x": torch.zeros(2)}, CPU)
    mine = cloned(captured.result)
    captured.statics[0].fill_(5)
    captured.replay()
    assert [tensor[0].item() for tensor in mine] == [1, 2]
    assert [tensor[0].item() for tensor in captured.result] == [6, 7]


@pytest.mark.parametrize("tensors", bench_call.COUNTS)
@pytest.mark.parametrize("nested", [False, True])
def test_a_case_has_its_tensors(tensors, nested):
    assert len(leaves(make_kwargs(Case(tensors, nested, 1), CPU, torch.float32))) == tensors
    assert len(list(Module(1).parameters())) == bench_call.PARAMETERS == 25
