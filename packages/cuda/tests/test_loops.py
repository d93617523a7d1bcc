"""while_loop: one meaning eagerly, in a capture, and inside a graphed forward."""

import pytest
import torch
from cuda_health import assert_healthy

import graphreplay
from graphreplay_cuda import ConditionalBodyError, CUDAGraph, CUDAGraphedForward, PredicateError, graph, while_loop

gpu = pytest.mark.cuda
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def power(x, trips):
    """x doubled as often as trips says, and the steps that took."""
    count = torch.zeros((), dtype=torch.int32, device=x.device)
    return while_loop(lambda x, i: i < trips, lambda x, i: (x * 2, i + 1), (x, count))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("trips", [0, 1, 7])
def test_eagerly_it_is_a_loop(device, trips):
    x = torch.ones(3, device=device)
    y, count = power(x, torch.tensor(trips, device=device))
    assert (y.tolist(), count.item()) == ([2.0**trips] * 3, trips)
    assert x.tolist() == [1.0] * 3
    assert y.data_ptr() != x.data_ptr(), "the result is never the argument"


@pytest.mark.parametrize("device", DEVICES)
def test_a_body_may_permute_what_it_carries(device):
    a, b = torch.zeros(4, device=device), torch.ones(4, device=device)
    n = torch.zeros((), dtype=torch.int64, device=device)
    a, b, _ = while_loop(lambda a, b, n: n < 10, lambda a, b, n: (b, a + b, n + 1), (a, b, n))
    assert (a[0].item(), b[0].item()) == (55.0, 89.0)


@pytest.mark.parametrize("device", DEVICES)
def test_bodies_may_change_the_containers_that_they_are_given(device):
    def cond(tree, n):
        tree["cond was here"] = n
        return n < 3

    def body(tree, n):
        assert list(tree) == ["x"]
        tree["x"] = tree["x"] + 1
        return tree, n + 1

    given = {"x": torch.zeros(2, device=device)}
    tree, n = while_loop(cond, body, (given, torch.zeros((), dtype=torch.int64, device=device)))
    assert (list(tree), tree["x"].tolist(), n.item()) == (["x"], [3.0, 3.0], 3)
    assert given["x"].tolist() == [0.0, 0.0]

    def grows(tree, n):
        tree["y"] = n
        return tree, n + 1

    with pytest.raises(graphreplay.TreeMismatchError, match="gained"):
        while_loop(lambda tree, n: n < 3, grows, (given, n * 0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("carry", [lambda x: x.expand(4), lambda x: x.repeat(8)[::2], lambda x: x[0].expand(2, 4)[0]])
def test_any_layout_is_carried(device, carry):
    x, n = torch.ones(1, device=device), torch.zeros((), dtype=torch.int64, device=device)
    y, _ = while_loop(lambda y, n: n < 3, lambda y, n: (y * 2, n + 1), (carry(x), n))
    assert y.tolist() == [8.0] * 4


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (lambda x, i: (x + 1, i + 1), "int 0 became int 1; carry numbers that change as tensors"),
        (lambda x, i: x + 1, "return a tuple, as"),
    ],
)
def test_the_errors_say_what_to_do(body, hint):
    with pytest.raises(graphreplay.TreeMismatchError, match=hint):
        while_loop(lambda x, i: x < 3, body, (torch.zeros(()), 0))


def test_the_error_of_a_condition_names_it():
    with pytest.raises(PredicateError, match="cond of a while_loop: a predicate is a tensor, not bool"):
        while_loop(lambda x: True, lambda x: (x,), (torch.zeros(()),))


def test_on_the_cpu_a_graphed_forward_runs_it_eagerly_and_says_why():
    graphed = graphreplay.ReferenceGraphedForward(
        lambda *, x, loop: power(x, torch.tensor(3))[0] if loop else x + 1, device="cpu"
    )
    with torch.no_grad():
        for _ in range(3):
            assert graphed(x=torch.ones(2), loop=True).tolist() == [8.0, 8.0]
            assert graphed(x=torch.ones(2), loop=False).tolist() == [2.0, 2.0]
    assert (graphed.captures, graphed.disabled_reason) == (1, None)
    assert any("while_loop on the CPU" in reason for reason in graphed.stats()["eager_reasons"])


