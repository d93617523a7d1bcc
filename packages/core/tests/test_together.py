"""The meetings of one capture, with each rank in a thread and real collectives of a group of one."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from graphreplay import RankDisagreementError
from graphreplay.agreement import Agreement
from graphreplay.collectives import ForeignCollectiveError
from graphreplay.errors import CaptureError
from graphreplay.together import Failure, Together


@pytest.fixture(scope="module")
def collective():
    """Issues one collective, which no other rank has a part in."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda: dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def capture(together, forward, *, again=None, captures=lambda: None, captures_run=False):
    """What a capture does with its ranks: the failure that all agree on, or None; and what it got to.

    ``again`` is the forward that is run to make up for one that failed; by default the same.
    """
    reached = []

    def make_up():
        reached.append("made up")
        (again or forward)()

    try:
        together.begin()
        for number in range(2):
            reached.append(f"warm-up {number + 1}")
            with together.forward(reached[-1]):
                forward()
        together.warmed_up()
        reached.append("capture")
        with together.forward("capture") if captures_run else contextlib.nullcontext():
            captures()
        failure = None
    except Failure as error:
        together.settle(error, make_up)
        failure = error
    except RankDisagreementError as error:
        together.settle(error, make_up)
        return error, reached
    except Exception as error:
        together.settle(error, make_up)
        failure = Failure("disable", f"it raised {error}")
    try:
        return together.agree(failure), reached
    except RankDisagreementError as error:
        together.break_off(str(error))
        return error, reached


def never_break_off(reason, groups):
    pytest.fail("they are in step")


def on_two_ranks(*programs, deadline=20.0, captures_run=False):
    """Each program with its rank's part of one capture: what each returned, and the ranks whose group was aborted."""
    store, aborted = dist.HashStore(), []

    def run(rank):
        agreement = Agreement(store, [0, 1], rank, deadline)

        def break_off(reason, groups):
            aborted.append((rank, groups))

        return programs[rank](
            Together(agreement, "call 1", "digest", "", 2, captures_run=captures_run, break_off=break_off)
        )

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2))), dict(aborted)


def test_all_go_on_where_all_succeed(collective):
    results, aborted = on_two_ranks(*[lambda ranks: capture(ranks, collective)] * 2)
    assert results == [(None, ["warm-up 1", "warm-up 2", "capture"])] * 2
    assert aborted == {}


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
    assert aborted == {0: {dist.group.WORLD}, 1: {dist.group.WORLD}}, "with the groups whose collectives ran"


def test_who_fails_before_its_collectives_makes_up_for_them(collective):
    def never():
        raise ValueError("too early")

    made_up = []

    def again():
        collective()
        made_up.append(True)

    results, aborted = on_two_ranks(
        lambda ranks: capture(ranks, collective), lambda ranks: capture(ranks, never, again=again)
    )
    (failure, reached), (own, own_reached) = results
    assert (str(failure), failure.severity) == ("rank 1: it raised too early", "disable")
    assert (str(own), own.severity) == ("it raised too early", "disable")
    assert reached == ["warm-up 1", "warm-up 2"]
    assert own_reached == ["warm-up 1", "made up", "made up"]
    assert len(made_up) == 2
    assert aborted == {}


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
    assert aborted == {}


def test_who_dies_in_a_warm_up_is_named_before_the_others_capture(collective):
    def dies(ranks):
        ranks.begin()

    ((error, reached), _), aborted = on_two_ranks(lambda ranks: capture(ranks, collective), dies, deadline=0.2)
    assert type(error) is RankDisagreementError
    assert "rank 1: did not come within 0.2 s" in str(error)
    assert reached == ["warm-up 1", "warm-up 2"]
    assert aborted == {0: {dist.group.WORLD}}


@pytest.mark.parametrize("issued", [0, 1])
def test_who_fails_again_while_making_up_is_out_of_step(collective, issued):
    def never():
        raise ValueError("too early")

    def again():
        for _ in range(issued):
            collective()
        raise ValueError("again")

    def whole():
        collective()
        collective()

    results, aborted = on_two_ranks(
        lambda ranks: capture(ranks, whole), lambda ranks: capture(ranks, never, again=again)
    )
    assert [type(error) for error, _ in results] == [RankDisagreementError] * 2
    assert "rank 1: it raised too early" in str(results[0][0])
    assert results[0][1] == ["warm-up 1", "warm-up 2"]
    assert results[1][1] == ["warm-up 1", "made up"]
    assert set(aborted) == {0, 1}


def test_who_fails_behind_its_last_collective_is_in_step(collective):
    runs = []

    def fails_the_second_time():
        collective()
        runs.append(True)
        if len(runs) == 2:
            raise ValueError("at the end")

    results, aborted = on_two_ranks(
        lambda ranks: capture(ranks, collective), lambda ranks: capture(ranks, fails_the_second_time)
    )
    assert [str(failure) for failure, _ in results] == ["rank 1: it raised at the end", "it raised at the end"]
    assert results[1][1] == ["warm-up 1", "warm-up 2"], "there is nothing to make up for"
    assert aborted == {}


def test_captures_that_run_collectives_are_made_up_for_too(collective):
    def fails():
        raise ValueError("no graph")

    results, aborted = on_two_ranks(
        lambda ranks: capture(ranks, collective, captures=collective, captures_run=True),
        lambda ranks: capture(ranks, collective, captures=fails, captures_run=True),
        captures_run=True,
    )
    assert [str(failure) for failure, _ in results] == ["rank 1: it raised no graph", "it raised no graph"]
    assert results[1][1] == ["warm-up 1", "warm-up 2", "capture", "made up"]
    assert aborted == {}


def test_collectives_of_others_are_not_made_up_for(collective):
    def refused():
        try:
            raise ForeignCollectiveError("on other ranks")
        except ForeignCollectiveError as error:
            raise CaptureError("warm-up 1 failed") from error

    results, aborted = on_two_ranks(*[lambda ranks: capture(ranks, refused, again=collective)] * 2)
    assert [(str(failure), reached) for failure, reached in results] == [
        ("it raised warm-up 1 failed", ["warm-up 1"])
    ] * 2
    assert aborted == {}


def test_who_waits_in_vain_three_times_in_a_row_gives_up(collective):
    agreement = Agreement(dist.HashStore(), [0, 1], 0, 0.05)
    severities = []
    for number in range(4):
        together = Together(
            agreement,
            f"call {number}",
            "digest",
            "",
            2,
            captures_run=False,
            break_off=never_break_off,
        )
        failure, reached = capture(together, collective)
        assert reached == []
        severities.append(failure.severity)
    assert severities == ["refuse", "refuse", "disable", "disable"]


def test_ranks_that_keep_other_graphs_are_warned(collective, caplog):
    store = dist.HashStore()

    def run(rank):
        agreement = Agreement(store, [0, 1], rank, 20.0)
        holds = f"{rank} graphs"
        together = Together(agreement, "call 1", "digest", holds, 2, captures_run=False, break_off=never_break_off)
        return capture(together, collective)[0]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [None, None]
    assert [record.getMessage() for record in caplog.records] == [
        "the ranks do not keep the same graphs, and will wait for each other in vain: "
        "rank 0: 0 graphs; rank 1: 1 graphs"
    ] * 2
