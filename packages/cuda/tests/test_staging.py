"""stage_and_launch: inputs copied by the graph itself."""

import os
import threading

import pytest
import torch
from cuda_health import assert_healthy

import graphreplay
from graphreplay_cuda import CUDAGraph, GraphStateError, driver, graph
from graphreplay_cuda.copynode import CopyNode
from graphreplay_cuda.launches import Launches
from graphreplay_cuda.staging import Staging, _apart

gpu = pytest.mark.cuda


# --------------------------------------------------------------------------------------------- anywhere


def test_which_buffers_the_copy_node_can_write():
    base = torch.zeros(64)
    assert _apart([torch.zeros(4), torch.zeros(2, 3), torch.zeros(3, 2).t()]) == [0, 1, 2]
    assert _apart([base[:8], base[8:16], base[16:17]]) == [0, 1, 2]
    assert _apart([base[:8], base[4:16], base[32:40]]) == [2]
    assert _apart([base[:8], base[:8]]) == []
    assert _apart([base[:60], base[4:8], base[60:]]) == [2]
    assert _apart([base[::2], torch.zeros(1).expand(4), torch.zeros(0), torch.zeros(())]) == [2, 3]
    assert _apart([torch.zeros(4, dtype=torch.complex64).conj(), torch.zeros(2)]) == [1]


@pytest.mark.parametrize("method", ["launch", "stage_and_launch"])
def test_a_launch_of_a_graph_that_is_gone_changes_nothing(method, monkeypatch):
    monkeypatch.setattr(driver.thread, "has_context", True)
    buffer, staging = torch.zeros(4), Staging.__new__(Staging)
    staging._node, staging._nowhere = CopyNode.__new__(CopyNode), ()
    staging._node.launches = Launches(torch.device("cpu"))
    staging._node.close("on a graph that is gone")
    staging._static, staging._by_node, staging._rest = [buffer], [], [0]  # it would be written by copy_
    with pytest.raises(GraphStateError, match=r"^stage_and_launch on a graph that is gone$"):
        getattr(staging, method)([torch.ones(4)])
    assert buffer.tolist() == [0.0] * 4
    assert staging._node.launches.last is None


# ------------------------------------------------------------------------------------------------ values


def passing_on(static):
    """A graph that copies its inputs to outputs of their own."""
    made = CUDAGraph()
    with graph(made):
        outputs = [tensor.clone() for tensor in static]
    return made, outputs


