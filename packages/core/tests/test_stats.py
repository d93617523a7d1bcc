"""Counters and reasons."""

import logging

import pytest

from graphreplay.stats import MAX_REASONS, Stats

KINDS = {
    "eager": ("eager_reasons", logging.WARNING, "net runs eagerly: {}"),
    "miss": ("miss_reasons", logging.DEBUG, "net misses: {}"),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_each_reason_is_counted_and_logged_once(kind, caplog):
    attribute, level, text = KINDS[kind]
    caplog.set_level(logging.DEBUG, "graphreplay")
    stats = Stats("net")
    for reason in ("shape", "dtype", "shape", "shape"):
        getattr(stats, kind)(reason)
    assert getattr(stats, attribute) == {"shape": 3, "dtype": 1}
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (level, text.format("shape")),
        (level, text.format("dtype")),
    ]


@each_kind
def test_reasons_are_bounded_and_none_is_lost(kind, caplog):
    caplog.set_level(logging.DEBUG, "graphreplay")
    stats = Stats("net")
    for number in range(MAX_REASONS + 50):
        getattr(stats, kind)(f"reason {number}")
    getattr(stats, kind)("reason 0")
    reasons = getattr(stats, KINDS[kind][0])
    assert MAX_REASONS == 256
    assert len(reasons) == MAX_REASONS + 1
    assert reasons["other reasons"] == 50
    assert reasons["reason 0"] == 2
    assert reasons.total() == MAX_REASONS + 51
    assert len(caplog.records) == MAX_REASONS


def test_the_kinds_are_counted_apart():
    stats = Stats("net")
    stats.eager("a")
    stats.miss("a")
    stats.miss("a")
    assert (stats.eager_reasons["a"], stats.miss_reasons["a"]) == (1, 2)
    assert (stats.captures, stats.replays) == (0, 0)
    assert Stats("other").eager_reasons == {}


def test_two_wrappers_log_the_same_reason_each(caplog):
    for name in ("first", "second"):
        Stats(name).eager("grad mode")
    assert [record.getMessage() for record in caplog.records] == [
        "first runs eagerly: grad mode",
        "second runs eagerly: grad mode",
    ]
