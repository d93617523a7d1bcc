"""Two ranks on two GPUs that fall out of step: what is left of the process."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist
from graphreplay import RankDisagreementError, get_graphed_forward_cls
from graphreplay_harness.case_modules import SharedMean

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
first, second = (SharedMean(dist.group.WORLD).cuda().eval() for _ in range(2))
told = {"rank": rank}

def fail(*_):
    if rank == 1 and armed:
        raise ValueError("half way")

armed = False
second.second.register_forward_pre_hook(fail)
cls = get_graphed_forward_cls("cuda")
wrap = lambda module: cls(module, device=f"cuda:{rank}", group=dist.group.WORLD, deadline=20.0)
graphs, failing = wrap(first), wrap(second)
x = torch.ones(1, 4, 8, device="cuda")
with torch.inference_mode():
    want = graphs(x=x)
    failing(x=x)
    torch.cuda._sleep(2_000_000_000)  # about a second: what was issued before is still to run
    earlier = graphs(x=x)

    class Armed:
        def __enter__(self):
            global armed
            armed = True
        def __exit__(self, *_):
            pass

    failing._capture_context = Armed
    start = time.monotonic()
    try:
        failing(x=x[:, :2].contiguous())
    except RankDisagreementError as error:
        told["error"] = str(error)
    told["seconds"] = time.monotonic() - start
    told["earlier"] = torch.equal(earlier, want)
    try:
        graphs(x=x)
    except RankDisagreementError as error:
        told["later"] = type(error).__name__
    start = time.monotonic()
    torch.cuda.synchronize()
    graphs.close()
    failing.close()
    dist.destroy_process_group()
told["ending"], told["ended_at"] = time.monotonic() - start, time.time()
sys.stdout.write(json.dumps(told) + "\\n")
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
def test_earlier_results_stay_later_calls_raise_and_the_processes_go(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    ended = time.time()
    reports = sorted(map(json.loads, done.stdout.splitlines()), key=lambda report: report["rank"])
    assert len(reports) == 2, done.stderr
    assert "half way" in reports[1]["error"]
    assert "rank 1: " in reports[0]["error"]
    for report in reports:
        assert report["earlier"], "the abort came before work that all ranks had issued"
        assert report["later"] == "RankDisagreementError"
        assert report["seconds"] < 20
        assert report["ending"] < 10
        assert ended - report["ended_at"] < 10
