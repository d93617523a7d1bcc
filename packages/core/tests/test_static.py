"""Static copies: what clone_static keeps, what copy_into brings over, and what both refuse."""

import random

import pytest
import torch
from hypothesis import given
from torch import nn

from graphreplay import TreeMismatchError, UnsupportedLeafError, clone_static, copy_into
from graphreplay.testing.compare import NoOperators, same_structure, sharing, tensor_bytes, tensor_leaves
from graphreplay.testing.recipes import Build
from graphreplay.testing.samples import NAMESPACE, OPAQUE, Output, Pair, Point
from graphreplay.testing.strategies import (
    equal_pairs,
    holes,
    kwargs_trees,
    near_miss_pairs,
    opaque_trees,
    restaged_pairs,
)


def storages(tree):
    return {tensor.untyped_storage()._cdata for tensor in tensor_leaves(tree) if tensor.numel()}


def snapshot(tree):
    return [tensor_bytes(tensor) for tensor in tensor_leaves(tree)]


@given(kwargs_trees())
def test_a_static_copy_is_the_same_tree_in_storage_of_its_own(live):
    static = clone_static(live)
    assert same_structure(static, live, values=True, order=True)
    assert sharing(static) == sharing(live)
    assert storages(static).isdisjoint(storages(live))
    assert [type(tensor) for tensor in tensor_leaves(static)] == [torch.Tensor] * len(snapshot(live))
    assert not any(tensor.requires_grad for tensor in tensor_leaves(static))


@given(restaged_pairs())
def test_copying_makes_the_static_copy_equal_to_the_next_call(pair):
    live, following = pair
    static = clone_static(live)
    addresses = [tensor.data_ptr() for tensor in tensor_leaves(static)]
    before = snapshot(following)
    assert copy_into(static, following) == len(before)
    assert same_structure(static, following, values=True, order=True)
    assert sharing(static) == sharing(following)
    assert [tensor.data_ptr() for tensor in tensor_leaves(static)] == addresses
    assert snapshot(following) == before


@given(equal_pairs())
def test_the_order_of_dicts_does_not_matter_to_a_copy(pair):
    static = clone_static(pair[0])
    copy_into(static, pair[1])
    assert same_structure(static, pair[1], values=True)
    assert same_structure(static, pair[0], order=True)


@given(kwargs_trees())
def test_a_static_copy_of_a_static_copy_is_equal_and_apart(live):
    first = clone_static(live)
    second = clone_static(first)
    assert same_structure(first, second, values=True, order=True)
    assert storages(first).isdisjoint(storages(second))


def _movable(a, b):
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)


@given(near_miss_pairs())
def test_a_tree_of_another_structure_is_named_and_changes_nothing(pair):
    live, other, place = pair
    here, there = (eval(place, NAMESPACE | {"kwargs": tree}) for tree in (live, other))
    static = clone_static(live)
    before = snapshot(static)
    if _movable(here, there):  # only strides differ, which may stay so unless tensors share storage or overlap
        try:
            copied = copy_into(static, other)
        except TreeMismatchError:
            copied = 0
        assert snapshot(static) == (snapshot(other) if copied else before)
        assert copied == len(before) or len(storages(static)) < len(before) or 0 in here.stride()
        return
    with NoOperators(), pytest.raises(TreeMismatchError) as mismatch:
        copy_into(static, other)
    assert eval(mismatch.value.path, NAMESPACE | {"kwargs": other}) is there
    assert snapshot(static) == before


@given(opaque_trees())
def test_an_opaque_leaf_in_the_next_call_changes_nothing(planted):
    tree, _, opaque = planted
    static, current = {"x": torch.ones(2)}, {"x": torch.zeros(2), "y": tree}
    with NoOperators(), pytest.raises(UnsupportedLeafError) as refusal:
        copy_into(static, current, root="new")
    assert eval(refusal.value.path, NAMESPACE | {"new": current}) is opaque
    assert static["x"].tolist() == [1.0, 1.0]


@given(holes())
def test_a_static_copy_takes_no_values_along(hole):
    static = clone_static(hole.plug(lambda _: torch.full((2,), 7.0))(Build(random.Random(0))))
    source = hole.plug(lambda _: torch.tensor([1.0, 2.0]))(Build(random.Random(0)))
    copy_into(static, source)
    assert eval(hole.path, NAMESPACE | {"kwargs": static}).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("static", "current", "path", "problem"),
    [
        ({"x": torch.ones(2)}, {"x": torch.ones(3)}, 'kwargs["x"]', "shape (2,) became (3,)"),
        (
            {"x": torch.ones(2)},
            {"x": torch.ones(2).int()},
            'kwargs["x"]',
            "dtype torch.float32 became torch.int32",
        ),
        ({"x": 1}, {"x": 2}, 'kwargs["x"]', "int 1 became int 2"),
        ({"x": 1}, {"y": 1}, "kwargs", 'dict lost ["x"] and gained ["y"]'),
        ({"x": [1]}, {"x": [1, 2]}, 'kwargs["x"]', "list gained [1]"),
        ({"x": [1]}, {"x": (1,)}, 'kwargs["x"]', "a list of 1 became a tuple of 1"),
        ({"x": None}, {"x": torch.ones(1)}, 'kwargs["x"]', "None became a tensor (1,) of torch.float32 on cpu"),
        ({"p": Point(1, 2)}, {"p": Point(1, 3)}, 'kwargs["p"].y', "int 2 became int 3"),
    ],
)
def test_what_a_mismatch_says(static, current, path, problem):
    with pytest.raises(TreeMismatchError) as mismatch:
        copy_into(static, current)
    assert (mismatch.value.path, mismatch.value.problem) == (path, problem)


