"""Branches and loops that the device decides on."""

import random

import pytest
import torch
from cuda_health import assert_healthy, pool_of, reserved

from graphreplay import CaptureError
from graphreplay_cuda import (
    ConditionalBodyError,
    CUDAGraph,
    FeatureUnavailableError,
    GraphStateError,
    PredicateError,
    driver,
    features,
    graph,
)
from graphreplay_cuda.arguments import check_predicate

gpu = pytest.mark.cuda


def flag(value=True, shape=()):
    return torch.full(shape, value, dtype=torch.bool, device="cuda")


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype, device="cuda")


# --------------------------------------------------------------------------------------------- anywhere


@pytest.mark.parametrize(
    ("predicate", "problem"),
    [
        (True, "a predicate is a tensor, not bool"),
        (torch.tensor(1), "of dtype bool, not torch.int64"),
        (torch.tensor([True, False]), "one element, not of shape"),
        (torch.zeros(0, dtype=torch.bool), "one element, not of shape"),
        (torch.tensor([True]).to_sparse(), "plain strided"),
        (torch.tensor(True), "there, not on cpu"),
    ],
)
def test_a_predicate_is_one_bool_on_the_device(predicate, problem):
    with pytest.raises(PredicateError, match=problem) as refused:
        check_predicate(predicate, torch.device("cuda:0"))
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    ("feature", "enough", "too_old", "message"),
    [
        ("if nodes", 12040, 12030, r"if nodes need a driver for CUDA 12\.4 or newer, and this one serves 12\.3"),
        ("while nodes", 13000, 11080, r"while nodes need a driver for CUDA 12\.4 or newer, and this one serves 11\.8"),
        ("else bodies", 12080, 12070, r"else bodies need a driver for CUDA 12\.8 or newer, and this one serves 12\.7"),
    ],
)
def test_an_older_driver_is_told_what_a_feature_takes(feature, enough, too_old, message, monkeypatch):
    monkeypatch.setattr(driver, "version", lambda: enough)
    features.require(feature)
    monkeypatch.setattr(driver, "version", lambda: too_old)
    with pytest.raises(FeatureUnavailableError, match=message):
        features.require(feature)


# ------------------------------------------------------------------------------------------------- nodes


@gpu
def test_an_if_body_runs_where_the_predicate_says():
    x, pred, made = zeros(4), flag(), CUDAGraph()
    made.capture_begin()
    x.add_(1)
    made.begin_capture_to_if_node(pred)
    x.add_(10)
    made.end_capture_to_conditional_node()
    x.mul_(2)
    made.capture_end()
    turns = random.Random(0)
    for _ in range(1000):
        value = turns.random() < 0.5
        x.zero_()
        pred.fill_(value)
        made.replay()
        assert x[0].item() == (22.0 if value else 2.0)


@gpu
def test_predicates_change_in_stream_order_without_waiting():
    x, pred, expected, made = zeros(()), flag(), 0, CUDAGraph()
    with graph(made), made.if_node(pred):
        x.add_(1)
    turns = random.Random(1)
    for _ in range(1000):
        value = turns.random() < 0.5
        pred.fill_(value)
        made.replay()
        expected += value
    assert x.item() == expected


@gpu
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "methods"])
def test_else_runs_where_if_does_not(blocks):
    x, pred, made = zeros(()), flag(), CUDAGraph()
    if blocks:
        with graph(made):
            with made.if_node(pred) as branch:
                x.add_(1)
            with branch.orelse():
                x.add_(50)
    else:
        made.capture_begin()
        made.begin_capture_to_if_node(pred)
        x.add_(1)
        made.end_capture_to_conditional_node()
        made.begin_capture_to_else_node()
        x.add_(50)
        made.end_capture_to_conditional_node()
        made.capture_end()
    expected = 0
    for value in (True, False, False, True, False):
        pred.fill_(value)
        made.replay()
        expected += 1 if value else 50
        assert x.item() == expected


@gpu
def test_an_if_body_that_writes_the_predicate_does_not_start_the_else_body():
    x, pred, made = zeros(()), flag(), CUDAGraph()
    with graph(made):
        with made.if_node(pred) as branch:
            pred.fill_(False)
            x.add_(1)
        with branch.orelse():
            x.add_(50)
    made.replay()
    assert (x.item(), pred.item()) == (1.0, False)


