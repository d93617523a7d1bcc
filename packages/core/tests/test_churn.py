"""The guard against values that are new on every call."""

import pytest
import torch

from graphreplay.churn import LIMIT, ChurnGuard
from graphreplay.signature import kwargs_signature


def call(t=0.5, **more):
    return kwargs_signature({"x": torch.ones(2), "t": t, **more})


def feed(guard, calls):
    """Captures what is not refused. Returns what the guard banned, and how many were refused."""
    banned, refused = [], 0
    for signature in calls:
        if guard.refusal(signature):
            refused += 1
        else:
            banned.append(guard.captured(signature))
    return [path for path in banned if path], refused


def test_the_limit_is_sixteen_graphs_in_a_row():
    assert LIMIT == 16
    guard = ChurnGuard()
    assert [guard.captured(call(float(step))) for step in range(15)] == [None] * 15
    assert guard.refusal(call(15.0)) is None
    assert guard.captured(call(15.0)) == 'kwargs["t"]'
    assert guard.refusal(call(16.0)) == (
        'kwargs["t"] took 16 values in a row that never came back; '
        "pass a tensor on the device, so that the value is copied and not part of the key"
    )


def test_captures_stay_bounded_however_long_it_goes_on():
    assert feed(ChurnGuard(), (call(step / 7) for step in range(200))) == (['kwargs["t"]'], 184)


def test_only_the_banned_leaf_is_refused():
    guard = ChurnGuard()
    feed(guard, (call(float(step)) for step in range(16)))
    assert guard.refusal(call(99.0)) is not None
    assert guard.refusal(call(99)) is not None  # another type is another value
    assert guard.refusal(call(15.0)) is not None
    assert guard.refusal(call(torch.tensor(99.0))) is None  # as the refusal advises
    assert guard.refusal(call(99.0, seq=1)) is None
    assert guard.refusal(kwargs_signature({"x": torch.ones(3), "t": 99.0})) is None
    assert guard.refusal(kwargs_signature({"x": torch.ones(3), "t": 15.0})) is None


@pytest.mark.parametrize("replayed", [0, 7, 14])
def test_a_replay_of_any_graph_in_the_row_starts_it_anew(replayed):
    guard = ChurnGuard()
    feed(guard, (call(float(step)) for step in range(15)))
    guard.replayed(call(float(replayed)))
    assert feed(guard, (call(float(step)) for step in range(15, 30))) == ([], 0)
    assert guard.captured(call(30.0)) == 'kwargs["t"]'


def test_a_replay_of_another_graph_does_not():
    guard = ChurnGuard()
    feed(guard, (call(float(step)) for step in range(15)))
    guard.replayed(call(15.0, seq=3))
    assert guard.captured(call(15.0)) == 'kwargs["t"]'


def test_leaves_that_change_together_are_banned_together():
    guard = ChurnGuard()
    assert feed(guard, (call(float(step), seq=step) for step in range(64))) == (['kwargs["seq"] and kwargs["t"]'], 48)
    assert guard.refusal(call(99.0, seq=0)) is not None
    assert guard.refusal(call(99.0, seq=15)) is not None
    assert guard.refusal(call(99.0, seq=0, other=1)) is None


def test_leaves_that_take_turns_are_banned_together():
    turns = (call((step + 1) // 2, seq=step // 2) for step in range(64))
    assert feed(ChurnGuard(), turns) == (['kwargs["seq"] and kwargs["t"]'], 48)


def test_a_tensor_that_changes_along_ends_the_row():
    guard = ChurnGuard()
    shapes = (kwargs_signature({"x": torch.ones(step // 8), "t": step}) for step in range(64))
    assert feed(guard, shapes) == ([], 0)


def test_a_list_that_grows_is_never_banned():
    assert feed(ChurnGuard(), (kwargs_signature({"x": [1] * step}) for step in range(40))) == ([], 0)


@pytest.mark.parametrize(
    "tensor",
    [
        lambda step: torch.ones(step + 1),
        lambda step: torch.ones(99)[: 2 * step + 2 : step + 1],
        lambda step: None if step % 2 else torch.ones(step + 1),
    ],
    ids=["shape", "strides", "none or tensor"],
)
def test_tensors_are_never_banned(tensor):
    assert feed(ChurnGuard(), (kwargs_signature({"x": tensor(step), "t": 1}) for step in range(40))) == ([], 0)


def test_the_same_call_again_and_again_is_never_banned():
    assert feed(ChurnGuard(), (call(0.5) for _ in range(40))) == ([], 0)


def test_values_inside_containers_are_named_by_their_path():
    calls = (kwargs_signature({"cfg": {"scales": (1.0, float(step))}}) for step in range(16))
    assert feed(ChurnGuard(), calls) == (['kwargs["cfg"]["scales"][1]'], 0)


def test_bans_of_several_leaves_hold_together():
    guard = ChurnGuard()
    feed(guard, (call(float(step), seq=0) for step in range(16)))
    feed(guard, (call(0.0, seq=0, steps=step) for step in range(16)))
    assert 'kwargs["t"]' in guard.refusal(call(77.0, seq=0))
    assert 'kwargs["steps"]' in guard.refusal(call(0.0, seq=0, steps=77))


def test_bans_are_bounded_and_the_oldest_goes_first():
    guard = ChurnGuard()
    for shape in range(65):
        feed(guard, (kwargs_signature({"x": torch.ones(shape), "t": float(step)}) for step in range(16)))
    assert guard.refusal(kwargs_signature({"x": torch.ones(0), "t": 50.0})) is None
    assert guard.refusal(kwargs_signature({"x": torch.ones(1), "t": 50.0})) is not None
    assert guard.refusal(kwargs_signature({"x": torch.ones(64), "t": 50.0})) is not None
