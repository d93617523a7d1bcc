"""What must work, and be as before, after anything that failed."""

import torch

from graphreplay_cuda import CUDAGraph, graph, is_current_stream_capturing


def assert_healthy(stream=None):
    """The process computes, draws random numbers, uses pinned memory, captures and frees, on the stream of before."""
    assert not is_current_stream_capturing()
    assert torch.cuda.current_stream() == (stream or torch.cuda.default_stream())
    assert torch.is_autocast_cache_enabled()
    torch.cuda.manual_seed(5)
    drawn = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.rand(4, device="cuda"), drawn)
    assert torch.ones(8, pin_memory=True).to("cuda", non_blocking=True).sum().item() == 8
    torch.cuda.empty_cache()
    static, result = torch.ones(8, device="cuda"), CUDAGraph()
    with graph(result):
        y = static * 2 + torch.rand(8, device="cuda") * 0
    result.replay()
    assert y.tolist() == [2.0] * 8
    result.reset()
    result.reset()


def reserved():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def pool_of(tensor):
    """The number of the memory pool that holds a tensor's memory, (0, 0) for the default one."""
    address = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    raise AssertionError("not memory of torch's allocator")
