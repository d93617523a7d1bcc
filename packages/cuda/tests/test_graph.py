"""CUDAGraph: captures, pools, streams, replays and ends."""

import copy
import gc
import pickle
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from cuda_health import assert_healthy, pool_of, reserved

import graphreplay
import graphreplay_cuda
from graphreplay_cuda import (
    CUDAGraph,
    CUDAGraphedForward,
    GraphStateError,
    graph,
    graph_pool_handle,
    is_current_stream_capturing,
    release,
)
from graphreplay_cuda.capture import Capture
from graphreplay_cuda.pools import PoolHandle

gpu = pytest.mark.cuda
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def captured(static, **arguments):
    made = CUDAGraph()
    with graph(made, **arguments):
        y = static * 2 + 1
    return made, y


# ------------------------------------------------------------------------------------ arguments, anywhere


@pytest.mark.parametrize("mode", ["", "Global", None, 1])
def test_an_unknown_mode_is_refused(mode):
    with pytest.raises(graphreplay.ConfigurationError, match="global, thread_local, relaxed, not") as refused:
        CUDAGraph().capture_begin(capture_error_mode=mode)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("stream", [0, "side", object()])
def test_what_is_no_stream_is_refused(stream):
    with pytest.raises(graphreplay.ConfigurationError, match="stream is a"):
        CUDAGraph().capture_begin(stream=stream)
    with pytest.raises(graphreplay.ConfigurationError, match="stream is a"):
        CUDAGraph().replay(stream=stream)


@pytest.mark.parametrize("pool", [0, "pool", (1,), (1, 2, 3), ("a", "b"), object()])
def test_what_is_no_pool_is_refused(pool):
    with pytest.raises(graphreplay.ConfigurationError, match="pool is None, a handle"):
        CUDAGraph().capture_begin(pool=pool)


@no_gpu
@pytest.mark.parametrize(
    "use",
    [
        lambda g: g.capture_begin(),
        lambda g: g.capture_end(),
        lambda g: g.instantiate(),
        lambda g: g.replay(),
        lambda g: g.debug_dump("graph.dot"),
        lambda g: g.stage_and_launch([], []),
        lambda g: g.staging([]),
        lambda g: g.begin_capture_to_if_node(torch.tensor(True)),
        lambda g: g.begin_capture_to_else_node(),
        lambda g: g.begin_capture_to_while_node(torch.tensor(True)),
        lambda g: g.set_conditional_handle_for_current_node(torch.tensor(True)),
        lambda g: g.end_capture_to_conditional_node(),
        lambda g: g.if_node(torch.tensor(True)),
        lambda g: g.while_node(torch.tensor(True)),
        lambda g: g.pool_id,
        lambda g: graph(g).__enter__(),
        lambda g: graph_pool_handle(),
    ],
)
def test_without_a_gpu_there_is_one_clear_error(use):
    with pytest.raises(graphreplay.BackendUnavailableError, match="CUDA graphs need a CUDA device: "):
        use(CUDAGraph())


@pytest.mark.parametrize("target", [3, None, object()])
def test_what_is_no_graph_is_refused(target):
    with pytest.raises(graphreplay.ConfigurationError, match=r"captures into a graphreplay_cuda\.CUDAGraph"):
        graph(target)


@pytest.mark.parametrize("what", [CUDAGraph(), PoolHandle((0, 7))], ids=["graph", "handle"])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_graphs_and_pools_are_not_copied(what, how):
    with pytest.raises(graphreplay.NotCopyableError):
        how(what)


def test_a_graph_that_was_never_built_goes_quietly():
    program = "from graphreplay_cuda import CUDAGraph; CUDAGraph.__new__(CUDAGraph)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pool_takes_one_capture_at_a_time():
    handle, same = PoolHandle((0, 7)), PoolHandle((0, 7))
    assert handle.enter() == (0, 7)
    for other in (handle, same):
        with pytest.raises(GraphStateError, match="a capture into this pool is under way"):
            other.enter()
    handle.capture_over()
    assert same.enter() == (0, 7)
    same.capture_over()
    assert (handle.graphs, same.graphs) == (1, 1)
    freed = []
    handle.leave(lambda: freed.append(handle.graphs))
    assert (freed, handle.graphs) == ([1], 0)


