"""Trees: what is walked, in which order, and what is refused, by its path."""

import sys
from collections import OrderedDict
from dataclasses import dataclass, is_dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from graphreplay import UnsupportedLeafError, clone_static, copy_into, kwargs_signature
from graphreplay.testing.compare import NoOperators, children, same_structure, same_value, tensor_leaves
from graphreplay.testing.samples import NAMESPACE, OPAQUE, VALUES, Color, Output, PackedLayout, Pair, Part, Point, Word
from graphreplay.testing.strategies import kwargs_trees, opaque_trees
from graphreplay.tree import rebuilder, replace_tensors, tensors, walk

READERS = {"kwargs_signature": kwargs_signature, "clone_static": clone_static, "walk": lambda tree: list(walk(tree))}
each_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())


def at(path, tree):
    return eval(path, NAMESPACE | {"kwargs": tree})


@given(kwargs_trees())
def test_every_path_reaches_its_leaf(tree):
    for path, leaf in walk(tree):
        assert at(path, tree) is leaf


@given(kwargs_trees())
def test_walk_tensors_and_replace_tensors_agree_on_the_order(tree):
    leaves = tensors(tree)
    assert {id(leaf) for leaf in leaves} == {id(leaf) for leaf in tensor_leaves(tree)}
    assert [id(leaf) for _, leaf in walk(tree) if isinstance(leaf, Tensor)] == [id(leaf) for leaf in leaves]
    fresh = [torch.tensor(position) for position in range(len(leaves))]
    rebuilt = replace_tensors(tree, iter(fresh))
    assert [id(leaf) for leaf in tensors(rebuilt)] == [id(leaf) for leaf in fresh]
    kept = replace_tensors(rebuilt, iter(leaves))
    assert same_structure(kept, tree, values=True, order=True)


def same_objects(one, other):
    """Whether trees are equal by exact types, names in order, and the very leaves; containers are not the same."""
    assert type(one) is type(other)
    inside, others = children(one), children(other)
    if not inside and not others and not isinstance(one, dict | list | tuple):
        assert one is other
        return
    assert [(type(name), name) for name, _ in inside] == [(type(name), name) for name, _ in others]
    for (_, a), (_, b) in zip(inside, others, strict=True):
        same_objects(a, b)


def check_rebuilder(tree):
    count = len(tensors(tree))
    build = rebuilder(tree)
    for turn in range(2):
        fresh = [torch.tensor(turn * count + position) for position in range(count)]
        rebuilt = build(fresh)
        same_objects(rebuilt, replace_tensors(tree, iter(fresh), share_records=False))
        if isinstance(tree, dict | list) or (children(tree) and is_dataclass(tree)):
            assert rebuilt is not tree
            assert rebuilt is not fresh
    return build


@given(kwargs_trees())
def test_a_rebuilder_does_as_replace_tensors(tree):
    check_rebuilder(tree)
    for value in tree.values():
        check_rebuilder(value)


TENSOR = torch.ones(2)
FLAT = {
    "a tensor": TENSOR,
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "a list": [TENSOR, torch.zeros(1)],
    "a tuple": (TENSOR, torch.zeros(1), TENSOR),
    "a list of parameters": [torch.nn.Parameter(torch.ones(2)), TENSOR],
    "a dict": {"a": TENSOR, "b": torch.zeros(1)},
    "a dict in another order than its names": {"b": TENSOR, "a": torch.zeros(1)},
    "a dict with other names": {"b": TENSOR, 1: torch.zeros(1), None: 2, 0: TENSOR},
    "a dict with a str enum as name": {"b": TENSOR, Word.A: torch.zeros(1)},
    "an OrderedDict": OrderedDict(b=TENSOR, a=torch.zeros(1)),
    "a named tuple": Point(TENSOR, torch.zeros(1)),
    "a size": torch.Size([1, 2]),
    "a structure of torch": torch.ones(2, 3).max(0),
    "a dataclass": Pair(TENSOR, torch.zeros(1)),
    "a record without tensors": PackedLayout(2),
    "a mapping dataclass": Output(second=TENSOR),
    "with a value": [TENSOR, 1, (None, {"z": TENSOR, "a": 2.0})],
    "an empty list": [],
    "an empty tuple": (),
    "an empty dict": {},
    "None": None,
    "a number": 3,
}


