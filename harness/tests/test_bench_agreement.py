"""The benchmark of agreement, short, on two CPU ranks."""

import json
import os
import subprocess
import sys

import pytest

from graphreplay_harness import bench_agreement


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_short_run(tmp_path, repeats):
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "graphreplay_harness.bench_agreement", "--repeats", str(repeats), "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    assert content.pop("ranks") == 2
    names = ["a meeting", "meetings of a capture", "replay with a group", "replay without a group"]
    # The ranks meet before a capture's warm-up, before the capture, and after it.
    assert {name: len(samples) for name, samples in content.items()} == {
        name: 3 * repeats if name == "a meeting" else repeats for name in names
    }
    meetings = content["a meeting"]
    sums = [sum(meetings[first : first + 3]) for first in range(0, 3 * repeats, 3)]
    assert content["meetings of a capture"] == pytest.approx(sums, abs=0.01)
    assert min(map(min, content.values())) > 0
    lines = done.stdout.splitlines()
    assert lines[0] == f"2 ranks, {repeats} samples each: median (quartiles), in microseconds"
    assert [line[:24].strip() for line in lines[1:]] == names


def test_one_rank_is_refused(monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        bench_agreement.main([])
    assert "error: one rank has nobody to agree with; start two or more" in capsys.readouterr().err
