"""The line that says in which leaf two calls differ."""

import numpy as np
import pytest
import torch
from hypothesis import given

from graphreplay import UnsupportedLeafError, explain, kwargs_signature
from graphreplay.signature import describe_difference, differences, flatten
from graphreplay.testing.compare import same_structure
from graphreplay.testing.samples import NAMESPACE, Color, Level, Output, Pair, Part, Point
from graphreplay.testing.strategies import equal_pairs, kwargs_trees, near_miss_pairs

x = torch.ones(2, 3)


def at(path, tree):
    return eval(path, NAMESPACE | {"kwargs": tree})


@given(near_miss_pairs())
def test_the_changed_leaf_is_named_and_no_other(pair):
    a, b, place = pair
    ((path, was, now),) = differences(kwargs_signature(a), kwargs_signature(b))
    assert at(path, a) is at(place, a)
    assert at(path, b) is at(place, b)
    assert explain(a, b) == f"{path}: {describe_difference(was, now)}"
    assert explain(kwargs_signature(a), b).startswith(path)


@given(kwargs_trees(), kwargs_trees())
def test_every_difference_is_one(a, b):
    found = list(differences(kwargs_signature(a), kwargs_signature(b)))
    assert bool(found) is not same_structure(a, b)
    for path, _, _ in found:
        assert not same_structure(at(path, a), at(path, b))


@given(equal_pairs())
def test_calls_may_differ_in_the_order_of_dicts_alone(pair):
    found = list(differences(*(flatten(tree, ordered_below=0)[0] for tree in pair)))
    assert bool(found) is not same_structure(*pair, order=True)
    for path, was, now in found:
        was_dict, now_dict = at(path, pair[0]), at(path, pair[1])
        # Not by ==: of a number of NumPy and a tuple that is an array.
        assert [(type(name), repr(name)) for name in was_dict] != [(type(name), repr(name)) for name in now_dict]
        assert set(was_dict) == set(now_dict)
        assert describe_difference(was, now) == "dict has the same names in another order or type"


@pytest.mark.parametrize(
    ("was", "now", "text"),
    [
        (torch.ones(1, 207, 64), torch.ones(1, 207, 32), "shape (1, 207, 64) became (1, 207, 32)"),
        (x, torch.ones(3, 2), "shape (2, 3) became (3, 2)"),
        (torch.ones(3), torch.ones(2), "shape (3,) became (2,)"),
        (torch.ones(2, 2), torch.ones(2, 2).t(), "strides (2, 1) became (1, 2)"),
        (x, x.half(), "dtype torch.float32 became torch.float16"),
        (torch.ones(2), torch.ones(3).int(), "shape (2,) became (3,), dtype torch.float32 became torch.int32"),
        (x, None, "a tensor (2, 3) of torch.float32 on cpu became None"),
        (None, x.bool(), "None became a tensor (2, 3) of torch.bool on cpu"),
        (x, [x], "a tensor (2, 3) of torch.float32 on cpu became a list of 1"),
        (1, True, "int 1 became bool True"),
        (1, Level.ONE, "int 1 became Level.ONE"),
        (Part.LEFT, Part(0), "Part.LEFT became Part(0)"),
        (1, 1.0, "int 1 became float 1.0"),
        (0.0, -0.0, "float 0.0 became float -0.0"),
        (float("nan"), float("inf"), 'float("nan") became float("inf")'),
        ("1", 1, 'str "1" became int 1'),
        ('say "a"', b"a", "str 'say \"a\"' became bytes b'a'"),
        (slice(1), slice(2.0), "slice(None, 1, None) became slice(None, 2.0, None)"),
        (range(2), range(3), "range(0, 2) became range(0, 3)"),
        (torch.float16, torch.bfloat16, "dtype torch.float16 became dtype torch.bfloat16"),
        (torch.Size([1]), (1,), "torch.Size([1]) became a tuple of 1"),
        (1j, -1j, "complex 1j became complex (-0-1j)"),
        (np.float32(1), 1.0, "np.float32(1.0) became float 1.0"),
        (Color.RED, "red", 'Color.RED became str "red"'),
        ([1], (1,), "a list of 1 became a tuple of 1"),
        ([1], [1, 2], "list gained [1]"),
        ({"a": 1}, {"b": 1}, 'dict lost ["a"] and gained ["b"]'),
        ({1: 1}, {"1": 1}, 'dict lost [1] and gained ["1"]'),
        ({1: 1}, {True: 1}, "dict lost [1] and gained [True]"),
        ({0.0: 1}, {-0.0: 1}, "dict lost [0.0] and gained [-0.0]"),
        ({"a": 1, "b": 2}, {}, 'dict lost ["a"], ["b"]'),
        (Output(1, 2), Output(1), 'Output lost ["second"]'),
        (Pair(1, 2), Point(1, 2), "a Pair of 2 became a Point of 2"),
    ],
)
def test_texts(was, now, text):
    assert explain({"k": 0, "x": was}, {"k": 0, "x": now}) == f'kwargs["x"]: {text}'


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (10**5000, 10**5001),  # longer than Python turns into text
        (np.str_("a"), np.str_("")),
        (np.bytes_(b"a"), np.bytes_(b"")),
        (slice(10**5000), slice(None)),
        (np.datetime64("NaT", "Y"), np.datetime64("2020", "Y")),
    ],
    ids=["int", "str", "bytes", "slice", "datetime"],
)
def test_odd_values_are_explained_without_raising(was, now):
    for a, b in ((was, now), (now, was), (was, None)):
        assert explain({"x": a}, {"x": b}).startswith('kwargs["x"]: ')
        assert explain({"x": a}, {"x": a}) is None


@pytest.mark.parametrize("value", ["a" * 10_000, b"a" * 10_000, 10**1000, range(10**300, 10**301)], ids=type)
def test_long_values_are_cut_short(value):
    text = explain({"x": None}, {"x": value})
    assert len(text) < 250
    assert text.endswith("…")


def test_the_first_of_several_differences_is_named():
    assert explain({"a": 1, "b": [1, 2]}, {"a": 1, "b": [2, 3]}) == 'kwargs["b"][0]: int 1 became int 2'


def test_the_root_can_be_named():
    assert explain((1, "on"), (1, "off"), "variant") == 'variant[1]: str "on" became str "off"'


def test_scalars_on_the_host_are_described_by_value():
    was, now = (flatten({"t": torch.tensor(t)}, on_device=True)[0] for t in (0.5, 0.25))
    assert explain(was, now) == (
        'kwargs["t"]: a CPU scalar 0.5 of torch.float32 became a CPU scalar 0.25 of torch.float32'
    )


def test_an_opaque_leaf_has_no_explanation():
    with pytest.raises(UnsupportedLeafError, match=r'^kwargs\["o"\]: '):
        explain({"o": 1}, {"o": object()})