@pytest.mark.parametrize("name", FLAT)
def test_a_rebuilder_of_what_forwards_return(name):
    tree = FLAT[name]
    check_rebuilder(tree)
    check_rebuilder({"x": tree})
    check_rebuilder([tree, TENSOR])


def test_containers_that_a_rebuilder_made_are_nobody_elses():
    for tree in ([TENSOR], {"a": TENSOR}, {"a": [TENSOR]}, {"b": TENSOR, "a": TENSOR}):
        leaves = tensors(tree)
        build = rebuilder(tree)
        first = build(leaves)
        first.clear()
        assert same_structure(build(leaves), tree, values=True, order=True)
        assert len(leaves) == len(tensors(tree))


@each_reader
@given(opaque_trees())
def test_an_opaque_object_is_refused_at_any_depth_before_any_operator_runs(read, planted):
    tree, path, opaque = planted
    with NoOperators(), pytest.raises(UnsupportedLeafError) as refusal:
        read(tree)
    assert at(path, tree) is opaque
    assert at(refusal.value.path, tree) is opaque
    assert str(refusal.value) == f"{refusal.value.path}: {refusal.value.problem}"


@each_reader
@pytest.mark.parametrize("kind", OPAQUE)
def test_each_opaque_kind_is_refused(read, kind):
    tree = {"a": [OPAQUE[kind]()]}
    with pytest.raises(UnsupportedLeafError) as refusal:
        read(tree)
    assert refusal.value.path == 'kwargs["a"][0]'


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_tensors_without_plain_values_are_not_copied():
    quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)
    for tensor, what in ((quantized, "a quantized tensor"), (torch.ones(2, device="meta"), "a meta tensor")):
        with pytest.raises(UnsupportedLeafError, match=rf'^kwargs\["q"\]: {what}'):
            clone_static({"q": tensor})
        with pytest.raises(UnsupportedLeafError, match=rf'^kwargs\["q"\]: {what}'):
            copy_into({"q": torch.ones(2)}, {"q": tensor})


@each_reader
def test_an_opaque_attribute_beside_the_fields_of_a_dataclass_is_refused(read):
    pair = Pair(1, 2)
    pair.cache = object()
    with pytest.raises(UnsupportedLeafError) as refusal:
        read({"pair": pair})
    assert refusal.value.path == 'kwargs["pair"].cache'


@each_reader
def test_a_dataclass_without_one_of_its_fields_is_refused(read):
    pair = Pair(1, 2)
    del pair.right
    with pytest.raises(UnsupportedLeafError, match=r'^kwargs\["pair"\]: .*without one of its fields'):
        read({"pair": pair})


def _list_cycle():
    loop = []
    loop.append(loop)
    return loop


def _dict_cycle():
    loop = {}
    loop["again"] = loop
    return loop


def _record_cycle():
    pair = Pair(1, None)
    pair.right = pair
    return pair


def _deep(make):
    tree = 0
    for _ in range(20_000):
        tree = make(tree)
    return tree


ENDLESS = {
    "list in itself": _list_cycle,
    "dict in itself": _dict_cycle,
    "dataclass in itself": _record_cycle,
    "deep list": lambda: _deep(lambda tree: [tree]),
    "deep named tuple": lambda: _deep(lambda tree: Point(tree, 1)),
}


@each_reader
@pytest.mark.parametrize("kind", ENDLESS)
def test_cycles_and_very_deep_trees_end_in_an_error_with_a_path(read, kind):
    tree = {"t": ENDLESS[kind]()}
    with pytest.raises(UnsupportedLeafError, match="nested deeper than 64 containers") as refusal:
        read(tree)
    assert refusal.value.path.startswith('kwargs["t"]')
    reached = at(refusal.value.path, tree)
    assert type(reached) is type(tree["t"])
    while kind.startswith("deep") and type(tree) is list:  # a deep tree is freed without recursion
        tree = tree[0]