@gpu
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "methods"])
def test_a_while_body_runs_as_often_as_the_device_finds(blocks):
    x, count, pred, made = zeros(4), zeros((), dtype=torch.int32), flag(), CUDAGraph()
    trips = zeros((), dtype=torch.int32)

    def step():
        x.add_(1)
        count.add_(1)
        torch.lt(count, trips, out=pred)

    with graph(made):
        x.zero_()
        count.zero_()
        torch.lt(count, trips, out=pred)
        if blocks:
            with made.while_node(pred) as loop:
                step()
                loop.set(pred)
        else:
            made.begin_capture_to_while_node(pred)
            step()
            made.set_conditional_handle_for_current_node(pred)
            made.end_capture_to_conditional_node()
        x.mul_(3)
    for n in (*range(12), 37, 100, 999, 1000, 0, 2):
        trips.fill_(n)
        made.replay()
        assert x.tolist() == [3.0 * n] * 4


@gpu
def test_predicates_that_the_capture_itself_makes():
    x, count, made = zeros(4), zeros((), dtype=torch.int32), CUDAGraph()
    trips = torch.tensor(6, dtype=torch.int32, device="cuda")
    with graph(made):
        x.zero_()
        count.zero_()
        with made.while_node(count < trips) as loop:
            x.add_(1)
            count.add_(1)
            loop.set(count < trips)
    for _ in range(3):
        made.replay()
        assert x.tolist() == [6.0] * 4


@gpu
def test_a_predicate_lives_as_long_as_the_graph():
    x, made = zeros(4), CUDAGraph()
    pred = flag()
    with graph(made), made.if_node(pred):
        x.add_(1)
    del pred
    filler = [torch.zeros(512, dtype=torch.uint8, device="cuda") for _ in range(64)]
    made.replay()
    assert x.tolist() == [1.0] * 4
    assert len(filler) == 64


@gpu
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_any_shape_of_one_element_in_any_mode(shape, mode):
    x, made = zeros(()), CUDAGraph()
    with graph(made, capture_error_mode=mode), made.if_node(flag(True, shape)):
        x.copy_(x + 1)
    made.replay()
    assert x.item() == 1.0


# ----------------------------------------------------------------------------------------------- nesting


@gpu
@pytest.mark.parametrize("depth", [2, 8, 40])
def test_if_in_if(depth):
    x, pred, made = zeros(()), flag(), CUDAGraph()
    with graph(made):
        x.zero_()
        for _ in range(depth):
            made.begin_capture_to_if_node(pred)
            x.add_(1)
        for _ in range(depth):
            made.end_capture_to_conditional_node()
    for value in (True, False, True):
        pred.fill_(value)
        made.replay()
        assert x.item() == (depth if value else 0)


@gpu
def test_while_in_while_to_depth_eight():
    depth = 8
    total, made = zeros((), dtype=torch.int64), CUDAGraph()
    trips = [torch.ones((), dtype=torch.int32, device="cuda") for _ in range(depth)]
    counts = [zeros((), dtype=torch.int32) for _ in range(depth)]

    def nest(level):
        if level == depth:
            total.add_(1)
            return
        counts[level].zero_()
        with made.while_node(counts[level] < trips[level]) as loop:
            nest(level + 1)
            counts[level].add_(1)
            loop.set(counts[level] < trips[level])

    with graph(made):
        total.zero_()
        nest(0)
    for sizes in ([1] * 8, [2] * 8, [3, 1, 2, 1, 4, 1, 1, 5], [2, 0, 2, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 30]):
        for trip, n in zip(trips, sizes, strict=True):
            trip.fill_(n)
        made.replay()
        expected = 1
        for n in sizes:
            expected *= n
        assert total.item() == expected


