"""Devices, and captures that fail, on the emulated torch.xpu."""

import warnings
from importlib.metadata import EntryPoint

import pytest
import torch
import torch.distributed as dist
import xpu_emulation
from xpu_calls import X, assert_graphed, wrap
from xpu_emulation import Stream, XPUGraph

import graphreplay
from graphreplay import registry
from graphreplay.testing import zoo
from graphreplay_xpu import XPUGraphedForward
from graphreplay_xpu.capture import capture
from graphreplay_xpu.pools import PoolState

pytestmark = pytest.mark.usefixtures("no_grad", "kept")


# -------------------------------------------------------------------------------------------- devices


def test_other_devices_run_plainly():
    graphed = XPUGraphedForward(lambda *, x: x + 1, device="cpu")
    assert graphed(x=torch.ones(2)).tolist() == [2.0, 2.0]
    assert graphed.disabled_reason == "XPU graphs run on an XPU device, not on cpu"


@pytest.mark.skipif(torch.xpu.is_available(), reason="this machine has an XPU")
def test_without_a_device_the_error_says_why(monkeypatch):
    with pytest.raises(graphreplay.BackendUnavailableError, match=r"^xpu is not here: (this PyTorch|no usable)"):
        XPUGraphedForward(lambda *, x: x, device="xpu")
    monkeypatch.setattr(torch.version, "xpu", "20260101")
    with pytest.raises(
        graphreplay.BackendUnavailableError, match=r"^xpu:1 is not here: no usable Intel GPU or driver$"
    ):
        XPUGraphedForward(lambda *, x: x, device="xpu:1")


def test_a_torch_without_xpu_graphs_is_named(machine, monkeypatch):
    monkeypatch.delattr(torch.xpu, "XPUGraph")
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(graphreplay.BackendUnavailableError, match=r"PyTorch 2\.10\.1 has no torch\.xpu\.XPUGraph"):
        XPUGraphedForward(lambda *, x: x, device="xpu")


def test_the_index_is_filled_in(machine):
    assert XPUGraphedForward.resolve_device(torch.device("xpu")) == torch.device("xpu", 0)
    with xpu_emulation.stream(Stream(1)):
        assert XPUGraphedForward.resolve_device(torch.device("xpu")) == torch.device("xpu", 1)
    with pytest.raises(graphreplay.BackendUnavailableError, match="xpu:2 is not here: this machine has 2 XPU devices"):
        XPUGraphedForward.resolve_device(torch.device("xpu", 2))


def test_the_registry_takes_this_backend(machine, monkeypatch):
    entry = EntryPoint("xpu", "graphreplay_xpu:XPUGraphedForward", registry.GROUP)
    monkeypatch.setattr(registry, "_installed", lambda: {"xpu": entry})
    assert graphreplay.get_graphed_forward_cls("xpu:1") is XPUGraphedForward


def test_another_device_has_streams_of_its_own(machine):
    state = XPUGraphedForward(lambda *, x: x, device="xpu:1")._pool_state
    assert (state.device, state.capture_stream.key, state.last_stream.key) == (torch.device("xpu", 1), (1, 1), (1, 0))


# ------------------------------------------------------------------------------------ failed captures


def fault_inside(act):
    def forward(*, x):
        y = x * 2 + 1 + torch.rand_like(x) * 0
        if xpu_emulation.is_current_stream_capturing():
            act(y)
        return y

    return forward


def leave_another_stream(y):
    xpu_emulation.set_stream(Stream())
    raise ValueError("planned")


INSIDE = {
    "raise": (lambda y: (_ for _ in ()).throw(ValueError("planned")), "planned"),
    "read": (lambda y: y.sum().item(), "makes the host wait"),
    "wait": (lambda y: xpu_emulation.current_stream().record_event().synchronize(), "wait method cannot be used"),
    "stream": (leave_another_stream, "planned"),
    "memory": (lambda y: torch.ones(1 << 16), "OutOfMemoryError: XPU out of memory"),
    "capture": (lambda y: XPUGraph().capture_begin(), "already in the recording state"),
}


