"""Groups of ranks that are processes: what the constructor refuses, and what two ranks do together.

The harness runs every fault at every place of a capture on top of this (``graphreplay_harness.cases``).

| kind | outcome | test |
| --- | --- | --- |
| ranks that call alike | captured together, replayed | test_ranks[together] |
| all-to-all and other collectives | the same | test_ranks[exchange] |
| sizes that differ per rank | the same | test_ranks[uneven] |
| collectives and no group | disabled, with what to pass | test_ranks[none] |
| collectives beyond the group | disabled | test_ranks[beyond the group] |
| functional ones, which go by name | the same | test_ranks[functional beyond the group] |
| failures before such a collective | none is made up for | test_ranks[refused collectives are not made up for] |
| structure or constants that differ | eager, the sides named | test_ranks[structure] |
| warm-ups that differ | the same | test_ranks[warm-ups] |
| a rank that runs eagerly where the others miss | they learn at once | test_ranks[eager], test_ranks[prepare] |
| a rank that closes its wrapper | the others disabled, with that reason | test_ranks[closed] |
| a wait for the device on one rank | all disabled, in step | test_ranks[a wait behind the last collective] |
| a tensor that the forward moves on one rank | all disabled, state as by eager | test_ranks[moved on one rank] |
| a call that raises on one rank | counts as one | test_ranks[a call that raises] |
| a failure before a collective of a warm-up | disabled, state as by eager | test_ranks[state of what is made up for] |
| an interrupt in a capture | raised; RankDisagreementError on the others | test_ranks[interrupted] |
| ranks out of step | every later call raises | test_ranks[out of step] |
| a group without this rank, destroyed, or none | error at construction | test_ranks[members], test_ranks[destroyed] |
| no torch.distributed | error at construction | test_ranks[no group] |
| a pool of two groups | error at construction | test_ranks[one pool] |
"""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
import graphreplay

rank = int(sys.argv[1])
dist.init_process_group(
    "gloo", rank=rank, world_size=2, store=dist.FileStore(sys.argv[2], 2), timeout=timedelta(seconds=int(sys.argv[3]))
)

class Sum(torch.nn.Module):
    def forward(self, *, x):
        y = x * 2
        dist.all_reduce(y)
        return y + 1

def wrap(**options):
    return graphreplay.ReferenceGraphedForward(Sum(), device="cpu", deadline=20.0, **options)

def refusal(**options):
    try:
        wrap(**options)
    except graphreplay.ConfigurationError as error:
        print(error)
    else:
        print("taken")

"""

SCRIPTS = {
    "prepare": (
        """
import graphreplay.request
graphed = wrap(group=dist.group.WORLD)
with torch.no_grad():
    if rank == 0:
        print(graphed.prepare(x=torch.ones(1).to_sparse()))
    else:
        print(graphed.prepare(x=torch.ones(1)))
    print([graphed(x=torch.full((2,), float(i + rank))).tolist() for i in range(3)], graphed.stats()["replays"])
    print(graphed.prepare(x=torch.ones(3)), graphed(x=torch.ones(3)).tolist(), graphed.stats()["replays"])
    if rank == 0:
        graphed._refuse(graphed._request(dict(x=torch.ones(4)), graphreplay.request.CallOptions()).key, "as it is")
    print(graphed.prepare(x=torch.ones(4)), any("as it is" in why for why in graphed.stats()["miss_reasons"]))
""",
        ["False\n[[3.0, 3.0], [7.0, 7.0], [11.0, 11.0]] 2\nTrue [5.0, 5.0, 5.0] 3\nFalse True"] * 2,
    ),
    "eager": (
        """
graphed = wrap(group=dist.group.WORLD)
with torch.no_grad():
    x = torch.ones(1, requires_grad=rank == 0)
    with torch.set_grad_enabled(rank == 0):
        print(graphed(x=x).item())
    print(graphed(x=torch.ones(2)).tolist(), graphed(x=torch.ones(2)).tolist(), graphed.stats()["replays"])
