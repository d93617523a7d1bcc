"""The bounded cache, checked step by step against a plain list."""

import warnings

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphreplay.cache import LRUCache
from graphreplay.errors import GraphReplayWarning

KEYS = st.integers(0, 7)


class CacheMachine(RuleBasedStateMachine):
    """``model`` lists (key, value, bytes, pinned), least recently used first."""

    @initialize(entries=st.integers(1, 4), nbytes=st.none() | st.integers(1, 40))
    def start(self, entries, nbytes):
        self.max_entries, self.max_bytes = entries, nbytes
        self.left, self.expected_to_leave = [], []
        self.model = []
        self.evictions = self.made = 0
        self.warned = False
        self.cache = LRUCache(entries, nbytes, self.left.append)

    def index(self, key):
        return next((i for i, slot in enumerate(self.model) if slot[0] == key), None)

    def over(self):
        total = sum(slot[2] for slot in self.model)
        return len(self.model) > self.max_entries or (self.max_bytes is not None and total > self.max_bytes)

    def drop(self, index):
        self.expected_to_leave.append(self.model.pop(index)[1])

    def shrink(self, keep):
        """What must leave now. Returns whether a warning is due."""
        while self.over():
            victims = [i for i, slot in enumerate(self.model) if not slot[3] and slot[0] != keep]
            if not victims:
                break
            self.drop(victims[0])
            self.evictions += 1
        due = self.over() and any(slot[3] for slot in self.model) and not self.warned
        self.warned = self.warned or due
        return due

    def act(self, action, keep):
        """Runs an action of the cache after the model was changed, and compares the warnings."""
        due = self.shrink(keep)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = action()
        assert [warning.category for warning in caught] == [GraphReplayWarning] * due
        return result

    @rule(key=KEYS, nbytes=st.integers(0, 25), pin=st.booleans())
    def put(self, key, nbytes, pin):
        if self.index(key) is not None:
            with pytest.raises(KeyError):
                self.cache.put(key, "another", nbytes, pin=pin)
            return
        self.made += 1
        value = f"value {self.made}"
        self.model.append((key, value, nbytes, pin))
        self.act(lambda: self.cache.put(key, value, nbytes, pin=pin), key)
        assert list(self.cache)[-1] == key

    @rule(key=KEYS)
    def get(self, key):
        index = self.index(key)
        if index is None:
            assert self.cache.get(key) is None
        else:
            self.model.append(self.model.pop(index))
            assert self.cache.get(key) == self.model[-1][1]

    @rule(key=KEYS, pinned=st.booleans())
    def set_pinned(self, key, pinned):
        change = self.cache.pin if pinned else self.cache.unpin
        index = self.index(key)
        if index is None:
            assert change(key) is False
            return
        self.model[index] = (*self.model[index][:3], pinned)
        assert self.act(lambda: change(key), self.model[-1][0]) is True

    @rule(key=KEYS)
    def evict(self, key):
        index = self.index(key)
        assert self.cache.evict(key) is (index is not None)
        if index is not None:
            self.drop(index)

    @precondition(lambda self: len(self.model) > 2)
    @rule()
    def clear(self):
        while self.model:
            self.drop(0)
        self.cache.clear()

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_valid()
        assert list(self.cache) == [slot[0] for slot in self.model]
        assert len(self.cache) == len(self.model)
        assert self.cache.nbytes == sum(slot[2] for slot in self.model)
        assert self.cache.pinned == sum(slot[3] for slot in self.model)
        assert self.cache.evictions == self.evictions
        assert self.left == self.expected_to_leave


TestCacheMachine = CacheMachine.TestCase


def filled(max_entries=2, max_bytes=None, pins=()):
    left = []
    cache = LRUCache(max_entries, max_bytes, left.append)
    for key in "abc"[:max_entries]:
        cache.put(key, key.upper(), 10, pin=key in pins)
    return cache, left


def test_the_least_recently_used_leaves_first():
    cache, left = filled()
    assert cache.get("a") == "A"
    cache.put("n", "N", 10)
    assert left == ["B"]
    assert list(cache) == ["a", "n"]
    assert (cache.nbytes, cache.evictions) == (20, 1)


def test_a_pin_outlives_what_is_used_later():
    cache, left = filled(pins="a")
    for key in "xyz":
        cache.put(key, key.upper(), 1)
    assert left == ["B", "X", "Y"]
    assert cache.get("a") == "A"


def test_bytes_are_a_bound_too_and_the_newest_stays_above_it():
    cache, left = filled(max_entries=3, max_bytes=30)
    cache.put("big", "BIG", 31)
    assert left == ["A", "B", "C"]
    assert (list(cache), cache.nbytes) == (["big"], 31)
    cache.put("n", "N", 1)
    assert left == ["A", "B", "C", "BIG"]