def assert_left_as_before(graphed, machine, kept):
    assert (graphed.captures, graphed.num_graphs) == (0, 0)
    assert xpu_emulation.current_stream().key == (0, 0)
    assert not machine.generator_captures
    assert not machine.routed
    assert machine.graphs <= set(kept)
    assert not +machine.uses, "torch keeps a pool whose graph was not kept"
    assert machine.gone == set(machine.uses)
    assert_graphed(wrap(pool=graphed.pool))
    assert_graphed(wrap())


@pytest.mark.parametrize("fault", INSIDE)
def test_a_fault_inside_a_capture_leaves_the_device_as_it_was(fault, machine, kept):
    act, reason = INSIDE[fault]
    machine.limit = 1 << 16
    graphed = wrap(fault_inside(act))
    torch.manual_seed(3)
    torch.rand_like(X)
    after_one_call = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(graphed(x=X), X * 2 + 1)
    assert reason in graphed.disabled_reason
    assert torch.equal(torch.get_rng_state(), after_one_call)
    assert kept == []
    assert_left_as_before(graphed, machine, kept)


@pytest.mark.filterwarnings("ignore:The XPU Graph is empty")  # as in programs; pytest would make it an error
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("begin", "torch could not begin it: begin_recording failed"),
        ("end", "torch could not end it: end_recording failed"),
        ("finalize", "torch could not end it: finalize failed"),
        ("lose", "the graph is empty, though the forward runs aten.mul.Tensor: its work went past the capture"),
    ],
)
def test_a_capture_that_torch_fails_leaves_the_device_as_it_was(fault, reason, machine, kept):
    machine.faults = {fault}
    graphed = wrap()
    assert torch.equal(graphed(x=X), X * 2 + 1)
    assert graphed.disabled_reason == f"capture failed: {reason}"
    assert machine.faults == set()
    state = graphed.pool.backend
    assert len(kept) == (fault != "lose")
    assert state.capture_stream.key == ((0, 1) if fault == "lose" else (0, 2)), "a stream that may be recorded is left"
    assert_left_as_before(graphed, machine, kept)


def test_two_faults_in_a_row_leave_no_memory_routed(machine, kept):
    """The capture that sets the random generator right fails as well."""
    machine.lasting = {"begin"}
    graphed = wrap()
    assert torch.equal(graphed(x=X), X * 2 + 1)
    assert graphed.disabled_reason == (
        "capture failed: torch could not begin it: begin_recording failed; "
        "the random generator may still be in it: begin_recording failed"
    )
    assert [graph._pool for graph in kept] == list(machine.uses)
    assert len(kept) == 2
    assert not machine.routed
    machine.lasting.clear()
    machine.generator_captures = False  # nothing could be done about it, and it was said
    assert_left_as_before(graphed, machine, kept)


def test_the_capture_that_mends_cannot_end(machine, kept):
    machine.lasting = {"end"}
    state = PoolState(torch.device("xpu", 0))
    with pytest.raises(KeyboardInterrupt) as caught:
        capture(interrupt, state)
    machine.lasting.clear()
    (note,) = caught.value.__notes__
    assert note.startswith("and torch could not end it: end_recording failed; the random generator may still be in it")
    assert len(kept) == 2
    assert state.capture_stream.key == (0, 3), "both streams may be recorded"
    assert not machine.routed
    assert not +machine.uses
    machine.generator_captures = False


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["capture_begin", "capture_end"])
@pytest.mark.parametrize("error", [KeyboardInterrupt("planned"), TypeError("planned")], ids=["interrupt", "error"])
def test_another_error_than_torchs_leaves_the_pool_too(name, error, machine, monkeypatch, kept):
    state = PoolState(torch.device("xpu", 0))
    memory = state.memory
    real = getattr(XPUGraph, name)

    def fail(graph, **kwargs):
        monkeypatch.setattr(XPUGraph, name, real)
        graph._scope.close()  # the emulation's own: a device records nothing of what is run by others
        raise error

    monkeypatch.setattr(XPUGraph, name, fail)
    with pytest.raises(type(error), match="planned"):
        capture(lambda: X * 2, state)
    assert memory._graphs == 0
    assert not +machine.uses
    assert not machine.routed
    assert not machine.generator_captures
    graph, y = capture(lambda: X * 2, state)
    assert torch.equal(y, X * 2)
    graph.reset()