""",
        ["5.0\n[5.0, 5.0] [5.0, 5.0] 1"] * 2,
    ),
    "alone in a group": (
        """
own = [dist.new_group([0]), dist.new_group([1])][rank]

class Own(torch.nn.Module):
    def forward(self, *, x):
        dist.all_reduce(x, group=own)
        return x + 1

graphed = graphreplay.ReferenceGraphedForward(Own(), device="cpu", group=own)
with torch.no_grad():
    print([graphed(x=torch.ones(1)).item() for _ in range(3)], graphed.stats()["replays"])
""",
        ["[2.0, 2.0, 2.0] 2"] * 2,
    ),
    "beyond the group": (
        """
own = [dist.new_group([0]), dist.new_group([1])][rank]
graphed = wrap(group=own)
with torch.no_grad():
    print([graphed(x=torch.ones(1)).item() for _ in range(2)], "on the ranks [0, 1]" in graphed.disabled_reason)
""",
        ["[5.0, 5.0] True"] * 2,
    ),
    "no group": (
        """
refusal(group=[0, 1])
""",
        ["group is a ProcessGroup of torch.distributed, not list"] * 2,
    ),
    "one pool": (
        """
other = dist.new_group([0, 1], backend="gloo")
pool = graphreplay.GraphPool()
wrap(group=dist.group.WORLD, pool=pool)
wrap(group=other, pool=pool)
print("shared")
single = [dist.new_group([0]), dist.new_group([1])][rank]
refusal(group=single, pool=pool)
""",
        [f"shared\nthis pool belongs to the ranks [0, 1]; make another one for [{rank}]" for rank in range(2)],
    ),
    "exchange": (
        """
class Ring(torch.nn.Module):
    def forward(self, *, x):
        got = torch.empty_like(x)
        works = [dist.isend(x, 1 - rank), dist.irecv(got, 1 - rank)]
        [work.wait() for work in works]
        return got + x

graphed = graphreplay.ReferenceGraphedForward(Ring(), device="cpu", group=dist.group.WORLD, deadline=20.0)
with torch.no_grad():
    print([graphed(x=torch.full((1,), float(10 * i + rank))).item() for i in range(4)], graphed.stats()["replays"])
""",
        ["[1.0, 21.0, 41.0, 61.0] 3"] * 2,
    ),
    "functional": (
        """
name = dist.group.WORLD.group_name

class Functional(torch.nn.Module):
    def forward(self, *, x):
        y = torch.ops._c10d_functional.all_reduce(x * 2, "sum", name)
        return torch.ops._c10d_functional.wait_tensor(y) + 1

graphed = graphreplay.ReferenceGraphedForward(Functional(), device="cpu", group=dist.group.WORLD, deadline=20.0)
with torch.no_grad():
    values = [graphed(x=torch.full((1 << 20,), float(i + rank))).unique().tolist() for i in range(6)]
print(values, graphed.stats()["replays"])
""",
        ["[[3.0], [7.0], [11.0], [15.0], [19.0], [23.0]] 5"] * 2,
    ),
    "only read": (
        """
class Gather(torch.nn.Module):
    def forward(self, *, x):
        out = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(out, x)
        return torch.cat(out)

graphed = graphreplay.ReferenceGraphedForward(Gather(), device="cpu", group=dist.group.WORLD, deadline=20.0)
with torch.inference_mode():
    inputs = [torch.full((1,), float(i + rank)) for i in range(3)]
with torch.no_grad():
    print([graphed(x=x).tolist() for x in inputs], graphed.stats()["replays"])
""",
        ["[[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]] 2"] * 2,
    ),
    "no collectives in graphs": (
        """
class Without(graphreplay.ReferenceGraphedForward):
    why_no_collectives = "graphs of this test hold none"