@pytest.mark.parametrize("device", DEVICES)
def test_trees_and_bodies_in_place(device):
    state = ({"x": [torch.zeros(2, device=device)]}, torch.zeros((), dtype=torch.int64, device=device))

    def body(tree, n):
        tree["x"][0].add_(n)
        n += 1
        return tree, n

    tree, n = while_loop(lambda tree, n: n < 5, body, state)
    assert (tree["x"][0].tolist(), n.item()) == ([10.0] * 2, 5)
    assert state[0]["x"][0].tolist() == [0.0] * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (lambda x, n: (x.double(), n + 1), r"carried\[0\]: the body of a while_loop changes it: dtype"),
        (lambda x, n: (x[:1], n + 1), r"carried\[0\]: the body of a while_loop changes it: shape"),
        (lambda x, n: (x,), "lost"),
        (lambda x, n: [x, n + 1], "tuple.* became a list.*return a tuple"),
    ],
)
def test_a_body_that_changes_the_structure_is_refused(device, result, problem):
    state = (torch.ones(3, device=device), torch.zeros((), dtype=torch.int64, device=device))
    with pytest.raises(graphreplay.TreeMismatchError, match=problem):
        while_loop(lambda x, n: n < 2, result, state)


@pytest.mark.parametrize("device", DEVICES)
def test_one_tensor_under_two_names_is_two_values(device):
    x, n = torch.zeros(4, device=device), torch.zeros((), dtype=torch.int64, device=device)
    a, b, c, _ = while_loop(
        lambda a, b, c, n: n < 3, lambda a, b, c, n: (a + 1, b.add_(10), c, n + 1), (x, x, x[:2], n)
    )
    assert (a[0].item(), b[0].item(), c[0].item(), x[0].item()) == (3.0, 30.0, 0.0, 0.0)


def test_gradients_pass_through_the_eager_loop():
    x = torch.tensor(3.0, requires_grad=True)
    n = torch.tensor(0)
    y, _ = while_loop(lambda y, n: n < 3, lambda y, n: (y * y, n + 1), (x, n))
    y.backward()
    assert (y.item(), x.grad.item()) == (3.0**8, 8 * 3.0**7)


def test_what_is_carried_is_a_tuple():
    with pytest.raises(graphreplay.UnsupportedLeafError, match="a tuple of values is carried, not Tensor"):
        while_loop(lambda x: x > 0, lambda x: (x,), torch.ones(1))


@pytest.mark.parametrize("device", DEVICES)
def test_a_condition_is_one_bool(device):
    with pytest.raises(PredicateError, match="of dtype bool"):
        while_loop(lambda x: x, lambda x: (x,), (torch.ones((), device=device),))


@gpu
def test_in_a_capture_it_is_one_node_that_iterates_as_the_device_finds():
    x, trips, made = torch.ones(3, device="cuda"), torch.zeros((), dtype=torch.int32, device="cuda"), CUDAGraph()
    with graph(made):
        y, count = power(x, trips)
        z = y + 1
    for n in (0, 1, 5, 100, 2):
        trips.fill_(n)
        made.replay()
        assert (y.tolist(), count.item(), z[0].item()) == ([2.0**n] * 3, n, 2.0**n + 1)
    assert x.tolist() == [1.0] * 3


@gpu
def test_in_a_capture_permutations_hold():
    trips, made = torch.zeros((), dtype=torch.int64, device="cuda"), CUDAGraph()
    with graph(made):
        start = (torch.zeros(4, device="cuda"), torch.ones(4, device="cuda"), torch.zeros_like(trips))
        a, b, _ = while_loop(lambda a, b, n: n < trips, lambda a, b, n: (b, a + b, n + 1), start)
    for n, expected in ((0, (0.0, 1.0)), (1, (1.0, 1.0)), (10, (55.0, 89.0))):
        trips.fill_(n)
        made.replay()
        assert (a[0].item(), b[0].item()) == expected


