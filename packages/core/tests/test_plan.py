"""Recognizing calls without building their key: never where the key differs."""

import enum
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad

import graphreplay.road
from graphreplay import ReferenceGraphedForward
from graphreplay.ambient import Ambient
from graphreplay.looks import looks_of
from graphreplay.plan import MAX_PLANS, Plan, _picker
from graphreplay.request import NO_OPTIONS, Key
from graphreplay.signature import flatten


class Name(enum.StrEnum):
    X = "x"


class Subclass(torch.Tensor):
    pass


def x(*shape, **options):
    return torch.zeros(shape or (2, 3), **options)


def plan_of(kwargs, variant=None):
    ambient = Ambient("cpu")
    signature, leaves = flatten(kwargs, ordered_below=0)
    key = Key(signature, (), (), None)
    return Plan(key, ambient, ambient.read(), kwargs, variant, leaves)


def match(plan, kwargs, variant=None):
    return plan.match(Ambient("cpu").read(), kwargs, variant)


LOOKS = {
    "dtype": lambda: x(dtype=torch.float64),
    "shape": lambda: x(2, 4),
    "fewer dimensions": lambda: x(6),
    "strides": lambda: x(3, 2).t(),
    "strides of one element": lambda: x(2, 3).as_strided((2, 1), (3, 9)),
    "requires_grad": lambda: x(requires_grad=True),
    "a parameter": lambda: nn.Parameter(x(), requires_grad=False),
    "a subclass": lambda: x().as_subclass(Subclass),
    "a lazily negated tensor": lambda: torch._neg_view(x()),
    "a meta tensor": lambda: x(device="meta"),
    "a sparse tensor": lambda: x().to_sparse(),
    "no tensor": lambda: 3,
    "nothing": lambda: None,
}


@pytest.mark.parametrize("other", LOOKS)
def test_a_tensor_that_looks_otherwise_is_not_taken_for_the_same(other):
    check = looks_of([x()])
    assert check(x())
    assert check(torch.full((2, 3), 7.0)[:])
    assert not check(LOOKS[other]())
    assert match(plan_of({"x": x()}), {"x": LOOKS[other]()}) is None


def test_lazily_conjugated_tensors_and_one_object_twice_do_not_look_alike():
    z = x(dtype=torch.complex64)
    assert looks_of([z])(z.clone())
    assert not looks_of([z])(z.conj())
    a, b = x(), x()
    assert looks_of([a, b])(x(), x())
    assert not looks_of([a, b])(a, a)


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, torch.no_grad, partial(torch.autocast, "cpu"), forward_ad.dual_level]
)
def test_tensors_of_inference_mode_and_modes_of_the_thread(mode):
    """Each call's result is that of eager, and a mode that a graph does not know gives it no replay."""
    with torch.inference_mode():
        given = x(4, 4) + 2
    graphed = ReferenceGraphedForward(lambda *, x: (x @ x, torch.is_inference_mode_enabled()), device="cpu")
    for now in (nullcontext, mode, nullcontext, mode):
        for _ in range(2):
            with now():
                outputs = graphed(x=given)
                assert outputs[0].dtype == (given @ given).dtype
                assert outputs[1] == torch.is_inference_mode_enabled()


VALUES = {
    "another int": (1, 2),
    "a bool for an int": (1, True),
    "a float for an int": (1, 1.0),
    "minus zero": (0.0, -0.0),
    "a str enum for its str": ("x", Name.X),
    "a str for None": (None, "None"),
    "an array-like for an int": (1, x(1)),
    "a list for a tuple": ((1,), [1]),
    "a longer list": ([1], [1, 1]),
    "a dict with another name": ({"a": 1}, {"b": 1}),
    "a str enum for a name": ({"x": 1}, {Name.X: 1}),
    "another insertion order": ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
    "a dict for a list": ([], {}),
    "a deeper list": ([1], [[1]]),
}


