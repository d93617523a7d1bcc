"""Keys: equal exactly where every part is; and how often this process was forked."""

import gc
import threading

import pytest
import torch

from graphreplay import ForkedError, ReferenceGraphedForward
from graphreplay.ambient import Ambient
from graphreplay.capture import quiet_capture
from graphreplay.request import Key, variant_key
from graphreplay.signature import Signature, flatten
from graphreplay.state import forks
from graphreplay.testing.contract_twin import in_child

AMBIENT = (False, True, None, None, torch.float32)


def signature(**kwargs):
    return flatten(kwargs)[0]


def key(kwargs=None, ambient=AMBIENT, sharing=(), variant=None):
    return Key(
        signature(**(kwargs or {"x": torch.ones(2, 3), "n": 1})),
        ambient,
        sharing,
        None if variant is None else variant_key(variant),
    )


OTHERS = {
    "shape": {"kwargs": {"x": torch.ones(3, 2), "n": 1}},
    "strides": {"kwargs": {"x": torch.ones(3, 2).t(), "n": 1}},
    "dtype": {"kwargs": {"x": torch.ones(2, 3).double(), "n": 1}},
    "value": {"kwargs": {"x": torch.ones(2, 3), "n": 2}},
    "type of a value": {"kwargs": {"x": torch.ones(2, 3), "n": True}},
    "float for an int": {"kwargs": {"x": torch.ones(2, 3), "n": 1.0}},
    "name": {"kwargs": {"y": torch.ones(2, 3), "n": 1}},
    "process state": {"ambient": (True, *AMBIENT[1:])},
    "sharing": {"sharing": ((1, 0, 0, 1),)},
    "variant": {"variant": "lora"},
    "another variant": {"variant": ("lora", 0.0)},
    "sign of zero in the variant": {"variant": ("lora", -0.0)},
}


def test_keys_of_equal_parts_are_equal():
    one, other = key(), key()
    assert one is not other
    assert one == other
    assert hash(one) == hash(other)
    assert {one: "graph"}[other] == "graph"
    assert key(variant=[0.0]) == key(variant=[0.0])
    assert key(variant=[float("nan")]) == key(variant=[float("nan")])


def test_keys_differ_with_any_part():
    keys = [key(), *(key(**other) for other in OTHERS.values())]
    for position, one in enumerate(keys):
        assert [place for place, other in enumerate(keys) if one == other] == [position]
    assert len(set(keys)) == len(keys)
    assert len(dict.fromkeys([*keys, *(key(**other) for other in OTHERS.values())])) == len(keys)


def test_equal_hashes_alone_make_no_equal_keys():
    one, other = key(), key(variant="lora")
    other._hash = one._hash
    assert hash(one) == hash(other)
    assert one != other
    assert len({one, other}) == 2


def test_a_key_equals_no_other_object():
    one = key()
    assert one != one._parts
    assert one != one.signature
    assert one is not None
    assert one not in [None, 0, ()]


def test_a_key_is_hashed_once():
    hashed = []

    class Counted(Signature):
        def __hash__(self):
            hashed.append(self)
            return super().__hash__()

    one = Key(Counted(signature(x=torch.ones(2))), AMBIENT, (), None)
    hashed.clear()
    for _ in range(3):
        hash(one)
    assert hashed == []


@pytest.mark.parametrize(
    ("other", "news"),
    [
        ("value", 'kwargs["n"]'),
        ("process state", "grad mode is another"),
        ("sharing", "other kwargs share storage"),
        ("variant", "another variant"),
    ],
)
def test_what_is_new_in_a_key(other, news):
    assert news in key(**OTHERS[other]).news_since(key(), Ambient("cpu"))
    assert key().news_since(key(), Ambient("cpu")) == "its graph was evicted or dropped"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the process has threads
def test_a_child_forked_in_the_middle_of_a_capture_is_free_of_it():
    holding, done = threading.Event(), threading.Event()
    graphed = ReferenceGraphedForward(lambda *, x: x * 2, device="cpu")

    def hold():
        with graphed.pool.lock, quiet_capture(torch.device("cpu")):
            holding.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    holding.wait()
    try:

        def child():
            assert gc.isenabled()
            assert graphed.stats()["captures"] == 0
            graphed.disable("in the child")
            fresh = ReferenceGraphedForward(lambda *, x: x * 2, device="cpu")
            for _ in range(2):
                assert torch.equal(fresh(x=torch.ones(2)), torch.full((2,), 2.0))
            assert fresh.stats()["replays"] == 1

        assert in_child(child) == 0
        assert not gc.isenabled()
    finally:
        done.set()
        holder.join()
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the process has threads
def test_each_generation_of_forks_uses_wrappers_of_its_own():
    x, before = torch.ones(2), forks.count

    def use(graphed):
        for _ in range(3):
            assert torch.equal(graphed(x=x), x * 2)
        assert graphed.stats()["replays"] == 2

    def refused(graphed):
        try:
            graphed(x=x)
        except ForkedError:
            return
        raise AssertionError("a wrapper of another process was used")

    def build():
        return ReferenceGraphedForward(lambda *, x: x * 2, device="cpu")

    ours = build()
    use(ours)

    def child():
        assert forks.count == before + 1
        refused(ours)
        theirs = build()
        use(theirs)

        def grandchild():
            assert forks.count == before + 2
            refused(ours)
            refused(theirs)
            use(build())

        assert in_child(grandchild) == 0
        assert torch.equal(theirs(x=x), x * 2)

    for _ in range(2):
        assert in_child(child) == 0
    assert forks.count == before
    assert torch.equal(ours(x=x), x * 2)
    assert ours.stats()["replays"] == 3