graphed = Without(Sum(), device="cpu", group=dist.group.WORLD, deadline=20.0)
plain = Without(lambda *, x: x + 1, device="cpu", group=dist.group.WORLD, deadline=20.0)
with torch.no_grad():
    print(graphed.prepare(x=torch.ones(3)))
    print([graphed(x=torch.full((2,), float(i + rank))).tolist() for i in range(3)], graphed.captures)
    print(graphed.disabled_reason)
    print([plain(x=torch.full((1,), float(i))).item() for i in range(3)], plain.stats()["replays"])
""",
        [
            "False\n[[3.0, 3.0], [7.0, 7.0], [11.0, 11.0]] 0\nwarm-up 1 under the host-sync probe failed: the forward "
            "runs collectives: graphs of this test hold none\n[1.0, 2.0, 3.0] 2"
        ]
        * 2,
    ),
    "no collectives in graphs, called": (
        """
class Without(graphreplay.ReferenceGraphedForward):
    why_no_collectives = "graphs of this test hold none"

graphed = Without(Sum(), device="cpu", group=dist.group.WORLD, deadline=20.0)
with torch.no_grad():
    print([graphed(x=torch.full((2,), float(i + rank))).tolist() for i in range(4)], graphed.captures)
print(graphed.stats()["eager_reasons"] == {graphed.disabled_reason: 3})
""",
        ["[[3.0, 3.0], [7.0, 7.0], [11.0, 11.0], [15.0, 15.0]] 0\nTrue"] * 2,
    ),
    "members": (
        """
only = dist.new_group([0])
refusal(group=only)
""",
        ["taken", "rank 1 is not in the group; wrap on its ranks alone"],
    ),
    "destroyed": (
        """
gone = dist.new_group([0, 1])
dist.barrier()
dist.destroy_process_group(gone)
refusal(group=gone)
""",
        ["this process knows no such group; it may be destroyed"] * 2,
    ),
    "none": (
        """
graphed = wrap()
with torch.no_grad():
    print([graphed(x=torch.ones(1)).item() for _ in range(2)], "pass group=" in graphed.disabled_reason)
""",
        ["[5.0, 5.0] True"] * 2,
    ),
    "together": (
        """
graphed = wrap(group=dist.group.WORLD)
with torch.no_grad():
    values = [graphed(x=torch.full((2,), float(i + rank))).tolist() for i in range(4)]
print(values, graphed.captures, graphed.stats()["replays"], graphed.disabled_reason)
graphed.close()
""",
        ["[[3.0, 3.0], [7.0, 7.0], [11.0, 11.0], [15.0, 15.0]] 1 3 None"] * 2,
    ),
    "in place": (
        """
class InPlace(torch.nn.Module):
    def forward(self, *, x):
        dist.all_reduce(x)
        return x + 1

graphed = graphreplay.ReferenceGraphedForward(InPlace(), device="cpu", group=dist.group.WORLD, deadline=20.0)
with torch.no_grad():
    for i in range(3):
        x = torch.full((2,), float(i + rank))
        print(graphed(x=x).tolist(), x.tolist())
print(graphed.stats()["replays"])
""",
        ["[2.0, 2.0] [1.0, 1.0]\n[4.0, 4.0] [3.0, 3.0]\n[6.0, 6.0] [5.0, 5.0]\n2"] * 2,
    ),
    "uneven": (
        """
graphed = wrap(group=dist.group.WORLD)
class Mean(torch.nn.Module):
    def forward(self, *, x):
        total = x.sum(0, keepdim=True)
        dist.all_reduce(total)
        return x + total

graphed = graphreplay.ReferenceGraphedForward(Mean(), device="cpu", group=dist.group.WORLD, deadline=20.0)
with torch.no_grad():
    print([graphed(x=torch.ones(2 + rank, 1) * i).sum().item() for i in range(3)], graphed.captures)
""",
        ["[0.0, 12.0, 24.0] 1", "[0.0, 18.0, 36.0] 1"],
    ),
    "structure": (
        """