@pytest.mark.parametrize("case", VALUES)
@pytest.mark.parametrize("where", ["kwargs", "variant"])
def test_another_value_is_not_taken_for_the_same(case, where):
    def call(value):
        return ({"x": x(), "v": value}, None) if where == "kwargs" else ({"x": x()}, value)

    planned = 0
    for one, other in (VALUES[case], VALUES[case][::-1]):
        try:
            plan = plan_of(*call(one))
        except ValueError:  # no plan tells it; the key will
            continue
        planned += 1
        assert match(plan, *call(one)) is not None
        assert match(plan, *call(other)) is None
    assert planned


def test_names_that_are_equal_and_not_identical_are_the_same():
    kwargs = {"".join(("first", str(number))): x() for number in range(3)}
    plan, again = plan_of(kwargs), {f"first{number}": x() for number in range(3)}
    assert not any(a is b for a, b in zip(kwargs, again, strict=True))
    leaves = match(plan, again)
    assert all(a is b for a, b in zip(leaves, again.values(), strict=True))
    assert match(plan, {**again, "first3": x()}) is None
    assert match(plan, dict(list(again.items())[:2])) is None
    renamed = {"first0": x(), "first1": x(), "second": x()}
    assert match(plan, renamed) is None


@pytest.mark.parametrize("positions", [(0,), (2,), (0, 1, 2), (1, 3), (3, 1, 2), ()])
def test_leaves_are_picked_wherever_they_lie(positions):
    """Side by side they are a slice; elsewhere, and out of order, they are picked one by one."""
    assert list(_picker(positions)(["a", "b", "c", "d"])) == ["abcd"[position] for position in positions]


def test_leaves_come_in_the_order_of_the_key():
    kwargs = {"b": x(1), "a": [x(2), {"d": x(3), "c": x(4)}]}
    leaves = match(plan_of(kwargs), kwargs)
    assert [len(leaf) for leaf in leaves] == [len(leaf) for leaf in flatten(kwargs)[1]] == [2, 4, 3, 1]


def test_no_plan_where_leaves_share_or_hide():
    shared = x()
    for kwargs in (
        {"n": 1},
        {"x": shared, "y": shared},
        {1: x()},
        {"x": x(), "v": range(3)},
    ):
        with pytest.raises(ValueError, match=r"^(a|tensors) "):
            plan_of(kwargs)
    with pytest.raises(ValueError, match="modes"), torch.device("cpu"):
        plan_of({"x": x()})


SCALARS = st.one_of(
    st.integers(-2, 2), st.booleans(), st.floats(allow_nan=True), st.sampled_from(["a", "b", None, Name.X, torch.int8])
)
TENSORS = st.builds(
    lambda shape, dtype, turned: torch.zeros(shape, dtype=dtype).t() if turned else torch.zeros(shape, dtype=dtype),
    st.sampled_from([(2, 3), (3, 2), (1, 2), (0, 2)]),
    st.sampled_from([torch.float32, torch.int64]),
    st.booleans(),
)
TREES = st.recursive(
    SCALARS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(["a", "b", Name.X]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.fixed_dictionaries({"x": TENSORS, "tree": TREES}), st.fixed_dictionaries({"x": TENSORS, "tree": TREES}))
@settings(deadline=None)
def test_what_is_recognized_has_an_equal_key(one, other):
    try:
        plan = plan_of(one)
    except ValueError:
        return
    for kwargs in (one, other):
        leaves = match(plan, kwargs)
        signature, expected = flatten(kwargs, ordered_below=0)
        if leaves is not None:
            assert signature == plan.key.signature
            assert len(leaves) == len(expected)
            assert all(a is b for a, b in zip(leaves, expected, strict=True))
    assert match(plan, one) is not None


@pytest.mark.parametrize("shapes", [1, MAX_PLANS, MAX_PLANS + 2])
def test_calls_of_several_shapes_replay_whether_they_are_recognized_or_not(shapes):
    graphed = ReferenceGraphedForward(lambda *, x: x * 2, device="cpu")
    with torch.no_grad():
        for turn in range(4):
            for rows in range(1, shapes + 1):
                given = torch.full((rows, 2), float(turn))
                assert torch.equal(graphed(x=given), given * 2)
    assert graphed.stats()["replays"] == 3 * shapes
    assert len(graphed._plans) == min(shapes, MAX_PLANS)


class Sum(nn.Module):
    """May write its first input, which no key shows."""

    writes = False

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, a, b):
        if self.writes:
            a.add_(1)
        return a * self.weight + b * 2