class UnderWay:
    """A capture that this thread, or another one, has begun, as far as a block looks at it."""

    def __init__(self, *, here, abort=None):
        self.thread = threading.get_ident() + (not here)
        self.bodies = SimpleNamespace(open=[SimpleNamespace(kind="while")])
        self.abort = abort


def block(monkeypatch, under_way):
    made = CUDAGraph()
    monkeypatch.setattr(made, "capture_begin", lambda *_: setattr(made, "_capture", under_way))
    return made, graph(made)


def broken():
    raise RuntimeError("the driver is gone\nand pages of advice")


@pytest.mark.parametrize(
    ("under_way", "note"),
    [
        (UnderWay(here=True, abort=lambda: ["cleaning up raised X"]), "and cleaning up raised X"),
        (
            UnderWay(here=True, abort=broken),
            "and giving the capture up raised RuntimeError: the driver is gone",
        ),
        (
            UnderWay(here=False),
            "and giving the capture up raised GraphStateError: the end of a graph() block in another thread than "
            "capture_begin(); a capture ends where it began",
        ),
    ],
)
def test_the_error_of_a_block_goes_on_with_what_went_wrong_behind_it(monkeypatch, under_way, note):
    made, capture = block(monkeypatch, under_way)
    own = ValueError("planned")
    with pytest.raises(ValueError, match="planned") as raised, capture:
        raise own
    assert raised.value is own
    assert own.__notes__ == [note]
    assert made._capture is (None if under_way.thread == threading.get_ident() else under_way)


def test_a_block_that_ends_in_another_thread_is_named(monkeypatch):
    _, capture = block(monkeypatch, UnderWay(here=False))
    message = r"^the end of a graph\(\) block in another thread than capture_begin"
    with pytest.raises(GraphStateError, match=message), capture:
        pass


def test_a_body_that_a_block_leaves_open_is_named_with_what_went_wrong_behind_it(monkeypatch):
    made, capture = block(monkeypatch, UnderWay(here=True, abort=lambda: ["cleaning up raised X"]))
    with pytest.raises(GraphStateError, match="capture_end with an open while body") as raised, capture:
        pass
    assert raised.value.__notes__ == ["and cleaning up raised X"]
    assert made._capture is None


@no_gpu
def test_without_a_gpu_there_is_nothing_to_free_and_nothing_captures():
    made = CUDAGraph()
    made.reset()
    made.enable_debug_mode()
    assert not is_current_stream_capturing()


# ---------------------------------------------------------------------------------------------- captures


@gpu
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_is_replayed_with_the_values_of_now(mode):
    x, made = torch.ones(16, device="cuda"), CUDAGraph()
    before = torch.cuda.current_stream()
    made.capture_begin(capture_error_mode=mode)
    assert is_current_stream_capturing()
    assert torch.cuda.current_stream() != before
    y = x * 2 + 1
    made.capture_end()
    assert not is_current_stream_capturing()
    assert torch.cuda.current_stream() == before
    made.instantiate()
    for value in (1.0, 5.0, -3.0):
        x.fill_(value)
        made.replay()
        assert y.tolist() == [value * 2 + 1] * 16
    assert_healthy()