@gpu
def test_if_and_else_in_while_and_while_in_if():
    odd_sum, even_sum, made = zeros(()), zeros(()), CUDAGraph()
    count, n, go = zeros((), dtype=torch.int32), zeros((), dtype=torch.int32), flag()
    with graph(made):
        odd_sum.zero_()
        even_sum.zero_()
        count.zero_()
        with made.if_node(go), made.while_node(count < n) as loop:
            with made.if_node((count & 1).bool()) as branch:
                odd_sum.copy_(odd_sum + count)
            with branch.orelse():
                even_sum.copy_(even_sum + count)
            count.add_(1)
            loop.set(count < n)
    for trips, value in ((0, True), (1, True), (9, True), (50, True), (50, False), (2, True)):
        n.fill_(trips)
        go.fill_(value)
        made.replay()
        ran = range(trips if value else 0)
        assert odd_sum.item() == sum(i for i in ran if i % 2)
        assert even_sum.item() == sum(i for i in ran if i % 2 == 0)


@gpu
def test_a_hundred_siblings():
    x, preds, made = zeros(()), [flag() for _ in range(100)], CUDAGraph()
    with graph(made):
        x.zero_()
        for weight, pred in enumerate(preds):
            with made.if_node(pred):
                x.copy_(x + (weight + 1))
    turns = random.Random(2)
    for _ in range(20):
        chosen = [turns.random() < 0.5 for _ in preds]
        for pred, value in zip(preds, chosen, strict=True):
            pred.fill_(value)
        made.replay()
        assert x.item() == sum(w + 1 for w, value in enumerate(chosen) if value)


@gpu
def test_bodies_on_parallel_streams():
    x, y, p, q, made, side = zeros(1 << 18), zeros(1 << 18), flag(), flag(), CUDAGraph(), torch.cuda.Stream()
    with graph(made):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side), made.if_node(p):
            x.copy_(x + 1)
        with made.if_node(q):
            y.copy_(y + 2)
        main.wait_stream(side)
    for a, b in ((True, False), (False, True), (True, True)):
        x.zero_()
        y.zero_()
        p.fill_(a)
        q.fill_(b)
        made.replay()
        assert (x[-1].item(), y[-1].item()) == (1.0 * a, 2.0 * b)


@gpu
def test_fork_and_join_in_a_body():
    x, y, made, side = zeros(4), zeros(4), CUDAGraph(), torch.cuda.Stream()
    with graph(made), made.if_node(flag()):
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            y.copy_(y + 5)
        x.copy_(x + 1)
        here.wait_stream(side)
        x.add_(y)
    made.replay()
    assert x.tolist() == [6.0] * 4


# ------------------------------------------------------------------------------------------------ bodies

OPERATORS = {
    "pointwise": lambda t: torch.sigmoid(t.a * 2) + t.a.abs().sqrt(),
    "reduction": lambda t: t.a.sum(0) + t.a.amax(0),
    "memset": lambda t: torch.zeros(64, 64, device="cuda"),
    "clone": lambda t: t.a.clone(),
    "matmul": lambda t: t.a @ t.a,
    "matmul bf16": lambda t: t.a.bfloat16() @ t.a.bfloat16(),
    "linear and gelu": lambda t: torch.nn.functional.gelu(torch.nn.functional.linear(t.a, t.a, t.a[0])),
    "softmax": lambda t: torch.softmax(t.a, -1),
    "layer norm": lambda t: torch.nn.functional.layer_norm(t.a, (128,)),
    "sort": lambda t: t.a.flatten().sort()[0],
    "topk": lambda t: t.a.topk(5)[0],
    "cumsum": lambda t: t.a.flatten().cumsum(0),
    "gather": lambda t: t.a.gather(1, t.index[None].expand(128, 64)),
    "index_add": lambda t: torch.zeros_like(t.a).index_add_(0, t.index, t.a[:64]),
    "SDPA fp16": lambda t: torch.nn.functional.scaled_dot_product_attention(t.h, t.h, t.h),
    "SDPA fp32": lambda t: torch.nn.functional.scaled_dot_product_attention(*[t.h.float()] * 3),
    "conv2d": lambda t: torch.nn.functional.conv2d(t.a[None, None], t.a[None, None, :3, :3]),
    "embedding": lambda t: torch.nn.functional.embedding(t.index, t.a),
    "foreach": lambda t: torch._foreach_add([t.a, t.a], 1.0)[1],
    "FFT": lambda t: torch.fft.rfft(t.a).abs(),
    "pinned copy": lambda t: t.host.to("cuda", non_blocking=True),
    "allocations": lambda t: sum((t.a + i) * i for i in range(40)),
    "layer with dropout off": lambda t: t.layer(t.a[None]),
}


