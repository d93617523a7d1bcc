"""What is particular to CUDA: devices, failed captures, and the end of the process."""

import subprocess
import sys

import pytest
import torch

import graphreplay
from graphreplay_cuda import CUDAGraphedForward, release

gpu = pytest.mark.cuda

FAULTS = {
    "raise": lambda x: (_ for _ in ()).throw(ValueError("planned")),
    "wait": lambda x: torch.cuda.synchronize(),
    "read": lambda x: x.sum().item(),
}


def fails_while_captured(fault):
    def forward(*, x):
        y = x * 2
        if torch.cuda.is_current_stream_capturing():
            FAULTS[fault](y)
        return y

    return forward


def test_other_devices_run_plainly():
    graphed = CUDAGraphedForward(lambda *, x: x + 1, device="cpu")
    assert graphed(x=torch.ones(2)).tolist() == [2.0, 2.0]
    assert graphed.disabled_reason == "CUDA graphs run on a CUDA device, not on cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_error_says_why():
    with pytest.raises(graphreplay.BackendUnavailableError, match=r"cuda is not here: (this PyTorch|no usable)"):
        CUDAGraphedForward(lambda *, x: x, device="cuda")
    with pytest.raises(graphreplay.BackendUnavailableError, match="cuda:1 is not here"):
        graphreplay.get_graphed_forward_cls("cuda:1")


@gpu
def test_the_registry_finds_this_backend():
    assert graphreplay.get_graphed_forward_cls("cuda") is CUDAGraphedForward
    assert graphreplay.get_graphed_forward_cls() is CUDAGraphedForward
    assert graphreplay.get_graphed_forward_cls("cpu") is graphreplay.ReferenceGraphedForward


@gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_capture_leaves_the_device_as_it_was(fault):
    x = torch.ones(1024, 1024, device="cuda")
    stream = torch.cuda.current_stream()
    graphed = CUDAGraphedForward(fails_while_captured(fault), device="cuda")
    torch.cuda.manual_seed(3)
    with torch.no_grad():
        assert torch.equal(graphed(x=x), x * 2)
        assert torch.equal(graphed(x=x), x * 2)
        drawn = torch.rand(4, device="cuda")
        assert graphed.disabled_reason is not None
        assert "test_backend.py" in graphed.disabled_reason
        assert torch.cuda.current_stream() == stream
        torch.cuda.manual_seed(3)
        assert torch.equal(torch.rand(4, device="cuda"), drawn)
        other = CUDAGraphedForward(lambda *, x: x + torch.rand_like(x), device="cuda")
        other(x=x)
        other(x=x)
    assert (other.captures, other.stats()["replays"]) == (1, 1)


@gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_failed_captures_keep_no_memory(fault):
    x = torch.ones(1024, 1024, device="cuda")

    def fail():
        with torch.no_grad():
            graphed = CUDAGraphedForward(fails_while_captured(fault), device="cuda")
            graphed(x=x)
        assert not graphed.enabled

    def reserved():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    fail()
    before = reserved()
    for _ in range(50):
        fail()
    assert reserved() - before <= 2 << 20


@gpu
def test_a_pool_serves_again_after_its_last_graph_is_gone():
    graphed = CUDAGraphedForward(lambda *, x: (x @ x).relu(), device="cuda")
    x = torch.ones(64, 64, device="cuda")
    with torch.no_grad():
        for round_ in range(1, 4):
            graphed(x=x)
            assert torch.equal(graphed(x=x), (x @ x).relu())
            assert graphed.captures == round_
            assert graphed.evict(x=x) if round_ == 2 else graphed.reset() is None


@gpu
@pytest.mark.parametrize("nvtx", [False, True])
def test_ranges_are_marked_on_request(nvtx, monkeypatch):
    events = []
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda text: events.append(text) or push(text))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("end") or pop())
    graphed = CUDAGraphedForward(lambda *, x: x + 1, device="cuda", nvtx=nvtx, name="decoder {0} %s {x")
    with torch.no_grad():
        assert [graphed(x=torch.ones(1, device="cuda")).item() for _ in range(3)] == [2.0, 2.0, 2.0]
    marks = [text for phase in ("capture", "replay", "replay") for text in (f"decoder {{0}} %s {{x: {phase}", "end")]
    assert events == (marks if nvtx else [])
    assert graphed.stats()["replays"] == 2


