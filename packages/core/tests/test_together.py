"""The meetings of one capture, with each rank in a thread and real collectives of a group of one."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from graphreplay import RankDisagreementError
from graphreplay.agreement import Agreement
from graphreplay.together import Failure, Together


@pytest.fixture(scope="module")
def collective():
    """Issues one collective, which no other rank has a part in."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda: dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def capture(together, forward, *, captures=lambda: None, warm_ups=2):
    """What a capture does with its ranks: the failure that all agree on, or None; and what it got to."""
    reached = []
    try:
        together.begin()
        for number in range(warm_ups):
            reached.append(f"warm-up {number + 1}")
            with together.forward(reached[-1]):
                forward()
        together.warmed_up()
        reached.append("capture")
        captures()
        failure = None
    except Failure as error:
        failure = error
    except RankDisagreementError as error:
        return error, reached
    except Exception as error:
        together.settle(lambda: reached.append("made up"))
        failure = Failure("disable", f"it raised {error}")
    try:
        return together.agree(failure), reached
    except RankDisagreementError as error:
        together.break_off(str(error))
        return error, reached


def on_two_ranks(*programs, deadline=20.0):
    """Each program with its rank's part of one capture: what each returned, and the ranks whose group was aborted."""
    store, aborted = dist.HashStore(), []

    def run(rank):
        agreement = Agreement(store, [0, 1], rank, deadline)
        return programs[rank](
            Together(
                agreement, "call 1", "digest", "", 2, captures_run=False, break_off=lambda reason: aborted.append(rank)
            )
        )

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2))), sorted(aborted)


def test_all_go_on_where_all_succeed(collective):
    results, aborted = on_two_ranks(*[lambda ranks: capture(ranks, collective)] * 2)
    assert results == [(None, ["warm-up 1", "warm-up 2", "capture"])] * 2
    assert aborted == []


def test_who_fails_between_collectives_keeps_the_others_from_capturing(collective):
    def half():
        collective()
        raise ValueError("half way")

    def whole():
        collective()
        collective()

    results, aborted = on_two_ranks(lambda ranks: capture(ranks, whole), lambda ranks: capture(ranks, half))
    (error, reached), (own, own_reached) = results
    assert type(error) is type(own) is RankDisagreementError
    assert "rank 1: it raised half way" in str(error)
    assert "it raised half way" in str(own)
    assert reached == ["warm-up 1", "warm-up 2"]  # a capture would wait for the device, and that for rank 1
    assert own_reached == ["warm-up 1"]
    assert aborted == [0, 1]


def test_who_fails_before_its_collectives_makes_up_for_them(collective):
    def never():
        raise ValueError("too early")

    results, aborted = on_two_ranks(lambda ranks: capture(ranks, collective), lambda ranks: capture(ranks, never))
    (failure, reached), (own, own_reached) = results
    assert (str(failure), failure.severity) == ("rank 1: it raised too early", "disable")
    assert (str(own), own.severity) == ("it raised too early", "disable")
    assert reached == ["warm-up 1", "warm-up 2"]
    assert own_reached == ["warm-up 1", "made up", "made up"]
    assert aborted == []


def test_who_fails_in_the_capture_has_nothing_to_make_up_for(collective):
    def fails():
        raise ValueError("no graph")

    results, aborted = on_two_ranks(
        lambda ranks: capture(ranks, collective), lambda ranks: capture(ranks, collective, captures=fails)
    )
    (failure, reached), (own, own_reached) = results
    assert str(failure) == "rank 1: it raised no graph"
    assert str(own) == "it raised no graph"
    assert reached == own_reached == ["warm-up 1", "warm-up 2", "capture"]
    assert aborted == []


def test_who_dies_in_a_warm_up_is_named_before_the_others_capture(collective):
    def dies(ranks):
        ranks.begin()

    ((error, reached), _), aborted = on_two_ranks(lambda ranks: capture(ranks, collective), dies, deadline=0.2)
    assert type(error) is RankDisagreementError
    assert "rank 1: did not come within 0.2 s" in str(error)
    assert reached == ["warm-up 1", "warm-up 2"]
    assert aborted == [0]
