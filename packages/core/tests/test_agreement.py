"""Ranks as threads over one store: meetings, deadlines, and verdicts that all read alike."""

import json
import threading
import time
from dataclasses import asdict

import pytest
import torch
from torch import distributed as dist

import graphreplay
from graphreplay.agreement import KEPT_EXCUSES, Agreement, Ballot
from graphreplay.digest import key_digest
from graphreplay.request import Key
from graphreplay.signature import kwargs_signature


@pytest.fixture
def store():
    return dist.HashStore()


def on_ranks(size, run):
    """``run(rank)`` on threads, one a rank; what each returns, by rank."""
    results, errors = {}, []

    def work(rank):
        try:
            results[rank] = run(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert errors == []
    assert not any(thread.is_alive() for thread in threads)
    return results


def agreements(store, size, deadline=30.0):
    return [Agreement(store, list(range(size)), rank, deadline) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_go_on_where_all_come_and_mean_the_same(store, size):
    peers = agreements(store, size)

    def run(rank):
        return [peers[rank].meet(f"call {n}/before", Ballot("d")).go for n in range(5)]

    assert on_ranks(size, run) == {rank: [True] * 5 for rank in range(size)}
    assert store.num_keys() <= 2 * (size + 1), "the meetings before the last two are forgotten"


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 2)])
def test_one_failure_stops_all_and_each_reads_its_own_reason_first(store, failing):
    peers = agreements(store, 3)

    def run(rank):
        failed = rank in failing
        ballot = Ballot("d", f"planned on {rank}" if failed else None, "disable" if failed else "")
        verdict = peers[rank].meet("call 1/after", ballot)
        return verdict.go, verdict.severity, verdict.why(rank)

    for rank, (go, severity, why) in on_ranks(3, run).items():
        assert (go, severity) == (False, "disable")
        assert why.startswith(f"planned on {rank}" if rank in failing else f"rank {failing[0]}: planned")
        assert all(f"planned on {other}" in why for other in failing)


def test_a_reason_that_all_have_is_said_once(store):
    peers = agreements(store, 3)
    seen = on_ranks(3, lambda rank: peers[rank].meet("p", Ballot("d", "the same", "disable")).why(rank))
    assert set(seen.values()) == {"the same"}


def test_the_worst_severity_counts(store):
    peers = agreements(store, 3)
    severities = ["skip", "refuse", ""]
    seen = on_ranks(3, lambda rank: peers[rank].meet("p", Ballot("d", "f" if rank < 2 else None, severities[rank])))
    assert {verdict.severity for verdict in seen.values()} == {"refuse"}