@each_reader
def test_the_deepest_tree_allowed_works_from_a_deep_stack(read):
    tree = 1.0
    for _ in range(63):
        tree = [tree]

    def call(depth):
        return call(depth - 1) if depth else read({"t": tree})

    call(sys.getrecursionlimit() // 2)
    with pytest.raises(UnsupportedLeafError, match="nested deeper than 64"):
        read({"t": [tree]})


@each_reader
def test_subtrees_shared_many_times_over_end_in_an_error(read):
    tree = [torch.ones(1)]
    for _ in range(50):  # 2**50 containers when unfolded
        tree = [tree, tree]
    with pytest.raises(UnsupportedLeafError, match="more than 100000 containers") as refusal:
        read({"t": tree})
    assert type(at(refusal.value.path, {"t": tree})) is list


@pytest.mark.parametrize(
    ("key", "source"),
    [
        ("x", '["x"]'),
        ('a"b', "['a\"b']"),
        ("a'b", '["a\'b"]'),
        ("a\\b\n\ud800", '["a\\\\b\\n\\ud800"]'),
        (1, "[1]"),
        (True, "[True]"),
        (None, "[None]"),
        (b"a", "[b'a']"),
        (-0.0, "[-0.0]"),
        (float("-inf"), '[float("-inf")]'),
        (2j, "[2j]"),
        (Color.RED, "[Color.RED]"),
        (Part.LEFT | Part.RIGHT, "[Part(3)]"),
        (("a", 1), '[("a", 1)]'),
        ((Color.RED,), "[(Color.RED,)]"),
        ((), "[()]"),
        (torch.float16, "[torch.float16]"),
        (torch.device("cuda", 1), "[torch.device(type='cuda', index=1)]"),
        (torch.Size([2]), "[torch.Size([2])]"),
        (range(1, 3), "[range(1, 3)]"),
    ],
)
def test_keys_are_printed_as_python(key, source):
    ((path, leaf),) = walk({"d": {key: 1.5}})
    assert path == f'kwargs["d"]{source}'
    assert at(path, {"d": {key: 1.5}}) == leaf == 1.5


@pytest.mark.parametrize("make", VALUES)
def test_every_value_is_its_own_leaf_and_passes_through_as_the_same_object(make):
    value = make()
    assert [leaf is value for _, leaf in walk({"v": [value]})] == [True]
    assert clone_static({"v": [value]})["v"][0] is value


def test_attributes_and_items_are_printed_as_such():
    tree = {"r": Pair(Point(1, 2), Output(second=3)), "t": torch.ones(2, 3).max(0)}
    tree["r"].memo = 4
    assert [path for path, _ in walk(tree)] == [
        'kwargs["r"].left.x',
        'kwargs["r"].left.y',
        'kwargs["r"].right["second"]',
        'kwargs["r"].memo',
        'kwargs["t"][0]',
        'kwargs["t"][1]',
    ]


def test_the_root_can_be_named():
    assert [path for path, _ in walk([1], "variant")] == ["variant[0]"]
    with pytest.raises(UnsupportedLeafError, match=r"^variant: "):
        tensors(SimpleNamespace(), "variant")


def test_structures_of_torch_are_rebuilt_as_themselves():
    found = torch.tensor([[1.0, 3.0], [2.0, 0.0]]).max(0)
    copy = clone_static({"m": found})["m"]
    assert type(copy) is type(found)
    assert copy.values.tolist() == [2.0, 3.0]
    assert copy.indices.tolist() == [1, 0]


def test_a_dataclass_keeps_what_was_put_beside_its_fields():
    pair = Pair(torch.ones(1), 2)
    pair.memo = torch.full((1,), 5.0)
    copy = clone_static(pair)
    assert vars(copy).keys() == {"left", "right", "memo"}
    assert copy.memo.tolist() == [5.0]
    assert copy.memo is not pair.memo


def test_tensor_free_dataclasses_pass_through_and_others_do_not():
    layout, empty, full = PackedLayout(2), Pair([1], {"a": 2}), Pair([torch.ones(1)], PackedLayout(1))
    copy = clone_static({"layout": layout, "empty": empty, "full": full})
    assert copy["layout"] is layout
    assert copy["empty"] is empty
    assert copy["full"] is not full
    assert copy["full"].right is full.right


@dataclass(eq=False)
class Defaulting(Output):
    scale: float | None = 1.0


def test_an_absent_item_stays_absent_where_its_default_is_another():
    copy = clone_static({"o": Defaulting(torch.ones(1), scale=None)})["o"]
    assert copy.scale is None
    assert list(copy) == ["first"]


@pytest.mark.parametrize("make", VALUES)
def test_the_account_of_values_in_the_test_kit_tells_them_apart(make):
    assert [other for other in VALUES if same_value(make(), other())] == [make]