graphed = wrap(group=dist.group.WORLD)
graphed.module.forward = lambda *, x, scale: Sum.forward(graphed.module, x=x) * scale
with torch.no_grad():
    for _ in range(2):
        graphed(x=torch.ones(1), scale=rank)
print(graphed.captures, *graphed.stats()["eager_reasons"])
""",
        [
            "0 ranks [0] and [1] call differently: in the structure or constants of their kwargs, in variant=, in grad "
            "or autocast mode, or in warmup_iters="
        ]
        * 2,
    ),
    "out of step": (
        """
from graphreplay.peers import fall_out_of_step
first, second = wrap(group=dist.group.WORLD), wrap(group=dist.group.WORLD)
third = wrap(group=dist.new_group([0, 1]))
x = torch.ones(1)
with torch.no_grad():
    print([wrapper(x=x).item() for wrapper in (first, second, first, second)], second.stats()["replays"])
    fall_out_of_step("rank 7: died")
    for call in (second, third, second.prepare):  # eager collectives may mix: nothing may be returned
        try:
            call(x=x)
        except graphreplay.RankDisagreementError as error:
            print(error)
alone = graphreplay.ReferenceGraphedForward(torch.nn.Identity(), device="cpu")
print(alone.module(x).item(), second.stats()["replays"])
refusal(group=dist.group.WORLD, verify="first")
""",
        [
            "[5.0, 5.0, 5.0, 5.0] 1\n" + 3 * "this process is out of step with other ranks: rank 7: died\n" + "1.0 1\n"
            "verify='first' runs the forward once more, collectives and all, at replays that the other ranks need not "
            "have; verify on one rank"
        ]
        * 2,
    ),
    "functional beyond the group": (
        """
own = [dist.new_group([0]), dist.new_group([1])][rank]
class Functional(torch.nn.Module):
    def forward(self, *, x):
        name = dist.group.WORLD.group_name
        y = torch.ops._c10d_functional.all_reduce(x, "sum", name)
        return torch.ops._c10d_functional.wait_tensor(y) + 1
graphed = graphreplay.ReferenceGraphedForward(Functional(), device="cpu", group=own)
with torch.no_grad():
    print([graphed(x=torch.ones(2) * i).tolist() for i in range(3)], graphed.captures)
print("pass a group of all ranks" in graphed.disabled_reason or graphed.disabled_reason)
""",
        ["[[1.0, 1.0], [3.0, 3.0], [5.0, 5.0]] 0\nTrue"] * 2,
    ),
    "refused collectives are not made up for": (
        """
pairs = [dist.new_group([0]), dist.new_group([1])]
graphed = wrap(group=pairs[rank], enabled=rank == 0)  # its forward sums over both ranks
with torch.no_grad():
    print([graphed(x=torch.full((1,), float(i))).item() for i in range(4)])
""",
        ["[1.0, 5.0, 9.0, 13.0]"] * 2,
    ),
    "state of what is made up for": (
        """
class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = [torch.zeros(1)]
        self.calls = 0
    def forward(self, *, x):
        self.calls += 1
        self.cache[0] += 1
        y = x * 2
        dist.all_reduce(y)
        return y + self.cache[0] + self.calls

class Fails:
    def __enter__(self):
        if rank == 1:
            raise ValueError("cannot enter")
    def __exit__(self, *_):
        pass

graphed = graphreplay.ReferenceGraphedForward(
    Counts(), device="cpu", group=dist.group.WORLD, deadline=20.0, capture_context=Fails
)
with torch.no_grad():
    print([graphed(x=torch.ones(1)).item() for _ in range(3)], graphed.module.cache[0].item(), graphed.module.calls)
print("cannot enter" in graphed.disabled_reason or graphed.disabled_reason)
""",
        ["[6.0, 8.0, 10.0] 3.0 3\nTrue"] * 2,
    ),
    "a wait behind the last collective": (
        """
class Logs(Sum):
    def forward(self, *, x):
        y = super().forward(x=x)
        if rank == 0:
            y.sum().item()
        return y