def test_strides_may_differ_where_nothing_is_shared():
    static = clone_static({"x": torch.zeros(2, 3)})
    assert copy_into(static, {"x": torch.arange(6.0).reshape(3, 2).t()}) == 1
    assert static["x"].tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    assert static["x"].stride() == (3, 1)


def test_strides_may_not_differ_where_elements_overlap():
    static = clone_static({"x": torch.zeros(1).expand(3)})
    with pytest.raises(TreeMismatchError, match="must keep their strides"):
        copy_into(static, {"x": torch.arange(3.0)})
    assert static["x"].tolist() == [0.0, 0.0, 0.0]


def test_another_sharing_of_storage_is_a_mismatch():
    x = torch.ones(4)
    alone = {"a": torch.zeros(4), "b": torch.zeros(4)}
    shared = clone_static({"a": x, "b": x})
    with pytest.raises(TreeMismatchError, match=r"^kwargs: other tensors share storage"):
        copy_into(shared, alone)
    with pytest.raises(TreeMismatchError, match=r"^kwargs: other tensors share storage"):
        copy_into(clone_static(alone), {"a": x, "b": x})
    with pytest.raises(TreeMismatchError, match=r"^kwargs: other tensors share storage"):
        copy_into(clone_static({"a": x[:2], "b": x[2:]}), {"a": x[:2], "b": x[1:3]})
    assert shared["b"].tolist() == [1.0] * 4


def test_a_static_copy_can_be_its_own_next_call():
    static = clone_static({"a": torch.arange(3.0), "b": torch.arange(4.0)[::2]})
    assert copy_into(static, static) == 2
    assert static["a"].tolist() == [0.0, 1.0, 2.0]
    assert static["b"].tolist() == [0.0, 2.0]


def test_writes_through_one_of_two_names_show_in_the_other():
    x = torch.zeros(2, 3)
    static = clone_static({"x": x, "same": x, "row": x[1], "column": x[:, 0]})
    static["row"].fill_(5.0)
    assert static["x"].tolist() == static["same"].tolist() == [[0.0] * 3, [5.0] * 3]
    assert static["column"].tolist() == [0.0, 5.0]
    assert x.sum().item() == 0.0


def test_parameters_become_plain_tensors_without_grad():
    layer = nn.Linear(2, 2)
    static = clone_static({"w": layer.weight, "x": torch.ones(2, requires_grad=True) * 2})
    assert type(static["w"]) is torch.Tensor
    assert not static["w"].requires_grad
    assert not static["x"].requires_grad
    assert copy_into(static, {"w": layer.weight, "x": torch.ones(2, requires_grad=True)}) == 2
    assert not static["w"].requires_grad
    assert not static["x"].requires_grad
    assert static["x"].tolist() == [1.0, 1.0]


def test_copies_made_under_inference_mode_are_ordinary_tensors():
    with torch.inference_mode():
        x = torch.arange(4.0)
        static = clone_static({"x": x, "shared": x[1:], "alone": torch.ones(2)})
    assert not any(tensor.is_inference() for tensor in tensor_leaves(static))
    with torch.inference_mode():
        y = torch.full((4,), 2.0)
        assert copy_into(static, {"x": y, "shared": y[1:], "alone": torch.zeros(2)}) == 3
    static["shared"].add_(1)
    assert static["x"].tolist() == [2.0, 3.0, 3.0, 3.0]
    assert static["alone"].tolist() == [0.0, 0.0]


def test_lazy_views_are_resolved_where_they_are_alone():
    z = torch.tensor([1 + 2j, 3j])
    static = clone_static({"conj": z.conj(), "neg": torch.tensor([1 + 2j, 3j]).conj().imag})
    assert static["conj"].tolist() == [1 - 2j, -3j]
    assert not static["conj"].is_conj()
    assert static["neg"].tolist() == [-2.0, -3.0]
    assert not static["neg"].is_neg()


def test_lazy_views_over_shared_storage_must_stay_as_lazy_as_they_were():
    z = torch.tensor([1 + 2j, 3j])
    static = clone_static({"a": z, "b": [z.conj()]})
    doubled = z * 2
    assert copy_into(static, {"a": doubled, "b": [doubled.conj()]}) == 2
    assert static["a"].tolist() == [2 + 4j, 6j]
    assert static["b"][0].tolist() == [2 - 4j, -6j]
    with pytest.raises(TreeMismatchError, match=r'^kwargs\["b"\]\[0\]: lazily conjugated or negated'):
        copy_into(static, {"a": z, "b": [z[:]]})
    assert static["a"].tolist() == [2 + 4j, 6j]


def test_one_object_under_two_names_stays_one():
    x = torch.ones(2)
    static = clone_static({"a": x, "b": [x], "view": x[:]})
    assert static["b"][0] is static["a"]
    assert static["view"] is not static["a"]
    with pytest.raises(TreeMismatchError, match=r"^kwargs: other tensors share storage"):
        copy_into(static, {"a": x, "b": [x[:]], "view": x[:]})
    y = torch.zeros(2)
    assert copy_into(static, {"a": y, "b": [y], "view": y[:]}) == 3
    assert static["view"].tolist() == [0.0, 0.0]


def test_an_opaque_object_among_many_leaves_stops_the_copy_before_it_starts():
    tree = {"x": torch.ones(2), "pair": Pair(torch.ones(1), OPAQUE["lock"]()), "out": Output(torch.ones(3))}
    with NoOperators(), pytest.raises(UnsupportedLeafError) as refusal:
        clone_static(tree)
    assert refusal.value.path == 'kwargs["pair"].right'


def test_trees_without_tensors_copy_nothing():
    assert clone_static({}) == {}
    assert copy_into({}, {}) == 0
    assert copy_into({"a": [1, "b"]}, {"a": [1, "b"]}) == 0