def test_other_digests_do_not_go_together(store):
    peers = agreements(store, 4)
    seen = on_ranks(4, lambda rank: peers[rank].meet("p", Ballot("ab"[rank // 2])))
    assert {verdict.go for verdict in seen.values()} == {False}
    assert {verdict.why(0) for verdict in seen.values()} == {
        "ranks [0, 1] and [2, 3] call differently: in the structure or constants of their kwargs, in variant=, in grad "
        "or autocast mode, or in warmup_iters="
    }


def test_other_progress_is_out_of_step(store):
    peers = agreements(store, 2)
    assert on_ranks(2, lambda r: peers[r].meet("a", Ballot("d", progress="all")).in_step) == {0: True, 1: True}
    assert on_ranks(2, lambda r: peers[r].meet("b", Ballot("d", progress=str(r))).in_step) == {0: False, 1: False}


def test_who_does_not_come_is_named_within_the_deadline_with_the_place_last_seen(store):
    peers = agreements(store, 3, deadline=0.2)
    peers[2].at("call 7, warm-up 1")
    start = time.monotonic()
    seen = on_ranks(2, lambda rank: peers[rank].meet("call 7/after", Ballot("d")))
    assert time.monotonic() - start < 5
    for verdict in seen.values():
        assert (verdict.go, verdict.gone, list(verdict.missing)) == (False, False, [2])
        assert verdict.why(0) == "rank 2: did not come within 0.2 s, seen last at call 7, warm-up 1"


def test_who_comes_late_reads_the_same_verdict(store):
    peers = agreements(store, 2, deadline=0.05)
    first = peers[0].meet("p", Ballot("d"))
    late = peers[1].meet("p", Ballot("d"))
    assert first == late
    assert list(late.missing) == [1]
    assert late.why(1) == "this rank came after the others had given up"
    assert late.why(0) == "rank 1: did not come within 0.05 s"


def test_who_has_left_is_not_waited_for(store):
    peers = agreements(store, 2, deadline=60.0)
    peers[1].leave("its capture failed: planned")
    start = time.monotonic()
    verdict = peers[0].meet("p", Ballot("d"))
    assert time.monotonic() - start < 5
    assert verdict.gone
    assert verdict.why(0) == "rank 1: left: its capture failed: planned"


def test_who_was_alone_is_heard_by_each_of_the_others_at_its_next_meeting(store, caplog):
    peers = agreements(store, 4)
    for call in (3, 8):
        peers[0].alone(f"nobody came to call {call}")
        for place in ("before", "after"):
            on_ranks(4, lambda rank, place=f"{call}/{place}": peers[rank].meet(place, Ballot("d")))
        assert caplog.messages == [f"rank 0: nobody came to call {call}"] * 3
        caplog.clear()


def test_who_is_interrupted_while_it_waits_stops_the_others(store, monkeypatch):
    peers = agreements(store, 2, deadline=60.0)

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            peers[0].meet("p", Ballot("d"))
    verdict = peers[1].meet("p", Ballot("d"))
    assert not verdict.go
    assert verdict.missing == {0: "was interrupted"}


def test_waits_in_vain_are_counted_in_a_row(store):
    peers = agreements(store, 2, deadline=0.01)
    for place in "ab":
        peers[0].meet(place, Ballot("d"))
    assert peers[0].waits_in_vain == 2
    peers = [Agreement(store, [0, 1], rank, 30.0) for rank in range(2)]
    peers[0].waits_in_vain = 2
    on_ranks(2, lambda rank: peers[rank].meet("c", Ballot("d")))
    assert peers[0].waits_in_vain == 0


def test_racing_proposals_end_in_one_verdict(store):
    """Deadlines that pass at the same moment as the last rank comes."""
    for turn in range(30):
        here = dist.PrefixStore(str(turn), store)
        peers = agreements(here, 3, deadline=0.002)

        def run(rank, peers=peers, here=here):
            while rank == 2 and not here.check(["p/0"]):
                pass  # the others' deadline runs from now on
            return peers[rank].meet("p", Ballot("d"))

        seen = on_ranks(3, run)
        assert len({(verdict.go, tuple(verdict.missing)) for verdict in seen.values()}) == 1


def test_a_store_that_is_gone_is_an_error_that_says_so():
    class Gone(dist.Store):
        def set(self, key, value):
            raise RuntimeError("connection refused")

    with pytest.raises(graphreplay.RankDisagreementError, match="rank 0 cannot reach the store, at p: connection"):
        Agreement(Gone(), [0, 1], 0, 1.0).meet("p", Ballot("d"))


# ----------------------------------------------------------------------------------------------- digests


def digest(kwargs, device="cpu", variant=None, ambient=(True,)):
    made = None if variant is None else kwargs_signature(variant)
    return key_digest(Key(kwargs_signature(kwargs), ambient, (), made), torch.device(device))


SAME = {"x": torch.zeros(2, 3), "n": 4, "mask": None, "deep": [torch.zeros(1)]}


def test_ranks_may_differ_in_sizes_and_in_their_own_device():
    assert digest(SAME) == digest({**SAME, "x": torch.zeros(5, 3)})
    meta = {"x": torch.zeros(2, 3, device="meta")}
    assert digest({"x": torch.zeros(2, 3)}, "cpu") == digest(meta, "meta")
    assert digest({"d": torch.device("cuda:0")}, "cuda:0") == digest({"d": torch.device("cuda:1")}, "cuda:1")


@pytest.mark.parametrize(
    "other",
    [
        {**SAME, "x": torch.zeros(2, 3, 1)},
        {**SAME, "x": torch.zeros(2, 3, dtype=torch.float64)},
        {**SAME, "x": torch.zeros(2, 3, device="meta")},
        {**SAME, "n": 5},
        {**SAME, "n": 4.0},
        {**SAME, "mask": torch.zeros(2)},
        {**SAME, "deep": (torch.zeros(1),)},
        {**SAME, "more": 1},
    ],
)
def test_structure_and_constants_count(other):
    assert digest(SAME) != digest(other)


def test_variants_and_process_state_count():
    assert digest(SAME, variant="a") != digest(SAME, variant="b") != digest(SAME)
    assert digest(SAME, ambient=(True,)) != digest(SAME, ambient=(False,))


def test_what_is_told_on_the_way_out_never_raises(caplog):
    class Gone(dist.Store):
        def set(self, key, value):
            raise RuntimeError("connection refused")

    peer = Agreement(Gone(), [0, 1], 0, 1.0)
    peer.leave("closed")
    peer.alone("waited")
    peer.excuse("call 1/before", Ballot("d", "raised", "skip"))
    assert len(caplog.messages) == 4
    assert all("connection refused" in message for message in caplog.messages)


def test_excuses_wait_for_a_rank_that_is_some_calls_behind(store):
    ahead, behind = Agreement(store, [0, 1], 1, 60.0), Agreement(store, [0, 1], 0, 60.0)
    for call in range(40):
        ahead.excuse(f"call {call}/before", Ballot("", f"reason {call}", "skip", excused=True))
    for call in range(40 - KEPT_EXCUSES, 40):
        verdict = behind.meet(f"call {call}/before", Ballot("d"))
        assert (verdict.go, verdict.missing, verdict.why(0)) == (False, {}, f"rank 1: reason {call}")
    assert store.num_keys() <= KEPT_EXCUSES + 3, "older ones go, and so do the meetings"


def test_clean_up_that_fails_loses_no_verdict(store):
    class Stuck(dist.PrefixStore):
        def delete_key(self, key):
            raise RuntimeError("connection refused")

    agreement = Agreement(Stuck("", store), [0, 1], 0, 60.0)
    for call in range(3):
        dist.PrefixStore("", store).set(f"call {call}/1", json.dumps(asdict(Ballot("d"))))
        assert agreement.meet(f"call {call}", Ballot("d")).go


def test_the_first_reason_to_leave_stays(store):
    agreement = Agreement(store, [0, 1], 1, 60.0)
    agreement.leave("its environment says so")
    agreement.leave("it was closed")
    verdict = Agreement(store, [0, 1], 0, 60.0).meet("call 1", Ballot("d"))
    assert (verdict.gone, verdict.why(0)) == (True, "rank 1: left: its environment says so")


def test_who_is_late_when_somebody_leaves_is_not_said_to_have_taken_its_time(store):
    Agreement(store, [0, 1, 2], 2, 60.0).leave("it was closed")
    verdict = Agreement(store, [0, 1, 2], 0, 60.0).meet("call 1", Ballot("d"))
    assert verdict.missing == {1: "did not come when rank 2 had left", 2: "left: it was closed"}


def test_text_that_no_store_takes_is_told_all_the_same(store):
    agreement = Agreement(store, [0, 1], 1, 60.0)
    agreement.excuse("call 1", Ballot("", "half \ud800 of it", "skip"))
    agreement.leave("half \ud800 of it")
    verdict = Agreement(store, [0, 1], 0, 60.0).meet("call 1", Ballot("d"))
    assert verdict.why(0) == "rank 1: half \ud800 of it"
    assert store.get("left/1") == b"half \\ud800 of it"


def test_a_forked_child_leaves_nothing_behind(store):
    agreement = Agreement(store, [0, 1], 1, 60.0)
    agreement._process += 1  # as in a child, which inherits the object
    agreement.leave("the child ends")
    assert not store.check(["left"])


def test_an_excuse_stops_the_others_at_once(store):
    peers = agreements(store, 2, deadline=60.0)
    peers[1].excuse("call 4/before", Ballot("d", "its forward raised KeyError: 'x'", "skip"))
    verdict = peers[0].meet("call 4/before", Ballot("d"))
    assert (verdict.go, verdict.severity, verdict.why(0)) == (
        False,
        "skip",
        "rank 1: its forward raised KeyError: 'x'",
    )
