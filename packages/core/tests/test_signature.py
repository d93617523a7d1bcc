"""Keys: equal exactly where one graph can serve both trees."""

import itertools

import pytest
import torch
from hypothesis import given
from torch import nn

from graphreplay import Signature, explain, kwargs_signature
from graphreplay.signature import flatten
from graphreplay.testing.compare import same_structure
from graphreplay.testing.samples import NEAR, VALUES
from graphreplay.testing.strategies import equal_pairs, kwargs_trees, near_miss_pairs
from graphreplay.tree import tensors


@given(equal_pairs())
def test_the_same_structure_has_the_same_key(pair):
    a, b = map(kwargs_signature, pair)
    assert a == b
    assert hash(a) == hash(b)
    assert explain(*pair) is None


@given(near_miss_pairs())
def test_a_single_change_is_another_key(pair):
    a, b, _ = pair
    assert kwargs_signature(a) != kwargs_signature(b)
    assert not same_structure(a, b)


@given(kwargs_trees(), kwargs_trees())
def test_keys_are_equal_exactly_if_structures_are(a, b):
    assert (kwargs_signature(a) == kwargs_signature(b)) is same_structure(a, b)


@given(kwargs_trees())
def test_flatten_finds_the_tensors_in_the_order_of_the_tree(tree):
    for depth in (0, 1, 64):
        assert [id(leaf) for leaf in flatten(tree, ordered_below=depth)[1]] == [id(leaf) for leaf in tensors(tree)]


@given(equal_pairs())
def test_a_call_is_keyed_by_the_order_of_dicts_too(pair):
    a, b = (flatten(tree, ordered_below=0)[0] for tree in pair)
    assert (a == b) is same_structure(*pair, order=True)


def test_no_two_values_share_a_key():
    keys = [kwargs_signature({"v": make()}) for make in VALUES]
    assert [(i, j) for (i, a), (j, b) in itertools.combinations(enumerate(keys), 2) if a == b] == []
    assert keys == [kwargs_signature({"v": make()}) for make in VALUES]
    assert len(set(keys)) == len(VALUES)


@pytest.mark.parametrize(("was", "now"), NEAR)
def test_containers_that_differ_in_one_thing_differ_in_their_key(was, now):
    assert kwargs_signature({"c": was()}) == kwargs_signature({"c": was()})
    assert kwargs_signature({"c": was()}) != kwargs_signature({"c": now()})


def test_a_key_holds_no_tensor_and_is_of_its_own_type():
    key = kwargs_signature({"x": torch.ones(2)})
    assert type(key) is Signature
    assert "tensor(" not in repr(key)


def test_a_parameter_counts_as_a_plain_tensor():
    assert kwargs_signature({"w": nn.Parameter(torch.ones(2))}) == kwargs_signature({"w": torch.zeros(2)})


def test_values_of_tensors_and_sharing_do_not_count():
    x = torch.ones(4)
    assert kwargs_signature({"a": x, "b": x}) == kwargs_signature({"a": x, "b": torch.zeros(4)})


def test_order_counts_from_the_given_depth_on():
    one, two = {"a": {"x": 1, "y": 2}, "b": 3}, {"b": 3, "a": {"x": 1, "y": 2}}
    inner = {"a": {"y": 2, "x": 1}, "b": 3}
    keys = [[flatten(tree, ordered_below=depth)[0] for tree in (one, two, inner)] for depth in (0, 1, 2)]
    assert [[keys[depth][0] == other for other in keys[depth][1:]] for depth in (0, 1, 2)] == [
        [False, False],
        [True, False],
        [True, True],
    ]


def test_strides_count_where_sizes_are_equal():
    x = torch.ones(2, 2)
    assert kwargs_signature({"x": x}) != kwargs_signature({"x": x.t()})


def test_scalars_on_the_host_are_keyed_by_value_among_device_inputs():
    def key(x):
        return flatten({"x": x}, on_device=True)

    one, leaves = key(torch.tensor(1.0))
    assert leaves == []
    assert one == key(torch.tensor(1.0))[0]
    others = [torch.tensor(2.0), torch.tensor(1), torch.tensor(1.0, dtype=torch.float64), torch.tensor(True), 1.0]
    assert [one == key(other)[0] for other in others] == [False] * 5
    assert key(torch.tensor(0.0))[0] != key(torch.tensor(-0.0))[0]
    assert key(torch.tensor(float("nan")))[0] == key(torch.tensor(float("nan")))[0]
    assert len(key(torch.ones(1))[1]) == 1


def test_the_memo_of_key_orders_does_not_mix_up_keys_that_are_equal():
    from graphreplay.testing.samples import Word

    before = kwargs_signature({"d": {"a": 1}})
    assert kwargs_signature({"d": {Word.A: 1}}) != before
    assert kwargs_signature({"d": {"a": 1}}) == before


def test_the_memo_of_key_orders_survives_more_dicts_than_it_holds():
    first = kwargs_signature({"b": 1, "a": 2})
    for position in range(5000):
        kwargs_signature({f"b{position}": 1, "a": 2})
    assert kwargs_signature({"a": 2, "b": 1}) == first
