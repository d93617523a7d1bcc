"""The endurance run, small, on the CPU: what it counts, and that it would notice."""

import json
import threading

import pytest
import torch

from graphreplay import ReferenceGraphedForward
from graphreplay_harness import endurance

ARGUMENTS = ["--calls", "1500", "--shapes", "20", "--entries", "4", "--threads", "3"]


def run(capsys, *more):
    status = endurance.main([*ARGUMENTS, *more])
    return status, json.loads(capsys.readouterr().out)


def test_all_is_right(capsys):
    status, report = run(capsys)
    assert (status, report["wrong"], report["largest_difference"]) == (0, 0, 0.0)
    assert report["calls"] >= 1500
    assert report["captures"] + report["replays"] == report["calls"], "no call is eager twice"
    assert report["changes"] > 0
    assert report["evictions"] > 0


def test_weights_that_move_unnoticed_are_found(capsys, monkeypatch):
    monkeypatch.setattr(ReferenceGraphedForward, "_drop_if_changed", lambda _: None)
    # Room for all graphs and one thread: no capture comes between, which would notice by itself, and no race.
    status, report = run(capsys, "--threads", "1", "--shapes", "3")
    assert status == 1
    assert report["wrong"] > 0
    assert report["largest_difference"] > 0


def test_a_thread_keeps_its_stream_for_the_whole_run(capsys, monkeypatch):
    threads, take = [], endurance.Endurance.take_stream

    def taken(run):
        threads.append(threading.get_ident())
        take(run)

    monkeypatch.setattr(endurance.Endurance, "take_stream", taken)
    assert run(capsys)[0] == 0
    assert 0 < len(threads) == len(set(threads)) <= 3


@pytest.mark.parametrize("change", endurance.CHANGES)
def test_each_change_shows_in_the_result(change):
    torch.manual_seed(0)
    module, x = endurance.Network(), torch.ones(2, endurance.WIDTH)
    with torch.no_grad():
        before = module(x=x, scale=2.0)["out"].clone()
        endurance.CHANGES[change](module)
        assert not torch.allclose(module(x=x, scale=2.0)["out"], before)


@pytest.mark.parametrize("arguments", [["--calls", "0"], ["--threads", "none"], ["--device", "tpu"]])
def test_bad_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        endurance.main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err