class Operands:
    def __init__(self):
        torch.manual_seed(0)
        self.a = torch.randn(128, 128, device="cuda")
        self.h = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.float16)
        self.index = torch.randint(0, 128, (64,), device="cuda")
        self.host = torch.randn(128, 128).pin_memory()
        self.layer = torch.nn.TransformerEncoderLayer(128, 4, batch_first=True, device="cuda").eval()


@gpu
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", ["if", "while"])
def test_operators_in_bodies(name, kind):
    operands, make = Operands(), OPERATORS[name]
    with torch.inference_mode():
        make(operands)
        expected = make(operands)
        result, pred, made = torch.zeros_like(expected), flag(), CUDAGraph()
        ran = flag(False)
        with graph(made):
            if kind == "if":
                with made.if_node(pred):
                    result.copy_(make(operands))
            else:
                ran.fill_(False)
                with made.while_node(pred) as loop:
                    result.copy_(make(operands))
                    loop.set(ran)
        for value in (True, False, True):
            result.zero_()
            pred.fill_(value)
            made.replay()
            torch.testing.assert_close(result, expected if value else torch.zeros_like(expected), rtol=1e-3, atol=1e-3)


@gpu
def test_tensors_of_bodies_live_in_the_pool_of_the_graph():
    x, out, pred, made = torch.randn(1 << 20, device="cuda"), zeros(1 << 20), flag(), CUDAGraph()
    with graph(made):
        before = x * 3
        with made.if_node(pred):
            first = before * 2
            second = torch.relu(first) + 1
            with made.if_node(pred):
                inner = second - 1
                out.copy_(inner)
        after = out + 1
        tensors = [before, first, second, inner, after]
        assert {pool_of(t) for t in tensors} == {tuple(made.pool_id)}
        del first, second, inner, tensors
    filler = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(24)]
    made.replay()
    torch.testing.assert_close(out, torch.relu(x * 6))
    assert all(bool((tensor == 7.0).all()) for tensor in filler)
    assert pool_of(filler[0]) == (0, 0)


@gpu
def test_gradients_of_bodies_live_in_the_pool_of_the_graph_too():
    weight = torch.randn(1 << 18, device="cuda", requires_grad=True)
    x, out, made = torch.randn(1 << 18, device="cuda"), zeros(1 << 18), CUDAGraph()

    def gradient():
        return torch.autograd.grad(((weight * x) ** 2).sum(), weight)[0]

    gradient()
    with graph(made, capture_error_mode="thread_local"), made.if_node(flag()):
        made_in_body = gradient()
        out.copy_(made_in_body)
        assert pool_of(made_in_body) == tuple(made.pool_id)
        del made_in_body
    made.replay()
    torch.testing.assert_close(out, (2 * weight * x * x).detach())


@gpu
def test_the_workspaces_of_bodies_are_no_memory_of_their_graph():
    """Survivors of an eviction: a later graph on the same streams must not use memory of an earlier one."""
    a, made, later = torch.randn(256, 256, device="cuda"), CUDAGraph(), CUDAGraph()
    out = zeros(256, 256)
    graphs = (made, later)
    for one in graphs:
        with graph(one), one.if_node(flag()), one.if_node(flag()):
            out.copy_(a @ a)
    made.reset()
    torch.cuda.empty_cache()
    filler = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
    later.replay()
    torch.testing.assert_close(out, a @ a)
    assert all(bool((tensor == 7.0).all()) for tensor in filler)


@gpu
def test_graphs_with_bodies_give_their_memory_back():
    x, made = torch.randn(8 << 20, device="cuda"), CUDAGraph()

    def use():
        with graph(made), made.if_node(flag()):
            y = x * 2
            y.add_(1)
            del y
        made.replay()
        made.reset()

    use()
    before = reserved()
    for _ in range(20):
        use()
    assert reserved() == before


# ----------------------------------------------------------------------------------------------- refusals