@gpu
def test_the_error_mode_reaches_the_driver():
    results = {}
    x = torch.ones(8, device="cuda")
    for mode in ("thread_local", "relaxed", "global"):
        torch.cuda.empty_cache()

        def allocate(mode=mode):  # an unsafe call of another thread, which "global" forbids
            try:
                results[mode] = torch.cuda.mem_get_info() and torch.cuda.caching_allocator_delete(
                    torch.cuda.caching_allocator_alloc(64 << 20)
                )
            except RuntimeError as error:
                results[mode] = str(error)

        made, thread = CUDAGraph(), threading.Thread(target=allocate)
        try:
            with graph(made, capture_error_mode=mode):
                y = x * 2
                thread.start()
                thread.join()
        except graphreplay.CaptureError as error:
            results[mode] = f"{results[mode]}; {error}"
        else:
            made.replay()
            assert y.tolist() == [2.0] * 8
    assert results["thread_local"] is None
    assert results["relaxed"] is None
    assert "capture" in results["global"]
    assert_healthy()


@gpu
def test_the_side_stream_is_one_per_device_and_a_custom_one_is_used():
    x = torch.ones(4, device="cuda")
    seen = []
    own = torch.cuda.Stream()
    for stream in (None, None, own):
        with graph(CUDAGraph(), stream=stream):
            seen.append(torch.cuda.current_stream())
            x * 2
    assert seen[0] == seen[1] != seen[2]
    assert seen[2] == own
    assert torch.cuda.default_stream() not in seen


@gpu
def test_the_legacy_default_stream_is_refused_with_the_reason():
    stream, made = torch.cuda.default_stream(), CUDAGraph()
    with pytest.raises(graphreplay.ConfigurationError, match="waits for all other streams"):
        made.capture_begin(stream=stream)
    assert captured(torch.ones(2, device="cuda"))[0] is not None
    assert_healthy()


@gpu
def test_a_capture_inside_a_capture_is_refused_and_the_outer_one_goes_on():
    x, outer = torch.ones(4, device="cuda"), CUDAGraph()
    with graph(outer):
        y = x + 1
        with pytest.raises(GraphStateError, match="in a capture already"):
            CUDAGraph().capture_begin()
        with pytest.raises(GraphStateError, match="is being captured; call reset"):
            outer.capture_begin()
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(GraphStateError, match="in a capture already"):
            CUDAGraph().capture_begin(stream=torch.cuda.Stream())
        z = y * 3
    outer.replay()
    assert z.tolist() == [6.0] * 4


