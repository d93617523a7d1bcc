"""Which memos capture_context bypasses, and that they are as before afterwards, whatever happens inside."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import graphreplay
from graphreplay_taomate import GraphedForward, capture_context

BUDGET = 1000


class Memo:
    def __init__(self):
        self.max_bytes, self.prepared, self.hits = BUDGET, "an embedding", 0

    def prepare(self, embedding):
        self.prepared = embedding if self.max_bytes else None


def with_memo():
    module = nn.Linear(2, 2)
    module.adaln_cache = Memo()
    return module


def calling(module):
    """A module that has this one among its plain attributes, graphed."""
    outer = nn.Identity()
    outer.inner = graphreplay.ReferenceGraphedForward(module, device="cpu")
    return outer


def closure(module):
    return lambda **kwargs: module(**kwargs)


WAYS = {
    "the module itself": lambda module: module,
    "a submodule": lambda module: nn.Sequential(nn.Identity(), nn.Sequential(module)),
    "a bound method": lambda module: module.forward,
    "a partial": lambda module: partial(module, input=1),
    "a closure": closure,
    "a graphed forward": lambda module: graphreplay.ReferenceGraphedForward(module, device="cpu"),
    "one among attributes": calling,
    "an object that is no module": lambda module: SimpleNamespace(adaln_cache=module.adaln_cache),
}


@pytest.mark.parametrize("way", WAYS)
def test_where_a_memo_is_found(way):
    module = with_memo()
    forward, before = WAYS[way](module), dict(vars(module.adaln_cache))
    with capture_context(forward):
        assert module.adaln_cache.max_bytes == 0
        assert module.adaln_cache.prepared is None
    assert vars(module.adaln_cache) == before


@pytest.mark.parametrize("attribute", [None, nn.Linear(1, 1), "text"], ids=["none", "a module", "a string"])
def test_what_is_no_memo_is_left_alone(attribute):
    module = nn.Linear(2, 2)
    plain = nn.Linear(2, 2)
    module.adaln_cache = attribute
    before = dict(vars(module))
    with capture_context(module), capture_context(plain), capture_context(print):
        assert dict(vars(module)) == before
        assert not hasattr(plain, "adaln_cache")
    assert dict(vars(module)) == before


def test_all_memos_of_a_module_and_a_shared_one_once():
    first, second, shared = with_memo(), with_memo(), with_memo()
    shared.adaln_cache = first.adaln_cache
    with capture_context(nn.Sequential(first, second, shared)):
        assert [module.adaln_cache.max_bytes for module in (first, second, shared)] == [0, 0, 0]
    assert [module.adaln_cache.max_bytes for module in (first, second, shared)] == [BUDGET] * 3


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["an error", "an interrupt"])
def test_restored_after_an_error_in_the_body(error):
    module = with_memo()
    with pytest.raises(type(error)), capture_context(module):
        assert module.adaln_cache.max_bytes == 0
        raise error
    assert vars(module.adaln_cache) == {"max_bytes": BUDGET, "prepared": "an embedding", "hits": 0}


def test_nested_and_repeated():
    module = with_memo()
    for _ in range(2):
        with capture_context(module):
            with pytest.raises(ValueError, match="inner"), capture_context(module):
                raise ValueError("inner")
            assert module.adaln_cache.max_bytes == 0
            with capture_context(module):
                assert module.adaln_cache.max_bytes == 0
            assert module.adaln_cache.max_bytes == 0
        assert module.adaln_cache.max_bytes == BUDGET
        assert module.adaln_cache.prepared == "an embedding"


def test_contexts_that_overlap_are_restored_by_the_last_one_out():
    module = with_memo()
    first, second = capture_context(module), capture_context(module)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert module.adaln_cache.max_bytes == 0
    second.__exit__(None, None, None)
    assert module.adaln_cache.max_bytes == BUDGET


def test_threads_that_overlap():
    module, inside, seen = with_memo(), threading.Barrier(4, timeout=30), []

    def enter(_):
        for _ in range(50):
            with capture_context(module):
                inside.wait()
                seen.append(module.adaln_cache.max_bytes)
            inside.wait()

    threads = [threading.Thread(target=enter, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [0] * 200
    assert module.adaln_cache.max_bytes == BUDGET


def test_what_the_body_itself_changes():
    module = with_memo()
    with capture_context(module):
        module.adaln_cache.max_bytes = 7
        module.adaln_cache.hits = 5
    assert vars(module.adaln_cache) == {"max_bytes": BUDGET, "prepared": "an embedding", "hits": 5}


def test_a_memo_that_cannot_be_bypassed():
    class Stubborn(Memo):
        max_bytes = property(lambda self: BUDGET, lambda self, value: self.refuse(value))
        refuse = lambda self, value: None if value else (_ for _ in ()).throw(OSError("no"))  # noqa: E731

    fine, stubborn = with_memo(), with_memo()
    stubborn.adaln_cache = Stubborn()
    for _ in range(2):
        with pytest.raises(OSError, match="no"), capture_context(nn.Sequential(fine, stubborn)):
            pytest.fail("the body ran")
        assert fine.adaln_cache.max_bytes == stubborn.adaln_cache.max_bytes == BUDGET


@pytest.mark.parametrize("error", [ValueError("no such shape"), KeyboardInterrupt()], ids=["refused", "interrupted"])
def test_a_memo_whose_prepare_raises_halfway(error):
    class Choosy(Memo):
        def prepare(self, embedding):
            self.prepared, self.new = None, embedding
            raise error

    module, ran = with_memo(), []
    module.adaln_cache = Choosy()
    before = dict(vars(module.adaln_cache))
    try:
        with capture_context(module):
            ran.append(module.adaln_cache.max_bytes)
    except KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt)
    assert ran == ([0] if isinstance(error, ValueError) else [])
    assert vars(module.adaln_cache) == before


@torch.inference_mode()
def test_captures_beside_a_memo_that_refuses_an_empty_embedding():
    class Choosy(Memo):
        def prepare(self, embedding):
            if embedding.ndim != 2:
                raise ValueError("[batch, width] wanted")
            super().prepare(embedding.sum().item() if self.max_bytes else None)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.adaln_cache = Choosy()
            self.adaln_cache.prepared = None

        def forward(self, *, x):
            if self.adaln_cache.max_bytes == 0:
                self.adaln_cache.prepare(x)
            return x * 2

    graphed = GraphedForward(Model(), device="cpu", reference=True)
    for _ in range(3):
        assert torch.equal(graphed(x=torch.ones(2, 2)), torch.full((2, 2), 2.0))
    assert (graphed.captures, graphed.disabled_reason) == (1, None)
    assert vars(graphed.module.adaln_cache) == {"max_bytes": BUDGET, "prepared": None, "hits": 0}


class Slotted:
    __slots__ = ("__secret", "max_bytes", "prepared", "unset")

    def __init__(self):
        self.max_bytes, self.prepared, self.__secret = BUDGET, "an embedding", 1

    def prepare(self, embedding):
        self.prepared, self.__secret, self.unset = (embedding if self.max_bytes else None), 2, 3

    def all(self):
        return self.max_bytes, self.prepared, self.__secret, hasattr(self, "unset")


class SlottedAndMore(Slotted):
    def __init__(self):
        super().__init__()
        self.more = "more"

    def prepare(self, embedding):
        super().prepare(embedding)
        self.more = None

    def all(self):
        return *super().all(), self.more


@pytest.mark.parametrize("cls", [Slotted, SlottedAndMore])
def test_attributes_in_slots_are_restored(cls):
    memo = cls()
    before = memo.all()
    with capture_context(SimpleNamespace(adaln_cache=memo)):
        assert (memo.max_bytes, memo.prepared) == (0, None)
    assert memo.all() == before


def test_a_budget_of_the_class_stays_there():
    class OfTheClass:
        max_bytes = BUDGET

    memo = OfTheClass()
    with capture_context(SimpleNamespace(adaln_cache=memo)):
        assert memo.max_bytes == 0
    assert vars(memo) == {}
    assert memo.max_bytes == BUDGET


def test_a_budget_that_is_a_property():
    class Proper(Memo):
        max_bytes = property(lambda self: self.kept, lambda self, value: setattr(self, "kept", value))

    memo = Proper()
    before = dict(vars(memo))
    with capture_context(SimpleNamespace(adaln_cache=memo)):
        assert memo.max_bytes == 0
    assert vars(memo) == before


def test_modules_that_lead_to_one_another_are_looked_through_once():
    first, second = with_memo(), with_memo()
    first.inner = graphreplay.ReferenceGraphedForward(second, device="cpu")
    second.inner = graphreplay.ReferenceGraphedForward(first, device="cpu")
    with capture_context(first):
        assert [module.adaln_cache.max_bytes for module in (first, second)] == [0, 0]
    assert [module.adaln_cache.max_bytes for module in (first, second)] == [BUDGET] * 2


def test_a_memo_with_a_budget_alone():
    module = nn.Linear(2, 2)
    module.adaln_cache = SimpleNamespace(max_bytes=BUDGET)
    with capture_context(module):
        assert module.adaln_cache.max_bytes == 0
    assert module.adaln_cache.max_bytes == BUDGET


def test_one_that_is_turned_off_stays_off():
    module = with_memo()
    module.adaln_cache.max_bytes = 0
    with capture_context(module):
        assert module.adaln_cache.max_bytes == 0
    assert module.adaln_cache.max_bytes == 0


@torch.inference_mode()
def test_a_captured_forward_sees_no_budget_and_an_eager_one_all_of_it():
    seen = []

    class Peeking(nn.Module):
        def __init__(self):
            super().__init__()
            self.adaln_cache = Memo()

        def forward(self, *, x):
            seen.append(self.adaln_cache.max_bytes)
            return x * 2

    graphed = GraphedForward(Peeking(), device="cpu", reference=True, warmup_iters=2)
    for _ in range(3):
        graphed(x=torch.ones(2))
    assert graphed.captures == 1
    assert seen == [BUDGET, 0, 0, 0]  # the call's own forward, two warm-ups, the capture