@gpu
def test_in_a_capture_one_tensor_under_two_names_is_two_values():
    x, trips, made = torch.zeros(4, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda"), CUDAGraph()

    def body(a, b, n):
        return a + 1, b.add_(10), n + 1

    with graph(made):
        a, b, _ = while_loop(lambda a, b, n: n < trips, body, (x, x, torch.zeros_like(trips)))
    for n in (3, 0, 5):
        trips.fill_(n)
        made.replay()
        assert (a[0].item(), b[0].item(), x[0].item()) == (n, 10 * n, 0)


@gpu
def test_in_a_capture_bodies_may_change_containers():
    trips, made = torch.zeros((), dtype=torch.int64, device="cuda"), CUDAGraph()

    def body(tree, n):
        tree["x"] = tree["x"] + 1
        return tree, n + 1

    with graph(made):
        start = ({"x": torch.zeros(2, device="cuda")}, torch.zeros_like(trips))
        tree, _ = while_loop(lambda tree, n: n < trips, body, start)
    for n in (2, 0, 7):
        trips.fill_(n)
        made.replay()
        assert tree["x"].tolist() == [n, n]


@gpu
def test_in_a_capture_gradients_are_refused():
    weight = torch.ones(2, device="cuda", requires_grad=True)

    def capture():
        with graph(CUDAGraph()):
            while_loop(lambda y: y[0] < 3, lambda y: (y + weight,), (torch.zeros(2, device="cuda"),))

    with pytest.raises(ConditionalBodyError, match="gradients do not pass"):
        capture()
    assert_healthy()
    with torch.no_grad():
        capture()


@gpu
def test_loops_nest():
    trips, made = torch.zeros((), dtype=torch.int64, device="cuda"), CUDAGraph()

    def outer(total, i):
        total, _ = while_loop(lambda t, j: j < i, lambda t, j: (t + 1, j + 1), (total, torch.zeros_like(i)))
        return total, i + 1

    with graph(made):
        start = (torch.zeros_like(trips), torch.zeros_like(trips))
        total, _ = while_loop(lambda t, i: i < trips, outer, start)
    for n in (0, 1, 2, 20):
        trips.fill_(n)
        made.replay()
        assert total.item() == n * (n - 1) // 2


@gpu
def test_random_numbers_in_the_body_are_refused():
    with pytest.raises(ConditionalBodyError, match="random numbers in a while body"), graph(CUDAGraph()):
        zero = torch.zeros((), device="cuda")
        while_loop(lambda x: x < 1, lambda x: (x + torch.rand((), device="cuda"),), (zero,))
    assert_healthy()


@gpu
def test_a_foreign_capture_is_refused():
    zero = torch.zeros((), device="cuda")
    with pytest.raises(graphreplay.CaptureError, match="no CUDAGraph began"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        while_loop(lambda x: x < 1, lambda x: (x + 1,), (zero,))
    torch.cuda.synchronize()


@gpu
def test_a_graphed_forward_replays_other_trip_counts_without_a_new_capture():
    class Steps(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, *, x, trips):
            count = torch.zeros_like(trips)
            y, _ = while_loop(lambda y, i: i < trips, lambda y, i: (torch.tanh(self.linear(y)), i + 1), (x, count))
            return y * 2

    module = Steps().cuda().eval()
    graphed = CUDAGraphedForward(module, device="cuda")
    with torch.inference_mode():
        for n in (0, 3, 9, 1, 0, 12):  # the first count, with which it is captured, runs no body at all
            x = torch.randn(2, 64, device="cuda")
            y = graphed(x=x, trips=torch.tensor(n, device="cuda"))
            for _ in range(n):
                x = torch.tanh(module.linear(x))
            torch.testing.assert_close(y, x * 2)
    assert graphed.disabled_reason is None
    assert (graphed.captures, graphed.stats()["replays"]) == (1, 5)


@gpu
def test_a_graphed_forward_whose_body_draws_random_numbers_runs_eagerly_and_says_why():
    def forward(*, x):
        zero = torch.zeros((), dtype=torch.int64, device="cuda")
        return while_loop(lambda y, i: i < 3, lambda y, i: (y + torch.rand_like(y), i + 1), (x, zero))[0]

    graphed = CUDAGraphedForward(forward, device="cuda")
    with torch.no_grad():
        graphed(x=torch.zeros(4, device="cuda"))
        assert "random numbers in a while body" in graphed.disabled_reason
        torch.cuda.manual_seed(2)
        y = graphed(x=torch.zeros(4, device="cuda"))
        torch.cuda.manual_seed(2)
        assert torch.equal(y, forward(x=torch.zeros(4, device="cuda")))