@gpu
def test_two_threads_capture_at_once_on_streams_of_their_own():
    x, done, both = torch.ones(64, device="cuda"), {}, threading.Barrier(2, timeout=60)

    def run(name, factor, stream):
        made = CUDAGraph()
        with graph(made, capture_error_mode="thread_local", stream=stream):
            both.wait()
            y = x * factor
            both.wait()
        made.replay()
        torch.cuda.current_stream().synchronize()
        done[name] = y.sum().item()

    threads = [threading.Thread(target=run, args=(f, f, torch.cuda.Stream())) for f in (2.0, 3.0)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert done == {2.0: 128.0, 3.0: 192.0}


@gpu
def test_the_dedicated_stream_serves_one_capture_at_a_time_and_says_so():
    x, said = torch.ones(4, device="cuda"), []

    def try_it():
        with pytest.raises(GraphStateError, match="pass another stream") as refused:
            CUDAGraph().capture_begin(capture_error_mode="thread_local")
        said.append(str(refused.value))

    made = CUDAGraph()
    with graph(made, capture_error_mode="thread_local"):
        y = x * 2
        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
    made.replay()
    assert (len(said), y.tolist()) == (1, [2.0] * 4)


@gpu
def test_a_capture_ends_in_the_thread_that_began_it():
    made, said = CUDAGraph(), []

    def end():
        with pytest.raises(GraphStateError, match="in another thread") as refused:
            made.capture_end()
        said.append(refused.value)

    with graph(made, capture_error_mode="thread_local"):
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
    assert len(said) == 1
    made.replay()


@gpu
def test_an_empty_graph():
    made = CUDAGraph()
    with graph(made):
        pass
    made.replay()
    made.reset()
    assert_healthy()


@gpu
def test_the_autocast_cache_keeps_no_memory_of_the_graph():
    linear = torch.nn.Linear(8, 8, device="cuda")
    x, made = torch.ones(2, 8, device="cuda"), CUDAGraph()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        linear(x)
        torch.clear_autocast_cache()
        with graph(made):
            linear(x)
        made.reset()
        expected = torch.nn.functional.linear(x.bfloat16(), linear.weight.bfloat16(), linear.bias.bfloat16())
        assert torch.equal(linear(x), expected)


@gpu
def test_collection_is_held_off_and_comes_back():
    with graph(CUDAGraph()):
        assert not gc.isenabled()
    assert gc.isenabled()


@gpu
def test_random_numbers_are_fresh_in_each_replay_and_follow_the_seed():
    made = CUDAGraph()
    with graph(made):
        y = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(1)
    made.replay()
    first = y.clone()
    made.replay()
    assert not torch.equal(y, first)
    torch.cuda.manual_seed(1)
    made.replay()
    assert torch.equal(y, first)
    torch.cuda.manual_seed(1)
    assert torch.equal(torch.rand(4, device="cuda"), first)


def late_random_numbers():
    """A graph that draws numbers a good while after it was launched."""
    torch.rand(4, device="cuda")
    made = CUDAGraph()
    with graph(made):
        torch.cuda._sleep(2_000_000_000)  # cycles: a second
        y = torch.rand(4, device="cuda")
    return made, y


@gpu
@pytest.mark.parametrize("how", ["ended", "raised", "failed"])
def test_no_seed_of_a_capture_comes_late(how):
    """torch writes it on the capture's stream, which may have much to do, to memory that all replays read."""
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    made, y = late_random_numbers()
    captured(x, stream=side)  # what a first capture loads and allocates may wait for the device
    torch.cuda.synchronize()
    torch.cuda.manual_seed(7)
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
    if how == "ended":
        captured(x, stream=side)
    else:
        fault = FAULTS["raise" if how == "raised" else "read"]
        with pytest.raises((ValueError, RuntimeError)), graph(CUDAGraph(), stream=side):
            fault(x * 2)
    torch.cuda.manual_seed(1)
    made.replay()
    drawn = y.clone()
    torch.cuda.manual_seed(1)
    assert torch.equal(torch.rand(4, device="cuda"), drawn)


@gpu
def test_a_capture_leaves_replays_of_the_current_stream_their_seed():
    x = torch.ones(4, device="cuda")
    made, y = late_random_numbers()
    captured(x)
    torch.cuda.synchronize()
    torch.cuda.manual_seed(1)
    made.replay()
    torch.cuda.manual_seed(2)
    captured(x)
    drawn = y.clone()
    torch.cuda.manual_seed(1)
    assert torch.equal(torch.rand(4, device="cuda"), drawn)


# ------------------------------------------------------------------------------------------------ pools


@gpu
@pytest.mark.parametrize("given", ["handle", "pool_id", "graph", "torch handle", "torch graph", "MemPool"])
def test_a_given_pool_is_shared(given):
    x = torch.ones(1 << 18, device="cuda")
    first = None
    if given in ("pool_id", "graph"):
        first, y = captured(x)
        pool = first if given == "graph" else first.pool_id
        number = pool_of(y)
    elif given == "torch graph":
        first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            y = x * 2
        pool, number = first, pool_of(y)
    elif given == "MemPool":
        first = torch.cuda.MemPool()
        pool = number = first.id
    else:
        pool = number = graph_pool_handle() if given == "handle" else torch.cuda.graph_pool_handle()
    second, z = captured(x, pool=pool)
    assert pool_of(z) == tuple(number)
    second.replay()
    assert z[:2].tolist() == [3.0, 3.0]


@gpu
def test_without_a_pool_each_graph_has_a_fresh_one():
    x = torch.ones(1 << 18, device="cuda")
    graphs = [captured(x) for _ in range(3)]
    pools = {pool_of(y) for _, y in graphs}
    assert len(pools) == 3
    assert (0, 0) not in pools
    assert {tuple(made.pool_id) for made, _ in graphs} == pools


@gpu
def test_a_pool_serves_again_after_its_last_graph():
    x, handle = torch.ones(1 << 18, device="cuda"), graph_pool_handle()
    for value in (1.0, 2.0, 3.0):
        made, y = captured(x, pool=handle)
        x.fill_(value)
        made.replay()
        assert y[0].item() == 2 * value + 1
        made.reset()
    x.fill_(9.0)
    assert y[0].item() == 7.0, "an output outlives its graph"


@gpu
def test_a_pool_that_torch_has_dropped_is_refused_and_nothing_breaks():
    x, old = torch.ones(1 << 18, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(old):
        y = x * 2
    number = old.pool()
    old.reset()
    assert y is not None
    with pytest.raises(graphreplay.CaptureError, match="graph_pool_handle"):
        captured(x, pool=number)
    assert_healthy()


@gpu
def test_two_captures_at_once_into_one_pool_are_refused():
    x, handle, said = torch.ones(64, device="cuda"), graph_pool_handle(), []

    def try_it():
        with pytest.raises(GraphStateError, match="a capture into this pool is under way") as refused:
            captured(x, pool=handle, stream=torch.cuda.Stream(), capture_error_mode="thread_local")
        said.append(refused.value)

    made = CUDAGraph()
    with graph(made, pool=handle, capture_error_mode="thread_local"):
        y = x * 2
        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
    made.replay()
    assert (len(said), y[0].item()) == (1, 2.0)
    assert captured(x, pool=handle)[0].pool_id is handle
    assert_healthy()


@gpu
def test_the_last_graph_of_a_pool_may_leave_as_another_one_begins(monkeypatch):
    """torch does not count that one yet, and would drop the pool."""
    x, handle, begin = torch.ones(64, device="cuda"), graph_pool_handle(), Capture._begin
    old, _ = captured(x, pool=handle)
    old.replay()

    def begin_late(capture):
        thread = threading.Thread(target=old.reset)
        thread.start()
        thread.join()
        begin(capture)

    monkeypatch.setattr(Capture, "_begin", begin_late)
    made, y = captured(x, pool=handle)
    made.replay()
    assert (y[0].item(), handle.graphs) == (3.0, 1)
    assert_healthy()


@gpu
@pytest.mark.parametrize("pool", [CUDAGraph(), torch.cuda.CUDAGraph if torch.cuda.is_available() else None])
def test_a_graph_without_a_pool_shares_none(pool):
    error = GraphStateError if isinstance(pool, CUDAGraph) else graphreplay.ConfigurationError
    with pytest.raises(error, match="pool"):
        captured(torch.ones(2, device="cuda"), pool=pool if isinstance(pool, CUDAGraph) else pool())
    assert_healthy()


@gpu
def test_pool_id_is_there_from_begin_to_reset():
    made = CUDAGraph()
    with pytest.raises(GraphStateError, match="pool_id of a graph that is not captured"):
        _ = made.pool_id
    with graph(made):
        during = made.pool_id
    assert made.pool_id is during
    made.reset()
    with pytest.raises(GraphStateError, match="pool_id of a graph that is not captured"):
        _ = made.pool_id


# ---------------------------------------------------------------------------------------- replays, ends


@gpu
def test_replays_run_on_the_stream_that_is_asked_for():
    x = torch.ones(1 << 20, device="cuda")
    made, y = captured(x)
    for stream in (None, torch.cuda.Stream(), torch.cuda.Stream(priority=-1), torch.cuda.default_stream()):
        where = stream or torch.cuda.current_stream()
        event = torch.cuda.Event()
        x.fill_(float(where.priority + 3))
        where.wait_stream(torch.cuda.current_stream())
        made.replay(stream)
        event.record(where)
        event.synchronize()
        assert y[-1].item() == 2 * float(where.priority + 3) + 1
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@gpu
def test_replays_of_one_graph_on_many_streams_run_one_after_another():
    counter, made = torch.zeros((), device="cuda"), CUDAGraph()
    with graph(made):
        counter.add_(1)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for turn in range(400):
        made.replay(streams[turn % 4])
    torch.cuda.synchronize()
    assert counter.item() == 400


@gpu
def test_random_numbers_hold_when_streams_take_turns():
    made, sink = CUDAGraph(), torch.zeros(200, 4, device="cuda")
    big = torch.ones(1024, 1024, device="cuda")
    with graph(made):
        for _ in range(3):
            big = big @ big / 1024
        y = torch.rand(4, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.manual_seed(9)
    torch.cuda.synchronize()
    for turn in range(200):
        with torch.cuda.stream(streams[turn % 3]):
            made.replay()
            sink[turn].copy_(y)
    torch.cuda.synchronize()
    torch.cuda.manual_seed(9)
    assert torch.equal(sink, torch.stack([torch.rand(4, device="cuda") for _ in range(200)]))


@gpu
def test_reset_while_other_threads_launch():
    for _ in range(30):
        static = [torch.zeros(64, device="cuda")]
        made, _ = captured(static[0])
        inputs, staging, said = [torch.ones(64, device="cuda")], made.staging(static), []

        def run(launch, said=said):
            try:
                for _ in range(100_000):
                    launch()
            except GraphStateError as error:
                said.append(str(error))

        launches = (
            made.replay,
            lambda s=staging, i=inputs: s.launch(i),
            lambda s=staging, i=inputs: s.stage_and_launch(i),
        )
        threads = [threading.Thread(target=run, args=(launch,)) for launch in launches]
        [thread.start() for thread in threads]
        made.reset()
        [thread.join() for thread in threads]
        assert len(said) == 3
        assert all("not captured" in text or "was reset" in text for text in said)
    assert_healthy()


@gpu
def test_a_thread_that_dies_in_its_capture_leaves_collection_on():
    program = """
import gc, threading, torch
from graphreplay_cuda import CUDAGraph, GraphStateError, graph
x, made = torch.ones(4, device="cuda"), CUDAGraph()
thread = threading.Thread(target=made.capture_begin, kwargs={"capture_error_mode": "thread_local"})
thread.start()
thread.join()
try:
    made.reset()
except GraphStateError as error:
    print("in another thread" in str(error), gc.isenabled())
del made
other = CUDAGraph()
with graph(other, stream=torch.cuda.Stream()):
    y = x * 2
other.replay()
print(gc.isenabled(), y.sum().item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True False\nTrue 8.0\n", "")


@gpu
def test_graphs_may_go_while_another_thread_captures():
    x, outer, begun, gone = torch.ones(64, device="cuda"), CUDAGraph(), threading.Event(), threading.Event()
    victims = [captured(x)[0] for _ in range(8)]
    for victim in victims:
        victim.replay()
    said = []

    def capture():
        try:
            with graph(outer, stream=torch.cuda.Stream()):
                y = x * 2
                begun.set()
                gone.wait(60)
                y = y + 1
            outer.replay()
            said.append(y.sum().item())
        finally:
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(60)
    while victims:
        victims.pop().reset()
    gone.set()
    thread.join()
    assert said == [192.0]
    assert_healthy()


@gpu
def test_a_stream_that_is_captured_meanwhile_is_not_waited_for():
    x, side, outer = torch.ones(64, device="cuda"), torch.cuda.Stream(), CUDAGraph()
    made, y = captured(x)
    graphed = CUDAGraphedForward(lambda *, x: x * 3, device="cuda")
    other = torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(side):
            made.replay()
            graphed(x=x)
            graphed(x=x)
        torch.cuda.synchronize()
        said = []

        def elsewhere():
            with torch.no_grad(), torch.cuda.stream(other):
                with pytest.raises(GraphStateError, match="the stream of the launch before is being captured"):
                    made.replay()
                said.append(graphed(x=x + 1)[0].item())
                victim.reset()

        victim, _ = captured(x)
        with torch.cuda.stream(side):
            victim.replay()
        with graph(outer, stream=side, capture_error_mode="relaxed"):
            z = x * 5
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        outer.replay()
        with torch.cuda.stream(other):
            made.replay()
        torch.cuda.synchronize()
    assert (said, z[0].item(), y[0].item()) == ([6.0], 5.0, 3.0)
    assert "called inside another capture" in graphed.stats()["eager_reasons"]
    captured(x)
    assert release._deferred == []


@gpu
@pytest.mark.parametrize("body", [False, True])
def test_the_process_may_end_in_a_capture(body):
    program = f"""
import torch
from graphreplay_cuda import CUDAGraph
made = CUDAGraph()
made.capture_begin()
x = torch.ones(4, device="cuda")
{"made.begin_capture_to_if_node(x[0] > 0)" if body else ""}
x.add_(1)
print("done", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@gpu
def test_a_graph_dropped_in_its_capture_gives_it_up():
    x, made = torch.ones(4, device="cuda"), CUDAGraph()
    made.capture_begin()
    x * 2
    del made
    assert_healthy()


@gpu
def test_replay_from_a_fresh_thread():
    x = torch.ones(4, device="cuda")
    made, y = captured(x)
    thread = threading.Thread(target=made.replay)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert y.tolist() == [3.0] * 4


@gpu
def test_a_replay_inside_a_capture_is_refused():
    inner, _ = captured(torch.ones(4, device="cuda"))
    with pytest.raises(GraphStateError, match="inside a capture, which"), graph(CUDAGraph()):
        inner.replay()
    assert_healthy()


@gpu
@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("replay", lambda g: g.replay()),
        ("instantiate", lambda g: g.instantiate()),
        ("debug_dump", lambda g: g.debug_dump("graph.dot")),
        ("stage_and_launch", lambda g: g.stage_and_launch([], [])),
        ("capture_end", lambda g: g.capture_end()),
        ("begin_capture_to_if_node", lambda g: g.begin_capture_to_if_node(torch.ones((), device="cuda").bool())),
        ("end_capture_to_conditional_node", lambda g: g.end_capture_to_conditional_node()),
    ],
)
def test_what_the_state_does_not_admit_is_refused(name, use):
    made = CUDAGraph()
    for _ in range(2):
        with pytest.raises(GraphStateError, match=f"^{name} "):
            use(made)
        captured(torch.ones(2, device="cuda"))
        with graph(made):
            pass
        made.reset()


@gpu
def test_a_captured_graph_is_not_captured_over():
    x = torch.ones(4, device="cuda")
    made, y = captured(x)
    with pytest.raises(GraphStateError, match=r"is captured; call reset\(\) first"):
        made.capture_begin()
    made.replay()
    assert y.tolist() == [3.0] * 4
    made.reset()
    with graph(made):
        z = x - 1
    made.replay()
    assert z.tolist() == [0.0] * 4


@gpu
@pytest.mark.parametrize("how", ["reset", "drop"])
def test_the_end_of_a_graph_gives_its_memory_back(how):
    x = torch.ones(8 << 20, device="cuda")
    captured(x)
    gc.collect()  # what other tests have left must not go in between
    torch.cuda.empty_cache()
    before = reserved()
    made, y = captured(x)
    made.replay()
    assert reserved() >= before + x.nbytes
    del y
    if how == "reset":
        made.reset()
    else:
        del made
    assert reserved() == before


@gpu
def test_reset_waits_for_replays_in_flight():
    x = torch.ones(2048, 2048, device="cuda")
    out, made, stream = torch.zeros(2048, 2048, device="cuda"), CUDAGraph(), torch.cuda.Stream()
    with graph(made):
        y = x
        for _ in range(20):
            y = y @ x / 2048
        out.copy_(y)
    made.replay(stream)
    made.reset()
    assert stream.query()
    assert torch.allclose(out, x, rtol=1e-3)


@gpu
def test_ten_thousand_graphs_leak_nothing():
    x = torch.ones(64, device="cuda")
    made = CUDAGraph()

    def cycle():
        with graph(made):
            y = x * 2
        made.replay()
        made.reset()
        del y

    for _ in range(200):
        cycle()
    before = reserved()
    objects = len(gc.get_objects())
    for _ in range(10_000):
        cycle()
    assert reserved() == before
    gc.collect()
    assert len(gc.get_objects()) - objects < 200


# ----------------------------------------------------------------------------------------------- failures

FAULTS = {
    "raise": lambda x: (_ for _ in ()).throw(ValueError("planned")),
    "wait": lambda x: torch.cuda.synchronize(),
    "read": lambda x: x.sum().item(),
}


@gpu
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("how", ["block", "end", "reset"])
def test_a_failed_capture_leaves_everything_as_it_was(fault, how):
    x, made = torch.ones(1024, 1024, device="cuda"), CUDAGraph()
    stream = torch.cuda.Stream()

    def fail():
        with torch.cuda.stream(stream):
            if how == "block":
                with pytest.raises((ValueError, RuntimeError)), graph(made):
                    FAULTS[fault](x * 2)
            else:
                made.capture_begin()
                with pytest.raises((ValueError, RuntimeError)):
                    FAULTS[fault](x * 2)
                if how == "reset":
                    made.reset()
                elif fault == "raise":
                    made.capture_end()
                    made.reset()
                else:
                    with pytest.raises(graphreplay.CaptureError, match="the capture failed: "):
                        made.capture_end()
            assert torch.cuda.current_stream() == stream
            made.reset()
            assert_healthy(stream)

    fail()
    before = reserved()
    for _ in range(50):
        fail()
    assert reserved() - before <= 2 << 20
    with graph(made):
        y = x + 1
    made.replay()
    assert y[0, 0].item() == 2.0


@gpu
def test_a_fork_that_never_joins_is_refused():
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    with pytest.raises(graphreplay.CaptureError, match="the capture failed"), graph(CUDAGraph()):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x + 1
    assert_healthy()


@gpu
def test_the_error_of_the_block_is_the_one_that_is_raised():
    with pytest.raises(KeyError, match="mine"), graph(CUDAGraph()):
        torch.ones(2, device="cuda").add_(1)
        raise KeyError("mine")
    assert_healthy()


# ------------------------------------------------------------------------------------------------- dumps


@gpu
def test_a_dump_shows_the_graph_and_its_bodies(tmp_path):
    x, pred = torch.ones(64, device="cuda"), torch.ones((), dtype=torch.bool, device="cuda")
    made = CUDAGraph()
    with graph(made):
        x.add_(1)
        with made.if_node(pred):
            x.sqrt_()
            with made.if_node(pred):
                x.cos_()
    plain, verbose = tmp_path / "plain.dot", tmp_path / "verbose.dot"
    made.debug_dump(plain)
    made.enable_debug_mode()
    made.debug_dump(str(verbose))
    text = verbose.read_text()
    assert text.startswith("digraph")
    assert "sqrt" in text
    assert "cos" in text
    assert text.upper().count("CONDITIONAL") >= 2
    assert len(plain.read_text()) < len(text)
    with pytest.raises(FileNotFoundError):
        made.debug_dump(tmp_path / "no" / "such.dot")


def test_the_names_of_the_package():
    for name in graphreplay_cuda.__all__:
        assert getattr(graphreplay_cuda, name) is not None


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_stream_of_another_device_is_refused():
    made, _ = captured(torch.ones(4, device="cuda:0"))
    with pytest.raises(graphreplay.ConfigurationError, match="a stream of cuda:1 for a graph on cuda:0"):
        made.replay(torch.cuda.Stream("cuda:1"))
