"""Options that ranks cannot run with: told before the ranks meet, on a line that says what to do."""

import pytest
import torch

from graphreplay_harness import bench_agreement, cases, soak

PROGRAMS = [bench_agreement, cases, soak]


@pytest.fixture
def torchrun(monkeypatch):
    """Sets what torchrun sets, for so many ranks on this machine."""

    def of(ranks):
        for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)):
            monkeypatch.setenv(name, str(value))

    return of


def refused(program, arguments, capsys):
    """The last line on stderr of a program that refuses its arguments."""
    with pytest.raises(SystemExit) as caught:
        program.main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()[-1].partition("error: ")[2]


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_torchrun(program, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert refused(program, [], capsys) == "start it with torchrun, or torch.distributed.run"


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("found", [0, 1])
def test_fewer_gpus_than_ranks(program, found, torchrun, monkeypatch, capsys):
    torchrun(2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    message = f"--device cuda takes a GPU for each rank, and PyTorch finds {found} for 2 here; "
    assert refused(program, ["--device", "cuda"], capsys) == message + "start fewer ranks, or take --device cpu"


def test_ranks_that_cannot_share_the_heads_of_the_soak(torchrun, capsys):
    torchrun(3)
    assert refused(soak, [], capsys) == "3 ranks cannot share 8 heads evenly; start 1, 2, 4 or 8"