@pytest.mark.parametrize("dropped", ["by a change", "by other shapes", "by prepare", "by the caller"])
@torch.no_grad()
def test_a_call_that_was_recognized_is_not_captured_with_storage_that_it_shares(dropped):
    module = Sum()
    graphed = ReferenceGraphedForward(module, device="cpu", max_entries=1)
    for _ in range(2):
        graphed(a=torch.randn(4), b=torch.randn(4))
    if dropped == "by other shapes":
        graphed(a=torch.randn(2, 4), b=torch.randn(4))
    elif dropped == "by the caller":
        graphed.evict(a=torch.randn(4), b=torch.randn(4))
    else:
        module.weight = nn.Parameter(torch.full((4,), 3.0))
    both = torch.randn(8)
    if dropped == "by prepare":
        assert graphed.prepare(a=both[:4], b=both[4:])
    else:
        graphed(a=both[:4], b=both[4:])
    for _ in range(3):
        a, b = torch.randn(4), torch.randn(4)
        assert torch.equal(graphed(a=a, b=b), module(a=a, b=b))
    assert torch.equal(graphed(a=both[:4], b=both[4:]), module(a=both[:4], b=both[4:]))


@torch.no_grad()
def test_a_plan_does_not_outlive_what_is_known_of_its_graph():
    module = Sum()
    graphed = ReferenceGraphedForward(module, device="cpu")
    for _ in range(2):
        graphed(a=torch.randn(4), b=torch.randn(4))
    module.writes = True
    graphed.evict(a=torch.randn(4), b=torch.randn(4))
    graphed(a=torch.randn(4), b=torch.randn(4))
    a, b = torch.zeros(4), torch.zeros(4)
    assert torch.equal(graphed(a=a, b=a.view(4)), module(a=b, b=b.view(4)))
    assert torch.equal(a, b)


@dataclass
class Held:
    x: torch.Tensor


@pytest.mark.parametrize(("other", "tries"), [(Held(x()), 1), (torch.zeros(0, 3), 1)])
def test_for_calls_that_no_plan_can_tell_one_is_tried_once_at_most(monkeypatch, other, tries):
    tried = Mock(side_effect=Plan)
    monkeypatch.setattr(graphreplay.road, "Plan", tried)
    graphed = ReferenceGraphedForward(lambda *, x, other: x * 2, device="cpu")
    for turn in range(4):
        assert torch.equal(graphed(x=x() + turn, other=other), (x() + turn) * 2)
    assert (graphed.stats()["replays"], tried.call_count, graphed._plans) == (3, tries, ())


class WritesWhenTold(nn.Module):
    """Reads its inputs, until its attribute, which nobody watches, has it write one."""

    writes = False

    def forward(self, *, x, y):
        return (x.add_(1) if self.writes else x) + y


def replayed_then_told_to_write():
    module = WritesWhenTold()
    graphed = ReferenceGraphedForward(module, device="cpu")
    for _ in range(2):
        graphed(x=x(), y=x())
    module.writes = True
    return module, graphed


def test_a_graph_captured_anew_may_write_what_the_last_one_read():
    module, graphed = replayed_then_told_to_write()
    assert graphed.evict(x=x(), y=x())
    for _ in range(2):
        assert torch.equal(graphed(x=x(), y=x()), module(x=x(), y=x()))
    given, wanted = x(), x()
    assert torch.equal(graphed(x=given[:], y=given[:]), module(x=wanted[:], y=wanted[:]))
    assert torch.equal(given, wanted)


def test_a_call_recognized_before_its_graph_is_captured_anew_takes_the_road():
    _, graphed = replayed_then_told_to_write()
    (plan,), given = graphed._plans, x()
    kwargs = {"x": given[:], "y": given[:]}
    hit = partial(graphed._hit, plan, match(plan, kwargs), kwargs, NO_OPTIONS)
    assert torch.equal(hit()[0], x())
    graphed.evict(x=x(), y=x())
    assert hit() is None
    graphed(x=x(), y=x())  # by another thread, while this one waits
    assert graphed.captures == 2
    assert hit() is None