def refused_in(kind, body, *, match, error=ConditionalBodyError, **arguments):
    """The body's refusal inside a block of this kind, after which the process is as before."""
    x, made = zeros(4), CUDAGraph()
    with pytest.raises(error, match=match), graph(made, **arguments):
        x.add_(1)
        if kind == "while":
            with made.while_node(flag()) as loop:
                body(made, x)
                loop.set(flag(False))
        elif kind == "if":
            with made.if_node(flag()):
                body(made, x)
        else:
            with made.if_node(flag()) as branch:
                x.add_(1)
            with branch.orelse():
                body(made, x)
    with pytest.raises(GraphStateError):
        made.replay()
    assert_healthy()


@gpu
@pytest.mark.parametrize("kind", ["if", "else", "while"])
def test_random_numbers_are_refused(kind):
    refused_in(kind, lambda made, x: x.copy_(torch.rand(4, device="cuda")), match="random numbers in a .* body")
    refused_in(kind, lambda made, x: torch.nn.functional.dropout(x, 0.5), match="draw them before the body")


@gpu
def test_random_numbers_before_and_after_bodies_are_as_in_eager():
    y, made = zeros(8), CUDAGraph()
    with graph(made):
        first = torch.rand(4, device="cuda")
        with made.if_node(flag()):
            y[:4].copy_(first)
        y[4:].copy_(torch.rand(4, device="cuda"))
    torch.cuda.manual_seed(11)
    made.replay()
    torch.cuda.manual_seed(11)
    assert torch.equal(y, torch.cat([torch.rand(4, device="cuda"), torch.rand(4, device="cuda")]))


@gpu
def test_a_while_body_that_never_sets_its_predicate_is_refused():
    x, made = zeros(4), CUDAGraph()
    with pytest.raises(ConditionalBodyError, match="would never end"), graph(made), made.while_node(flag()):
        x.add_(1)
    assert_healthy()
    made.capture_begin()
    made.begin_capture_to_while_node(flag())
    x.zero_()
    with pytest.raises(ConditionalBodyError, match="would never end"):
        made.end_capture_to_conditional_node()
    made.set_conditional_handle_for_current_node(flag(False))  # it is still open
    made.end_capture_to_conditional_node()
    made.capture_end()
    made.replay()
    assert_healthy()


@gpu
@pytest.mark.parametrize("kind", ["if", "while"])
def test_work_on_the_parent_stream_is_refused(kind):
    parents = []

    def body(made, x):
        with torch.cuda.stream(made._capture.stream):
            x.add_(1)
        parents.append(1)

    refused_in(kind, body, match="would run whatever the predicate says")
    assert parents == [1]


@gpu
def test_waiting_for_the_device_in_a_body_is_refused():
    refused_in("if", lambda made, x: x.sum().item(), match="captur", error=RuntimeError)
    refused_in("while", lambda made, x: torch.cuda.synchronize(), match="captur", error=RuntimeError)


