"""The modules of several ranks against the same weights on one rank. Run as a script, this file is one of the ranks."""

import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from graphreplay_harness.parallel import MLP, Block, ParallelMLP, UlyssesAttention, shard_of

DIM, HEADS, HIDDEN = 24, 4, 40
BATCHES = (1, 2, 5)
UNEVEN = {2: [(7, 2), (1, 4), (0, 3)], 4: [(3, 1, 4, 2), (1, 6, 1, 1), (2, 0, 5, 0)]}
"""By the number of ranks."""
SECONDS = 50
"""Until ranks that hang are killed."""


@dataclass(frozen=True)
class Case:
    """One set of inputs; each rank makes it from the seed, and takes its piece."""

    batch: int
    lengths: tuple[int, ...]
    implied: bool
    """The module is not told the lengths."""

    @property
    def told(self):
        return None if self.implied else self.lengths

    def full(self):
        """[batch, sequence, DIM]."""
        seeded = torch.Generator().manual_seed(sum(self.lengths) * 10 + self.batch)
        return torch.randn(self.batch, sum(self.lengths), DIM, generator=seeded, dtype=torch.float64)

    def pieces(self):
        return self.full().split(self.lengths, dim=1)


def cases(ranks):
    even = (3,) * ranks
    return [
        Case(batch, lengths, implied)
        for batch in BATCHES
        for lengths, implied in [(even, True), (even, False), *((uneven, False) for uneven in UNEVEN[ranks])]
    ]


def modules(group=None):
    """Attention, a block and a parallel MLP, with the same weights everywhere."""
    torch.manual_seed(3)
    made = UlyssesAttention(DIM, HEADS, group), Block(DIM, HEADS, HIDDEN, group), ParallelMLP(DIM, HIDDEN, group)
    return [module.double().eval().requires_grad_(False) for module in made]


class Collectives(TorchDispatchMode):
    """Notes the collectives that pass through the dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------ ranks


@torch.inference_mode()
def run_rank(rank, ranks, folder):
    """What one rank computes, into a file of its own."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=SECONDS / 2),
    )
    attention, block, mlp = modules(dist.group.WORLD)
    results = []
    for case in cases(ranks):
        piece = case.pieces()[rank]
        results.append(
            {
                "attention": attention(x=piece, lengths=case.told),
                "block": block(x=block(x=piece, lengths=case.told), lengths=case.told),
                "mlp": mlp(x=case.full()),
            }
        )
    seen = {}
    for name, module, x in (("attention", attention, piece), ("mlp", mlp, case.full())):
        with Collectives() as collectives:
            module(x=x, **({"lengths": case.told} if name == "attention" else {}))
        seen[name] = collectives.names
    torch.save({"results": results, "seen": seen, "mlp": mlp.state_dict()}, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(ranks, folder):
    """What each rank saved, in their order."""
    give_up = time.monotonic() + SECONDS
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(ranks), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=max(0, give_up - time.monotonic()))[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.deep)])
def saved(request, tmp_path_factory):
    """The number of ranks, and what each saved."""
    return request.param, run_ranks(request.param, tmp_path_factory.mktemp("ranks"))


def by_case(saved, name):
    """Each case with the ranks' results of that name."""
    ranks, files = saved
    for index, case in enumerate(cases(ranks)):
        yield case, [file["results"][index][name] for file in files]


# ------------------------------------------------------------------------------------------------ tests


@torch.inference_mode()
def test_attention_is_that_of_one_rank(saved):
    attention, _, _ = modules()
    for case, results in by_case(saved, "attention"):
        assert tuple(result.shape[1] for result in results) == case.lengths
        assert_close(torch.cat(results, dim=1), attention(x=case.full()))


@torch.inference_mode()
def test_attention_heeds_the_other_ranks(saved):
    attention, _, _ = modules()
    for case, results in by_case(saved, "attention"):
        for piece, result in zip(case.pieces(), results, strict=True):
            if 0 < piece.shape[1] < sum(case.lengths):
                assert (attention(x=piece) - result).abs().amax(dim=2).min() > 1e-3


@torch.inference_mode()
def test_two_blocks_are_those_of_one_rank(saved):
    _, block, _ = modules()
    for case, results in by_case(saved, "block"):
        assert_close(torch.cat(results, dim=1), block(x=block(x=case.full())))


@torch.inference_mode()
def test_mlp_is_that_of_one_rank_on_every_rank(saved):
    _, _, mlp = modules()
    for case, results in by_case(saved, "mlp"):
        for result in results:
            assert_close(result, mlp(x=case.full()))
            assert torch.equal(result, results[0])


def test_ranks_hold_shares_of_the_same_weights(saved):
    ranks, files = saved
    whole = modules()[2].shard
    for rank, file in enumerate(files):
        share = {f"shard.{name}": weight for name, weight in shard_of(whole, rank, ranks).state_dict().items()}
        assert share["shard.first.weight"].shape == (HIDDEN // ranks, DIM)
        assert_close(file["mlp"], share, rtol=0, atol=0)


def test_collectives_pass_through_the_dispatcher(saved):
    for file in saved[1]:
        assert file["seen"] == {
            "attention": ["c10d.alltoall_base_.default"] * 2,
            "mlp": ["c10d.allreduce_.default"],
        }


@torch.inference_mode()
def test_shares_add_up_to_the_whole_mlp():
    full = MLP(DIM, HIDDEN).double()
    x = torch.randn(2, 3, DIM, dtype=torch.float64)
    shares = [shard_of(full, rank, 4) for rank in range(4)]
    assert_close(sum(share(x=x) for share in shares) - 3 * full.second.bias, full(x=x))


def test_what_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="a width of 24 among 5 heads"):
        UlyssesAttention(24, 5)
    with pytest.raises(ValueError, match="41 hidden units do not divide among 2 ranks"):
        shard_of(MLP(DIM, 41), 0, 2)


@pytest.mark.parametrize("lengths", [(3,), (4, 4), ()])
def test_lengths_of_other_inputs_are_refused(lengths):
    with pytest.raises(ValueError, match="rank 0 of 1 has a piece of 4, but lengths="):
        UlyssesAttention(DIM, HEADS)(x=torch.zeros(1, 4, DIM), lengths=lengths)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