@gpu
@pytest.mark.parametrize("end", ["close", "reset", "disable", "drop"])
def test_the_end_of_the_last_graph_gives_device_memory_back(end):
    x = torch.ones(4096, 4096, device="cuda")
    with torch.no_grad():
        CUDAGraphedForward(lambda *, x: x + 1, device="cuda")(x=x[:1])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graphed = CUDAGraphedForward(lambda *, x: (x + 1).relu() * x, device="cuda")
        for _ in range(3):
            graphed(x=x)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() >= before + 2 * x.nbytes  # the static input and output at least
        if end == "drop":
            del graphed
            torch.cuda.empty_cache()  # a wrapper that is just dropped leaves that to others
        else:
            graphed.disable("the end") if end == "disable" else getattr(graphed, end)()
    assert torch.cuda.memory_reserved() <= before + (4 << 20)


@gpu
@pytest.mark.parametrize("end", ["close", "evict", "drop"])
def test_graphs_that_end_inside_a_foreign_capture_do_not_break_it(end):
    graphed = CUDAGraphedForward(lambda *, x: x * 3, device="cuda")
    static, outer = torch.ones(1024, device="cuda"), torch.cuda.CUDAGraph()
    with torch.no_grad():
        graphed(x=static)
        graphed(x=static)
        with torch.cuda.graph(outer):
            between = static * 2
            if end == "close":
                graphed.close()
            elif end == "evict":
                assert graphed.evict(x=static)
            else:
                del graphed
            result = between + 1
        assert len(release._deferred) == 1
        static.fill_(5.0)
        outer.replay()
        assert torch.equal(result, torch.full_like(result, 11.0))
        other = CUDAGraphedForward(lambda *, x: x - 1, device="cuda")
        for _ in range(2):
            assert torch.equal(other(x=static), static - 1)
        assert release._deferred == [], "the next capture has freed what had to wait"
        outer.replay()
        assert torch.equal(result, torch.full_like(result, 11.0))


def outcome(program):
    """How a program ends, and what it prints, but that the compiled part may be missing."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]  # of forks among threads
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = [line for line in done.stderr.splitlines() if "goes without its compiled part" not in line]
    return done.returncode, done.stdout, "\n".join(said)


@gpu
@pytest.mark.parametrize("closed", [False, True], ids=["left open", "closed"])
def test_the_process_ends_with_replays_in_flight(closed):
    program = f"""
import torch
from graphreplay_cuda import CUDAGraphedForward
graphed = CUDAGraphedForward(lambda *, x: x @ x @ x, device="cuda")
x = torch.ones(2048, 2048, device="cuda")
with torch.no_grad():
    for _ in range(20):
        graphed(x=x)
{"graphed.close()" if closed else ""}
print("done")
"""
    assert outcome(program) == (0, "done\n", "")


@gpu
def test_a_wrapper_dropped_in_a_forked_child_says_nothing():
    program = """
import gc, os, torch
from graphreplay_cuda import CUDAGraphedForward
graphed = CUDAGraphedForward(lambda *, x: x * 2, device="cuda")
x = torch.ones(8, device="cuda")
with torch.no_grad():
    graphed(x=x)
    graphed(x=x)
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        del graphed
        gc.collect()
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(graphed(x=x).sum().item(), graphed.stats()["replays"])
"""
    assert outcome(program) == (0, "7\n16.0 2\n", "")


@gpu
def test_a_capture_may_be_the_first_thing_that_uses_the_device():
    program = """
import threading, torch
from graphreplay_cuda import CUDAGraph, graph, graph_pool_handle
def first():
    made = CUDAGraph()
    with graph(made):
        y = torch.ones(4, device="cuda") * 3
    made.replay()
    torch.cuda.current_stream().synchronize()
    print(y.sum().item())
thread = threading.Thread(target=first)
thread.start()
thread.join()
first()
"""
    assert outcome(program) == (0, "12.0\n12.0\n", "")