@gpu
@pytest.mark.parametrize("count", [0, 1, 4, 15, 64, 128, 135])
def test_every_input_reaches_its_buffer(count):
    static = [torch.zeros(64, 256, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    made, outputs = passing_on(static)
    for _ in range(3):
        inputs = [torch.randn(64, 256, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        made.stage_and_launch(static, inputs)
        assert all(map(torch.equal, outputs, inputs))
        assert all(map(torch.equal, static, inputs))


@gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 15, 16, 17, 255, 256, 4097, 1_000_003])
def test_every_size_and_alignment(dtype, numel):
    offsets = (0, 1, 2, 3, 5, 8)
    wide = [torch.zeros(numel + 16, device="cuda", dtype=dtype) for _ in offsets]
    static = [tensor[offset : offset + numel] for tensor, offset in zip(wide, offsets, strict=True)]
    made, outputs = passing_on(static)
    for shift in (0, 1, 4):
        source = torch.randint(1, 100, (numel + 16,), device="cuda").to(dtype)
        inputs = [source[shift + i : shift + i + numel] for i in range(len(offsets))]
        made.stage_and_launch(static, inputs)
        assert all(map(torch.equal, outputs, inputs))
        for tensor, offset in zip(wide, offsets, strict=True):
            assert tensor[:offset].count_nonzero().item() == 0, "bytes before the buffer"
            assert tensor[offset + numel :].count_nonzero().item() == 0, "bytes behind the buffer"


@gpu
def test_large_and_small_inputs_together():
    static = [torch.zeros(n, device="cuda") for n in (64 << 20, 1, 0, 5, 1 << 20)]
    made, outputs = passing_on(static)
    inputs = [torch.randn(tensor.shape, device="cuda") for tensor in static]
    made.stage_and_launch(static, inputs)
    assert all(map(torch.equal, outputs, inputs))


ODD = {
    "other dtype": (lambda: torch.arange(12, device="cuda", dtype=torch.float64).reshape(3, 4), (3, 4)),
    "other device": (lambda: torch.arange(12, dtype=torch.float32).reshape(3, 4), (3, 4)),
    "pinned": (lambda: torch.arange(12, dtype=torch.float32).reshape(3, 4).pin_memory(), (3, 4)),
    "strided": (lambda: torch.arange(24, device="cuda", dtype=torch.float32).reshape(3, 8)[:, ::2], (3, 4)),
    "transposed": (lambda: torch.arange(12, device="cuda", dtype=torch.float32).reshape(4, 3).t(), (3, 4)),
    "broadcast": (lambda: torch.arange(4, device="cuda", dtype=torch.float32), (3, 4)),
    "expanded": (lambda: torch.arange(3, device="cuda", dtype=torch.float32)[:, None].expand(3, 4), (3, 4)),
    "a number": (lambda: torch.tensor(5.0), (3, 4)),
    "a parameter": (lambda: torch.nn.Parameter(torch.arange(12.0, device="cuda").reshape(3, 4)), (3, 4)),
    "lazily negated": (lambda: torch.arange(12, device="cuda").to(torch.complex64).conj().imag.reshape(3, 4), (3, 4)),
}


@gpu
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("grad", [True, False])
def test_odd_inputs_are_converted_as_copy_does(name, grad):
    make, shape = ODD[name]
    static = [torch.zeros(shape, device="cuda"), torch.zeros(8, device="cuda")]
    made, outputs = passing_on(static)
    given, plain = make(), torch.randn(8, device="cuda")
    expected = torch.zeros(shape, device="cuda").copy_(given.detach())
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            made.stage_and_launch(static, [given, plain])
            assert torch.equal(outputs[0], expected)
            assert torch.equal(outputs[1], plain)


@gpu
def test_odd_buffers_are_written_as_copy_does():
    base, wide = torch.zeros(64, device="cuda"), torch.zeros(4, 6, device="cuda")
    with torch.inference_mode():
        unusual = torch.zeros(3, 8, device="cuda")[:, ::2]
    channels_last = torch.zeros(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last)
    static = [base[:8], base[4:12], wide[:, ::2], unusual, channels_last]
    made, outputs = passing_on(static)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(60):
        inputs = [torch.full(tensor.shape, float(10 * turn + i), device="cuda") for i, tensor in enumerate(static)]
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[turn % 3]):
            made.stage_and_launch(static, inputs)
            results = [output.clone() for output in outputs]
        torch.cuda.synchronize()
        assert results[0].tolist() == [10.0 * turn] * 4 + [10.0 * turn + 1] * 4  # written in order, as by copy_
        assert all(map(torch.equal, results[1:], inputs[1:]))
        assert wide[:, 1::2].count_nonzero().item() == 0


@gpu
def test_inputs_that_are_buffers_are_read_before_any_is_written():
    static = [torch.full((1 << 16,), float(i), device="cuda") for i in range(4)]
    made, outputs = passing_on(static)
    made.stage_and_launch(static, static[1:] + static[:1])
    assert [output[-1].item() for output in outputs] == [1.0, 2.0, 3.0, 0.0]
    made.stage_and_launch(static, static)
    assert [output[-1].item() for output in outputs] == [1.0, 2.0, 3.0, 0.0]
    wide = torch.arange(2048.0, device="cuda")
    buffer = wide[8:1032]
    made, outputs = passing_on([buffer])
    made.stage_and_launch([buffer], [wide[:1024]])
    assert torch.equal(outputs[0], torch.arange(1024.0, device="cuda"))


@gpu
def test_the_lists_are_checked_before_anything_is_written():
    static = [torch.zeros(3, 4, device="cuda"), torch.zeros(8, device="cuda")]
    made, outputs = passing_on(static)
    good = [torch.ones(3, 4, device="cuda"), torch.ones(8, device="cuda")]
    bad = [
        (static, good[:1], graphreplay.ConfigurationError, "1 inputs for 2"),
        (static, [good[0], 5], graphreplay.ConfigurationError, "input 1 is no tensor but int"),
        (static, [good[0], torch.ones(9, device="cuda")], RuntimeError, "size"),
        ([static[0], torch.zeros(8)], good, graphreplay.ConfigurationError, "static input 1 is on cpu"),
        ([static[0], None], good, graphreplay.ConfigurationError, "static input 1 is no plain tensor but NoneType"),
    ]
    for into, inputs, error, message in bad:
        with pytest.raises(error, match=message):
            made.stage_and_launch(into, inputs)
    torch.cuda.synchronize()
    assert all(tensor.count_nonzero().item() == 0 for tensor in static)
    made.stage_and_launch(static, good)
    assert all(map(torch.equal, outputs, good))
    assert_healthy()


# ------------------------------------------------------------------------------------------------- order


def summing(count):
    static = [torch.zeros(64, 256, device="cuda") for _ in range(count)]
    made = CUDAGraph()
    with graph(made):
        y = torch.stack(static).sum(0)
        for _ in range(10):
            y = y * 1.5 - y * 0.5
    return made, static, y


@gpu
def test_back_to_back_without_waiting():
    made, static, y = summing(15)
    wrong = torch.zeros((), device="cuda")
    for _ in range(500):
        inputs = [torch.randn(64, 256, device="cuda") for _ in static]
        made.stage_and_launch(static, inputs)
        expected = torch.stack(inputs).sum(0)
        wrong += ((y - expected).abs() > 1e-3).any()
    assert wrong.item() == 0


@gpu
def test_from_many_streams():
    made, static, y = summing(4)
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    source = [torch.full((64, 256), float(turn), device="cuda") for turn in range(400)]
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    for turn in range(400):
        stream = streams[turn % 4]
        with torch.cuda.stream(stream):
            done.wait(stream)  # y is read before the next launch writes it; the launches order themselves
            made.stage_and_launch(static, [source[turn]] * 4)
            results.append(y.sum())
            done = torch.cuda.Event()
            done.record(stream)
    torch.cuda.synchronize()
    for turn, result in enumerate(results):
        assert result.item() == pytest.approx(4.0 * turn * 64 * 256, rel=1e-4)


@gpu
def test_from_many_threads():
    made, static, _ = summing(4)
    counter, made = torch.zeros(64, 256, device="cuda"), CUDAGraph()
    with graph(made):
        counter.add_(torch.stack(static).sum(0))
    torch.cuda.synchronize()

    def run(value):
        inputs = [torch.full((64, 256), value, device="cuda") for _ in range(4)]
        torch.cuda.current_stream().synchronize()
        for _ in range(100):
            made.stage_and_launch(static, inputs)

    made.stage_and_launch(static, [torch.zeros(64, 256, device="cuda")] * 4)
    threads = [threading.Thread(target=run, args=(float(v),)) for v in (1, 2, 3, 4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    torch.cuda.synchronize()
    assert counter.unique().tolist() == [4.0 * 100 * (1 + 2 + 3 + 4)]


@gpu
def test_a_plain_replay_in_between_copies_nothing():
    static = [torch.zeros(8, device="cuda")]
    made, outputs = passing_on(static)
    made.stage_and_launch(static, [torch.ones(8, device="cuda")])
    static[0].fill_(7.0)
    made.replay()
    assert outputs[0].tolist() == [7.0] * 8
    made.stage_and_launch(static, [torch.full((8,), 2.0, device="cuda")])
    assert outputs[0].tolist() == [2.0] * 8


@gpu
def test_other_static_inputs_take_turns_on_one_graph():
    a, b = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    made, (c, d) = passing_on([a, b])
    made.stage_and_launch([a], [torch.ones(8, device="cuda")])
    made.stage_and_launch([b], [torch.full((8,), 2.0, device="cuda")])
    assert (c[0].item(), d[0].item()) == (1.0, 2.0)
    assert made.staging([b]) is made.staging([b])


@gpu
def test_lists_of_any_length_take_turns_on_one_graph():
    static = [torch.zeros(8, device="cuda") for _ in range(100)]
    made, outputs = passing_on(static)
    for turn, count in enumerate((1, 100, 20, 3, 64, 100)):
        made.stage_and_launch(static[:count], [torch.full((8,), turn + 1.0, device="cuda")] * count)
        assert {output.unique().item() for output in outputs[:count]} == {turn + 1.0}


@gpu
def test_staging_into_a_graph_with_a_loop_and_random_numbers():
    x, n, made = torch.zeros(4, device="cuda"), torch.zeros((), device="cuda", dtype=torch.int32), CUDAGraph()
    count, total = torch.zeros_like(n), torch.zeros(4, device="cuda")
    with graph(made):
        noise = torch.rand(4, device="cuda")
        total.zero_()
        count.zero_()
        with made.while_node(count < n) as loop:
            total.add_(x)
            count.add_(1)
            loop.set(count < n)
    torch.cuda.manual_seed(3)
    for trips in (3, 0, 11):
        made.stage_and_launch([x, n], [torch.full((4,), 2.0, device="cuda"), torch.tensor(trips, dtype=torch.int32)])
        assert total.tolist() == [2.0 * trips] * 4
    torch.cuda.manual_seed(3)
    drawn = [torch.rand(4, device="cuda") for _ in range(3)]
    assert torch.equal(noise, drawn[-1])


@gpu
def test_an_empty_graph_takes_inputs_too():
    static, made = torch.zeros(8, device="cuda"), CUDAGraph()
    with graph(made):
        pass
    made.stage_and_launch([static], [torch.ones(8, device="cuda")])
    assert static.tolist() == [1.0] * 8


@gpu
def test_a_launch_inside_a_capture_is_refused():
    made, static, _ = summing(2)
    inputs, outer = [torch.ones(64, 256, device="cuda")] * 2, CUDAGraph()
    made.stage_and_launch(static, inputs)
    with graph(outer):
        y = static[0] * 2
        with pytest.raises(GraphStateError, match="inside a capture, which"):
            made.staging(static).launch(inputs)
        with outer.if_node(torch.ones((), dtype=torch.bool, device="cuda")):
            with pytest.raises(GraphStateError, match="inside a capture, which"):
                made.stage_and_launch(static, inputs)
            y.add_(1)
    outer.replay()
    assert y.unique().tolist() == [3.0]
    assert_healthy()


@gpu
def test_the_first_launch_comes_from_a_fresh_thread():
    made, static, y = summing(2)
    inputs = [torch.ones(64, 256, device="cuda")] * 2
    torch.cuda.synchronize()
    thread = threading.Thread(target=made.stage_and_launch, args=(static, inputs))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, torch.full_like(y, 2.0))


@gpu
def test_a_fresh_thread_launches_what_another_has_prepared():
    made, static, y = summing(2)
    inputs = [torch.ones(64, 256, device="cuda")] * 2
    made.stage_and_launch(static, [torch.zeros(64, 256, device="cuda")] * 2)
    torch.cuda.synchronize()
    for launch in (lambda: made.staging(static).launch(inputs), lambda: made.stage_and_launch(static, inputs)):
        y.zero_()
        torch.cuda.synchronize()
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        torch.testing.assert_close(y, torch.full_like(y, 2.0))


@gpu
def test_staging_of_a_graph_that_was_reset_is_refused():
    made, static, _ = summing(2)
    inputs = [torch.ones(64, 256, device="cuda")] * 2
    staging = made.staging(static)
    staging.stage_and_launch(inputs)
    made.reset()
    for launch in (staging.launch, staging.stage_and_launch):
        with pytest.raises(GraphStateError, match="a graph that was reset"):
            launch(inputs)
    with graph(made):
        y = static[0] + static[1]
    with pytest.raises(GraphStateError, match="a graph that was reset"):
        staging.launch(inputs)
    made.stage_and_launch(static, inputs)
    assert y.unique().tolist() == [2.0]


@gpu
def test_buffers_of_a_graph_that_was_reset_stay_as_they_are():
    base = torch.zeros(64, device="cuda")
    static = [base[:8], base[4:12]]  # these are written by copy_
    made, _ = passing_on(static)
    staging, inputs = made.staging(static), [torch.ones(8, device="cuda")] * 2
    made.reset()
    for launch in (staging.launch, staging.stage_and_launch):
        with pytest.raises(GraphStateError, match="a graph that was reset"):
            launch(inputs)
    assert base.count_nonzero().item() == 0


@gpu
def test_a_refused_launch_leaves_no_trace_in_the_capture():
    base, outer = torch.zeros(64, device="cuda"), CUDAGraph()
    static = [base[:8], base[4:12]]  # these are written by copy_
    made, _ = passing_on(static)
    inputs = [torch.ones(8, device="cuda")] * 2
    made.stage_and_launch(static, inputs)
    base.zero_()
    with graph(outer):
        with pytest.raises(GraphStateError, match="stage_and_launch inside a capture"):
            made.stage_and_launch(static, inputs)
        with pytest.raises(GraphStateError, match="replay inside a capture"):
            made.replay()
        y = base + 1
    outer.replay()
    made.reset()
    assert y.unique().tolist() == [1.0]


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_graph_on_another_device_than_the_current_one():
    device, made = torch.device("cuda:1"), CUDAGraph()
    static = [torch.zeros(64, 64, device=device) for _ in range(3)]
    with graph(made, stream=torch.cuda.Stream(device)):
        y = static[0] + static[1] @ static[2]
        with made.if_node(torch.ones((), dtype=torch.bool, device=device)):
            y.add_(1)
    assert torch.cuda.current_device() == 0
    for launch in (lambda a: made.stage_and_launch(static, a), lambda a: made.staging(static).launch(a)):
        inputs = [torch.randn(64, 64, device=device) for _ in range(3)]
        launch(inputs)
        torch.testing.assert_close(y, inputs[0] + inputs[1] @ inputs[2] + 1)
        assert torch.cuda.current_device() == 0


def without_memory():
    empty = torch.zeros(3, 4, device="cuda")
    empty.untyped_storage().resize_(0)
    return empty


@gpu
def test_buffers_and_inputs_have_memory_of_their_own():
    static = [torch.zeros(3, 4, device="cuda")]
    made, _ = passing_on(static)
    for bad, problem in (
        (torch.zeros(3, 1, device="cuda").expand(3, 4), "overlaps itself"),
        (torch.zeros(8, device="cuda").as_strided((3, 4), (1, 1)), "overlaps itself"),
        (without_memory(), "static input 0 has no memory"),
        (torch.zeros(3, 4, device="cuda").to_sparse(), "no plain tensor"),
        (torch.nested.nested_tensor([torch.zeros(2)], device="cuda", layout=torch.jagged), "no plain tensor"),
    ):
        with pytest.raises(graphreplay.ConfigurationError, match=problem):
            made.stage_and_launch([bad], static)
    for bad, problem in ((without_memory(), "input 0 has no memory"), (None, "input 0 is no tensor but NoneType")):
        with pytest.raises(graphreplay.ConfigurationError, match=problem):
            made.stage_and_launch(static, [bad])
    with pytest.raises(graphreplay.ConfigurationError, match="an input has no memory"):
        made.staging(static).launch([without_memory()])
    for launch in (lambda inputs: made.stage_and_launch(static, inputs), made.staging(static).launch):
        with pytest.raises(graphreplay.ConfigurationError, match="inputs are a sequence of tensors, not NoneType"):
            launch(None)
    made.stage_and_launch(static, (torch.ones(3, 4, device="cuda") for _ in range(1)))
    assert static[0].unique().tolist() == [1.0]
    assert_healthy()


@gpu
@pytest.mark.parametrize("odd", [lambda: torch.ones(8), lambda: torch.ones(8, device="cuda", dtype=torch.float64)])
def test_odd_inputs_inside_a_capture_are_refused_before_they_are_converted(odd):
    static, outer, given = [torch.zeros(8, device="cuda")], CUDAGraph(), [odd()]
    made, outputs = passing_on(static)
    made.stage_and_launch(static, given)
    with graph(outer):
        with pytest.raises(GraphStateError, match="stage_and_launch inside a capture"):
            made.stage_and_launch(static, given)
        y = static[0] + 1
    outer.replay()
    assert y.tolist() == [2.0] * 8
    assert outputs[0].tolist() == [1.0] * 8


@gpu
def test_buffers_passed_in_again_from_other_streams_without_waiting():
    static = [torch.full((1 << 20,), float(i), device="cuda") for i in range(3)]
    made = CUDAGraph()
    with graph(made):
        for tensor in static:
            for _ in range(10):
                tensor.add_(1)
    streams = [torch.cuda.Stream() for _ in range(3)]
    made.stage_and_launch(static, [tensor.clone() for tensor in static])
    torch.cuda.synchronize()
    for turn in range(30):
        with torch.cuda.stream(streams[turn % 3]):
            made.stage_and_launch(static, static[1:] + static[:1])
    torch.cuda.synchronize()
    assert [tensor.unique().tolist() for tensor in static] == [[310.0], [311.0], [312.0]]


@gpu
def test_a_forked_child_cannot_launch():
    made, static, _ = summing(2)
    inputs = [torch.ones(64, 256, device="cuda")] * 2
    staging = made.staging(static)
    staging.launch(inputs)
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        try:
            staging.launch(inputs)
        except GraphStateError as error:
            os._exit(7 if "forked" in str(error) else 1)
        except BaseException:
            os._exit(2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    staging.launch(inputs)
    torch.cuda.synchronize()