def test_pins_beyond_the_bound_grow_the_cache_and_warn_once():
    cache, left = filled(pins="ab")
    with pytest.warns(
        GraphReplayWarning, match="3 graphs, 3 of them pinned, hold 30 bytes, above max_entries=2 or max_bytes=None"
    ) as caught:
        cache.put("c", "C", 10, pin=True)
    assert len(caught) == 1
    cache.put("d", "D", 10, pin=True)  # warnings are errors here, so this one is silent
    assert left == []
    assert (len(cache), cache.pinned, cache.nbytes) == (4, 4, 40)


def test_unpinning_shrinks_at_once():
    cache, left = filled(pins="ab")
    with pytest.warns(GraphReplayWarning):
        cache.put("c", "C", 10, pin=True)
    assert cache.unpin("a") is True
    assert left == ["A"]
    assert cache.unpin("b") is True
    assert left == ["A"]
    assert (list(cache), cache.pinned) == (["b", "c"], 1)


def test_pinning_twice_counts_once():
    cache, _ = filled()
    assert cache.pin("a")
    assert cache.pin("a")
    assert cache.pinned == 1
    assert cache.unpin("a")
    assert cache.unpin("a")
    assert cache.pinned == 0


def test_eviction_by_hand_and_clearing_take_pins_too_and_are_no_evictions():
    cache, left = filled(max_entries=3, pins="ac")
    assert cache.evict("a") is True
    assert cache.evict("a") is False
    cache.clear()
    cache.clear()
    assert left == ["A", "B", "C"]
    assert (len(cache), cache.pinned, cache.nbytes, cache.evictions) == (0, 0, 0, 0)
    cache.put("a", "again", 5)
    assert cache.get("a") == "again"


class CountingKey:
    """Counts how often it is hashed."""

    hashed = 0

    def __hash__(self):
        self.hashed += 1
        return 7


def test_the_newest_value_is_found_with_one_look_and_stays_the_newest():
    cache = LRUCache(3, None, lambda value: None)
    keys = [CountingKey() for _ in range(3)]
    for key in keys:
        cache.put(key, key, 1)
        key.hashed = 0
        for turn in range(1, 4):
            assert cache.get(key) is key
            assert key.hashed == turn
        cache.check_valid()
    assert list(cache) == keys
    assert cache.get(keys[0]) is keys[0]
    assert list(cache) == [keys[1], keys[2], keys[0]]
    keys[0].hashed = 0
    assert cache.get(keys[0]) is keys[0]
    assert keys[0].hashed == 1


@pytest.mark.parametrize("gone", ["newest", "another", "all"])
def test_what_is_the_newest_after_a_value_left(gone):
    cache, _ = filled(max_entries=3)
    assert cache.get("b") == "B"  # a c b
    if gone == "all":
        cache.clear()
        cache.put("b", "again", 1)
        assert (cache.get("b"), cache.get("a"), list(cache)) == ("again", None, ["b"])
        return
    cache.evict("b" if gone == "newest" else "a")
    left = ["a", "c"] if gone == "newest" else ["c", "b"]
    assert list(cache) == left
    for key in (left[0], left[0], left[1], left[0]):
        assert cache.get(key) == key.upper()
        assert list(cache)[-1] == key
        cache.check_valid()
    cache.put("n", "N", 1)
    cache.put("m", "M", 1)
    assert list(cache) == [left[0], "n", "m"]
    cache.check_valid()


def test_a_pin_makes_nothing_the_newest():
    cache, left = filled(max_entries=3)
    assert cache.get("b") == "B"
    cache.pin("a")
    cache.unpin("a")
    assert list(cache) == ["a", "c", "b"]
    cache.put("n", "N", 1)
    assert left == ["A"]
    assert cache.get("b") == "B"
    assert list(cache) == ["c", "n", "b"]


def test_a_key_is_put_once():
    cache, left = filled()
    with pytest.raises(KeyError, match="in the cache already"):
        cache.put("a", "another", 10)
    assert (cache.get("a"), cache.nbytes, left) == ("A", 20, [])


def test_check_valid_sees_wrong_accounts():
    cache, _ = filled(pins="a")
    for attribute in ("_nbytes", "_pinned"):
        setattr(cache, attribute, getattr(cache, attribute) + 1)
        with pytest.raises(AssertionError):
            cache.check_valid()
        setattr(cache, attribute, getattr(cache, attribute) - 1)
    cache.check_valid()
    cache.max_entries, cache.max_bytes = 9, 5
    cache._slots["a"].pinned, cache._pinned = False, 0
    with pytest.raises(AssertionError, match="evictable is left"):
        cache.check_valid()
