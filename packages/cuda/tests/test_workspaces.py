"""Workspaces of cuBLAS, which torch may free while graphs go on using them."""

import pytest
import torch
from torch import nn

from graphreplay_cuda import CUDAGraph, CUDAGraphedForward, graph, streams, while_loop

pytestmark = pytest.mark.cuda


def free_workspaces():
    """Does to the workspaces of the process what a recording of torch's cudagraph trees does."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def filler():
    """4 GB that most likely have the memory of whatever was just freed."""
    return [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(1024)]


def untouched(tensors):
    return bool(torch.stack([tensor.isnan().all() for tensor in tensors]).all())


class Products(nn.Module):
    """Long sums for few results, which libraries split and collect in workspaces."""

    def __init__(self):
        super().__init__()
        self.low = nn.Linear(4096, 512, dtype=torch.bfloat16)
        self.weight = nn.Parameter(torch.randn(4096, 512) / 64)
        self.conv = nn.Conv1d(512, 64, 3, padding=1)

    def forward(self, x):
        return self.low(x.bfloat16()), self.conv((x @ self.weight).T[None])


def test_graphed_forwards_outlive_their_workspaces():
    module = Products().cuda()
    graphed = CUDAGraphedForward(module, device="cuda")
    inputs = [torch.randn(rows, 4096, device="cuda") for rows in (8, 48, 200)]
    with torch.no_grad():
        for turn in range(2):
            expected = [module(x) for x in inputs]
            for x in inputs:
                graphed(x=x)
            before = graphed.stats()["replays"]
            free_workspaces()
            tensors = filler()
            results = [graphed(x=x) for x in inputs]
            assert graphed.stats()["replays"] == before + len(inputs), graphed.disabled_reason
            for result, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)
            assert untouched(tensors)
            del tensors
            if turn == 0:  # a capture behind the first loss, before the second
                inputs.append(torch.randn(16, 4096, device="cuda"))
    assert graphed.captures == 4


def test_graphs_with_bodies_outlive_their_workspaces():
    x, weight = torch.randn(8, 4096, device="cuda"), torch.randn(4096, 512, device="cuda") / 64
    square, half = torch.randn(512, 512, device="cuda") / 22, nn.Linear(4096, 512, dtype=torch.bfloat16, device="cuda")
    chosen, chosen_half = torch.zeros(8, 512, device="cuda"), torch.zeros(8, 512, device="cuda")
    holds, none = torch.ones((), dtype=torch.bool, device="cuda"), torch.zeros((), dtype=torch.int32, device="cuda")

    def turn(z, count):
        return torch.tanh(z @ square), count + 1

    graphs = []
    with torch.no_grad():
        product, product_half = x @ weight, half(x.bfloat16()).float()
        looped = product
        for _ in range(3):
            looped, _ = turn(looped, none)
        for _ in range(2):
            made = CUDAGraph()
            with graph(made):
                y = x @ weight
                with made.if_node(holds):
                    chosen.copy_(x @ weight)
                    chosen_half.copy_(half(x.bfloat16()))
                z, _ = while_loop(lambda z, count: count < 3, turn, (y, none))
            graphs.append((made, y, z))
            free_workspaces()
            tensors = filler()
            for one, y, z in graphs:
                for tensor in (chosen, chosen_half, y, z):
                    tensor.zero_()
                one.replay()
                for result, wanted in ((y, product), (chosen, product), (chosen_half, product_half), (z, looped)):
                    torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)
            assert untouched(tensors)
            del tensors


def test_what_torch_frees_of_a_stream_goes_to_its_next_workspaces_alone():
    side = streams.borrow_stream(torch.cuda.current_device())

    def segments():
        pool = streams._workspace_pools[torch.cuda.current_device(), side.cuda_stream]
        return {segment["address"]: segment["total_size"] for segment in pool.snapshot()}

    try:
        streams.give_workspace(side)
        before = segments()
        assert before
        for _ in range(3):
            free_workspaces()
            assert segments() == before
            streams.give_workspace(side)
            streams.give_workspace(side)
            assert segments() == before
    finally:
        streams.give_back(side)