graphed = graphreplay.ReferenceGraphedForward(Logs(), device="cpu", group=dist.group.WORLD, deadline=20.0)
with torch.no_grad():
    print([graphed(x=torch.full((1,), float(i))).item() for i in range(3)])
print("host wait" in graphed.disabled_reason or graphed.disabled_reason)
""",
        ["[1.0, 5.0, 9.0]\nTrue"] * 2,
    ),
    "moved on one rank": (
        """
held = torch.zeros(1)
class Moves(Sum):
    def forward(self, *, x):
        y = super().forward(x=x) + held
        if rank == 0:
            held.data = held + 1
        return y
graphed = graphreplay.ReferenceGraphedForward(Moves(), device="cpu", group=dist.group.WORLD, deadline=20.0)
with torch.no_grad():
    print([graphed(x=torch.full((1,), float(i))).item() for i in range(3)], held.item())
print("moves a tensor" in graphed.disabled_reason or graphed.disabled_reason)
""",
        ["[1.0, 6.0, 11.0] 3.0\nTrue", "[1.0, 5.0, 9.0] 0.0\nTrue"],
    ),
    "a call that raises": (
        """
graphed = graphreplay.ReferenceGraphedForward(
    lambda *, x: x + 1, device="cpu", group=dist.group.WORLD, deadline=20.0
)
x = torch.ones(1)
for method in (graphed, graphed.prepare):
    try:
        method(x=x, **({"variant": object()} if rank == 0 else {}))
    except graphreplay.UnsupportedLeafError:
        pass
with torch.no_grad():
    print([graphed(x=torch.full((2,), float(i))).tolist() for i in range(3)], graphed.captures)
print(graphed.stats()["replays"], graphed.disabled_reason)
""",
        ["[[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]] 1\n2 None"] * 2,
    ),
    "warm-ups": (
        """
graphed = wrap(group=dist.group.WORLD, warmup_iters=2 + rank)
with torch.no_grad():
    print([graphed(x=torch.full((1,), float(i))).item() for i in range(3)], graphed.captures)
print("warmup_iters=" in str(graphed.stats()["eager_reasons"]) or graphed.stats())
""",
        ["[1.0, 5.0, 9.0] 0\nTrue"] * 2,
    ),
    "interrupted": (
        """
class Interrupts:
    def __enter__(self):
        if rank == 1:
            raise KeyboardInterrupt
    def __exit__(self, *_):
        pass
graphed = wrap(group=dist.group.WORLD, capture_context=Interrupts)
with torch.no_grad():
    for _ in range(2):
        try:
            graphed(x=torch.ones(1))
        except BaseException as error:
            print(type(error).__name__, "interrupted" in str(error))
sys.stdout.flush()
os._exit(0)
""",
        [
            "RankDisagreementError True\nRankDisagreementError True",
            "KeyboardInterrupt False\nRankDisagreementError True",
        ],
    ),
    "closed": (
        """
graphed = wrap(group=dist.group.WORLD)
with torch.no_grad():
    graphed(x=torch.ones(1))
    dist.barrier()
    if rank == 1:
        graphed.close()
        module = graphed.module
    else:
        module = graphed
    dist.barrier()
    print(module(x=torch.ones(2)).tolist(), graphed.disabled_reason)
""",
        ["[5.0, 5.0] rank 1: left: it was closed", "[5.0, 5.0] None"],
    ),
}


TIMEOUTS = {"interrupted": 3}
"""Seconds that a collective waits in vain, where one has to; 60 elsewhere."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_ranks(name, tmp_path):
    script, expected = SCRIPTS[name]
    end = "dist.barrier()\nsys.stdout.flush()\nos._exit(0)\n"  # destroying groups is not what is tested
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                PROGRAM + script + end,
                str(rank),
                str(tmp_path / "store"),
                str(TIMEOUTS.get(name, 60)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [process.communicate(timeout=90) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [out.strip() for out, _ in results] == expected, results