@gpu
def test_an_unjoined_fork_in_a_body_is_refused():
    side = torch.cuda.Stream()

    def body(made, x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    refused_in("if", body, match="not joined")


@gpu
def test_a_host_callback_in_a_body_is_refused():
    def body(made, x):
        import ctypes

        runtime = ctypes.CDLL("libcuda.so.1")
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
        body.keep = callback
        stream = torch.cuda.current_stream().cuda_stream
        assert runtime.cuLaunchHostFunc(ctypes.c_void_p(stream), callback, None) == 0

    refused_in("if", body, match="holds HOST nodes")


@gpu
def test_events_of_other_streams_in_a_body_are_refused():
    def body(made, x):
        event = torch.cuda.Event(external=True)
        event.record(torch.cuda.current_stream())
        body.keep = event

    refused_in("if", body, match="holds EVENT_RECORD nodes")


@gpu
def test_bodies_that_are_left_open_are_refused_and_closed():
    x, made = zeros(4), CUDAGraph()
    with pytest.raises(ConditionalBodyError, match="was left open"), graph(made), made.if_node(flag()):
        made.begin_capture_to_if_node(flag())
        x.add_(1)
    assert_healthy()
    with pytest.raises(GraphStateError, match="capture_end with an open if body"), graph(made):
        made.begin_capture_to_if_node(flag())
    assert_healthy()
    made.capture_begin()
    made.begin_capture_to_if_node(flag())
    with pytest.raises(GraphStateError, match="capture_end with an open if body"):
        made.capture_end()
    made.end_capture_to_conditional_node()
    with pytest.raises(GraphStateError, match="no conditional body is open"):
        made.end_capture_to_conditional_node()
    made.capture_end()
    made.replay()
    assert_healthy()


@gpu
def test_an_error_that_is_swallowed_outside_the_body_still_spoils_the_capture():
    x, made = zeros(4), CUDAGraph()

    def capture():
        with graph(made):
            try:
                with made.if_node(flag()):
                    x.add_(1)
                    raise KeyError("half a body")
            except KeyError:
                x.add_(2)

    with pytest.raises(CaptureError, match="given up: its if body raised KeyError"):
        capture()
    assert_healthy()


@gpu
@pytest.mark.parametrize("pred", [True, torch.ones((), dtype=torch.bool), torch.ones(2, dtype=torch.bool)])
def test_a_bad_predicate_is_refused_before_anything_changed(pred):
    x, made = zeros(4), CUDAGraph()
    with graph(made):
        with pytest.raises(PredicateError):
            made.begin_capture_to_if_node(pred)
        with made.while_node(flag()) as loop:
            x.add_(1)
            with pytest.raises(PredicateError):
                loop.set(pred)
            loop.set(flag(False))
    made.replay()
    assert x.tolist() == [1.0] * 4


@gpu
def test_set_belongs_to_the_innermost_while_body():
    x, made = zeros(4), CUDAGraph()
    with graph(made):
        with pytest.raises(ConditionalBodyError, match="no while body"):
            made.set_conditional_handle_for_current_node(flag())
        with made.while_node(flag()) as loop:
            with made.if_node(flag()):
                x.add_(1)
                with pytest.raises(ConditionalBodyError, match="inside a body within it"):
                    loop.set(flag())
                with pytest.raises(ConditionalBodyError, match="no while body"):
                    made.set_conditional_handle_for_current_node(flag())
            loop.set(flag(False))
        with pytest.raises(ConditionalBodyError, match="outside the loop's own body"):
            loop.set(flag())
    made.replay()
    assert x.tolist() == [1.0] * 4


@gpu
def test_else_follows_its_if_at_once():
    x, made = zeros(4), CUDAGraph()
    with graph(made):
        with pytest.raises(ConditionalBodyError, match="follows its if body at once"):
            made.begin_capture_to_else_node()
        with made.if_node(flag(False)) as first:
            x.add_(1)
        x.add_(100)
        with pytest.raises(ConditionalBodyError, match="follows its if body at once"), first.orelse():
            x.add_(1)
        with made.if_node(flag(False)) as second:
            x.add_(1)
        with pytest.raises(ConditionalBodyError, match="follows its if body at once"), first.orelse():
            x.add_(1)
        with second.orelse():
            x.add_(10)
        with pytest.raises(ConditionalBodyError, match="follows its if body at once"), second.orelse():
            x.add_(1)
    made.replay()
    assert x.tolist() == [110.0] * 4


@gpu
@pytest.mark.parametrize("feature", ["if nodes", "while nodes", "else bodies"])
def test_an_older_driver_refuses_the_feature_and_captures_the_rest(feature, monkeypatch):
    x, made = zeros(4), CUDAGraph()
    monkeypatch.setattr(driver, "version", lambda: 12070 if feature == "else bodies" else 12030)
    with graph(made):
        x.add_(1)
        with pytest.raises(FeatureUnavailableError, match=feature):
            if feature == "while nodes":
                made.begin_capture_to_while_node(flag())
            else:
                with made.if_node(flag()) as branch:
                    x.add_(1)
                with branch.orelse():
                    x.add_(1)
    made.replay()
    assert x.tolist() == [2.0 if feature == "else bodies" else 1.0] * 4


@gpu
def test_fifty_failed_bodies_keep_no_memory():
    x = torch.randn(1024, 1024, device="cuda")

    def fail(fault):
        made = CUDAGraph()
        with pytest.raises((RuntimeError, KeyError)), graph(made), made.if_node(flag()), made.if_node(flag()):
            y = x * 2
            fault(y)

    def raises(y):
        raise KeyError

    for fault in (raises, lambda y: y.sum().item(), lambda y: torch.rand_like(y)):
        fail(fault)
        before = reserved()
        for _ in range(50):
            fail(fault)
        assert reserved() - before <= 2 << 20
        assert_healthy()


def record_external_event(kept):
    event = torch.cuda.Event(external=True)
    event.record(torch.cuda.current_stream())
    kept.append(event)


@gpu
@pytest.mark.parametrize("how", ["reset", "block", "nested begin"])
def test_what_no_body_holds_does_not_outlive_the_capture(how):
    made, kept = CUDAGraph(), []
    if how == "reset":
        made.capture_begin()
        made.begin_capture_to_if_node(flag())
        made.begin_capture_to_if_node(flag())
        record_external_event(kept)
        made.reset()
    elif how == "block":
        with pytest.raises(KeyError, match="mine"), graph(made):
            made.begin_capture_to_if_node(flag())
            made.begin_capture_to_if_node(flag())
            record_external_event(kept)
            raise KeyError("mine")
    else:
        made.capture_begin()
        made.begin_capture_to_if_node(flag())
        record_external_event(kept)
        with pytest.raises(ConditionalBodyError, match="EVENT_RECORD"):
            made.begin_capture_to_if_node(flag())
        with pytest.raises(ConditionalBodyError):
            made.end_capture_to_conditional_node()
        with pytest.raises(CaptureError, match="given up: the if body holds EVENT_RECORD"):
            made.capture_end()
    assert_healthy()


@gpu
def test_a_block_is_entered_once_and_in_its_own_capture():
    x, made, other = zeros(4), CUDAGraph(), CUDAGraph()
    with graph(made):
        block = made.if_node(flag())
        with block:
            x.add_(1)
            with pytest.raises(GraphStateError, match="entered once"):
                block.__enter__()
        with pytest.raises(GraphStateError, match="entered once"):
            block.__enter__()
        never = made.if_node(flag())
        with pytest.raises(ConditionalBodyError, match="has not been captured"):
            never.orelse().__enter__()
    with graph(other), pytest.raises(GraphStateError, match="a capture that is over"):
        never.__enter__()
    made.replay()
    assert x.tolist() == [1.0] * 4


@gpu
def test_a_body_that_is_ended_inside_its_block_is_refused():
    x, made = zeros(4), CUDAGraph()

    def capture():
        with graph(made), made.if_node(flag()):
            x.add_(1)
            made.end_capture_to_conditional_node()
            x.add_(100)

    with pytest.raises(ConditionalBodyError, match="was ended inside its block"):
        capture()
    assert_healthy()


@gpu
def test_a_capture_may_be_given_up_inside_a_body():
    x, made = zeros(4), CUDAGraph()
    made.capture_begin()
    with made.if_node(flag()):
        x.add_(1)
        made.reset()
    assert_healthy()
    assert x.tolist() == [0.0] * 4


@gpu
def test_keyboard_interrupts_leave_no_trace():
    x, made = zeros(4), CUDAGraph()
    with pytest.raises(KeyboardInterrupt), graph(made), made.if_node(flag()), made.if_node(flag()):
        x.add_(1)
        raise KeyboardInterrupt
    assert_healthy()


@gpu
def test_every_thread_brings_its_own_workspaces_to_bodies():
    import threading

    a, out, graphs = torch.randn(256, 256, device="cuda"), zeros(256, 256), []
    release = threading.Event()

    def capture():
        one = CUDAGraph()
        with graph(one), one.if_node(flag()):
            out.copy_(a @ a)
        graphs.append(one)
        release.wait(60)  # the thread, and with it its cuBLAS handle, stays

    thread = threading.Thread(target=capture)
    thread.start()
    while not graphs:
        thread.join(0.01)
    first = CUDAGraph()
    with graph(first), first.if_node(flag()):
        out.copy_(a @ a)
    first.reset()
    torch.cuda.empty_cache()
    filler = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
    later = CUDAGraph()
    with graph(later), later.if_node(flag()):
        out.copy_(a @ a)
    for one in (later, graphs[0]):
        out.zero_()
        one.replay()
        torch.testing.assert_close(out, a @ a)
    release.set()
    thread.join()
    assert all(bool((tensor == 7.0).all()) for tensor in filler)