def test_an_error_of_the_forward_that_looks_into_an_empty_graph_leaves_the_pool(machine):
    runs = []

    def forward(*, x):
        runs.append(x)
        if len(runs) == 4:  # the call's own, a warm-up, the capture, and then this one
            raise ValueError("planned")
        return x * 2 + 1

    machine.faults = {"lose"}
    graphed = wrap(forward)
    assert torch.equal(graphed(x=X), X * 2 + 1)
    assert "ValueError: planned" in graphed.disabled_reason
    assert graphed.pool.backend.memory._graphs == 0
    assert not +machine.uses
    assert_graphed(wrap(pool=graphed.pool))


def test_other_graphs_of_the_pool_stay_where_they_are(machine, kept):
    graphed = wrap()
    graphed(x=X)
    before = graphed.pool.backend.memory
    machine.faults = {"end"}
    failing, later = wrap(pool=graphed.pool), wrap(pool=graphed.pool)
    failing(x=X)
    assert "torch could not end it" in failing.disabled_reason
    assert_graphed(later)
    assert torch.equal(graphed(x=X), X * 2 + 1)
    assert graphed.pool.backend.memory is not before
    assert [len(graphs) for graphs in machine.pools.values() if graphs] == [1, 1], "later graphs are in other memory"
    for wrapper in (graphed, later):
        wrapper.close()
    assert before._graphs == graphed.pool.backend.memory._graphs == 0


def test_streams_that_are_recorded_for_good_are_not_taken_again(machine, kept):
    machine.faults = {"end"}
    wrap()(x=X)
    recorded = {key for key, queue in machine.queues.items() if queue.recording}
    assert recorded == {(0, 1)}
    for _ in range(xpu_emulation.STREAMS + 8):
        graphed = wrap()
        assert_graphed(graphed)
        assert graphed.pool.backend.capture_stream.key not in recorded


def test_where_every_stream_is_recorded_a_capture_is_refused(machine, kept, monkeypatch):
    monkeypatch.setattr(xpu_emulation, "STREAMS", 1)
    machine.lasting = {"end"}
    wrap()(x=X)
    machine.lasting.clear()
    graphed = wrap()
    assert torch.equal(graphed(x=X), X * 2 + 1)
    assert not graphed.enabled
    machine.generator_captures = False


@pytest.mark.parametrize("action", ["always", "error"])
def test_another_warning_of_torch_is_not_taken_for_an_empty_graph(action, machine, monkeypatch):
    real = XPUGraph.capture_end

    def noisy(graph):
        real(graph)
        warnings.warn("something else that torch says", stacklevel=1)

    monkeypatch.setattr(XPUGraph, "capture_end", noisy)
    graphed = wrap()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter(action)
        assert torch.equal(graphed(x=X), X * 2 + 1)
    if action == "always":
        assert [str(warning.message) for warning in told] == ["something else that torch says"]
        assert (graphed.captures, graphed.disabled_reason) == (1, None)
    else:
        assert "UserWarning: something else that torch says" in graphed.disabled_reason
        assert not +machine.uses


def test_a_fault_and_a_capture_that_cannot_end(machine, kept):
    machine.faults = {"end"}
    graphed = wrap(fault_inside(INSIDE["raise"][0]))
    assert torch.equal(graphed(x=X), X * 2 + 1)
    assert "planned" in graphed.disabled_reason
    assert len(kept) == 1
    assert_left_as_before(graphed, machine, kept)


def test_an_empty_graph_of_a_forward_that_computes_nothing_is_kept(machine):
    graphed = wrap(lambda *, x: (x.t(), x[1:]))
    for seed in range(3):
        x = zoo.rows(3, seed)
        assert all(map(torch.equal, graphed(x=x), (x.t(), x[1:])))
    assert (graphed.captures, graphed.stats()["replays"]) == (1, 2)


def test_collectives_run_eagerly_and_say_why(machine, tmp_path):
    def forward(*, x):
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        graphed = wrap(forward, group=dist.group.WORLD)
        for _ in range(3):
            assert torch.equal(graphed(x=X), X * 2 + 1)
    finally:
        dist.destroy_process_group()
    assert graphed.captures == 0
    assert "the forward runs collectives: XPU graphs hold none" in graphed.disabled_reason
    assert graphed.stats()["eager_reasons"] == {graphed.disabled_reason: 2}
