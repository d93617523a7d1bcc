"""Captures beside TaoMate's own memo class."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from graphreplay_taomate import GraphedForward, capture_context


class DiT(nn.Module):
    """Two blocks whose shifts and scales come through the memo, as in TaoMate's transformer."""

    def __init__(self, memo):
        super().__init__()
        torch.manual_seed(0)
        self.adaln_cache = memo
        self.time = nn.Linear(3, 8)
        self.projections = nn.ModuleList(nn.Linear(8, 32) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.eval().requires_grad_(False)
        self.fail = None

    def forward(self, *, x, times):
        t_emb = self.time(times)
        self.adaln_cache.prepare(t_emb)
        for index, (projection, block) in enumerate(zip(self.projections, self.blocks, strict=True)):
            project = self.adaln_cache.project(f"blocks.{index}", projection, t_emb, lambda p=projection: p(t_emb))
            shift, scale = project.chunk(2, dim=-1)
            x = block(x * (1 + scale) + shift)
        if self.fail is not None and self.adaln_cache.max_bytes == 0:
            raise self.fail
        return x


@pytest.fixture
def make_dit(real_memo_class):
    @torch.inference_mode(False)  # the memo remembers nothing of weights that have no version
    def make(max_bytes=2**20):
        return DiT(real_memo_class(max_bytes=max_bytes))

    return make


@pytest.fixture
def digests(real_memo_class, monkeypatch):
    """The budget of the memo at each digest that is made on the host."""
    names = real_memo_class.prepare.__globals__
    digest, made = names["tensor_digest"], []

    def counted(embedding):
        made.append(tuple(embedding.shape))
        return digest(embedding)

    monkeypatch.setitem(names, "tensor_digest", counted)
    return made


STEPS = [torch.tensor([[float(step), 1.0, 2.0]]) for step in range(3)]
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


def counts(dit):
    return dit.adaln_cache.hits, dit.adaln_cache.misses


@torch.inference_mode()
def test_a_warm_memo_is_not_touched_by_a_capture(make_dit, digests):
    dit, eager = make_dit(), make_dit()
    for module in (dit, eager):
        for times in STEPS:
            module(x=X, times=times)
        assert counts(module) == (0, 6)
    digests.clear()
    entries = dict(dit.adaln_cache._entries)
    graphed = GraphedForward(dit, device="cpu", reference=True)
    first = graphed(x=X, times=STEPS[0])
    assert (graphed.captures, graphed.disabled_reason) == (1, None)
    assert digests == [(1, 8)]  # by the call's own eager forward, and not by the three forwards of the capture
    assert torch.equal(first, eager(x=X, times=STEPS[0]))
    assert counts(dit) == counts(eager) == (2, 6)
    assert dit.adaln_cache.max_bytes == 2**20
    assert dit.adaln_cache._entries.keys() == entries.keys()
    assert all(dit.adaln_cache._entries[key] is entry for key, entry in entries.items())

    digests.clear()
    replayed = [graphed(x=X, times=times) for times in STEPS]
    assert digests == []
    assert counts(dit) == (2, 6)
    assert graphed.stats()["replays"] == 3
    for times, result in zip(STEPS, replayed, strict=True):
        assert torch.equal(result, eager(x=X, times=times))
    assert not torch.equal(replayed[0], replayed[1])  # the time matters, so that a frozen projection would show
    dit(x=X, times=STEPS[1])  # and the memo still answers
    assert counts(dit) == (4, 6)


@torch.inference_mode()
@pytest.mark.parametrize("max_bytes", [2**20, 0], ids=["on", "off"])
def test_the_graph_equals_eager_with_the_memo_on_and_off(make_dit, max_bytes):
    dit, plain = make_dit(max_bytes), make_dit(0)
    graphed = GraphedForward(dit, device="cpu", reference=True)
    for times in [*STEPS, *STEPS]:
        expected = plain(x=X, times=times)
        assert torch.equal(graphed(x=X, times=times), expected)
        assert torch.equal(dit(x=X, times=times), expected)
    assert (graphed.captures, graphed.stats()["replays"], graphed.stats()["eager_calls"]) == (1, 5, 0)
    assert dit.adaln_cache.max_bytes == max_bytes
    assert (dit.adaln_cache.hits > 0) is (max_bytes > 0)


@torch.inference_mode()
def test_a_capture_that_fails_restores_the_memo(make_dit):
    dit = make_dit()
    dit.fail = ValueError("in the capture alone")
    graphed = GraphedForward(dit, device="cpu", reference=True)
    result = graphed(x=X, times=STEPS[0])
    assert "ValueError: in the capture alone (raised at " in graphed.disabled_reason
    assert dit.adaln_cache.max_bytes == 2**20
    assert counts(dit) == (0, 2)
    assert torch.equal(graphed(x=X, times=STEPS[0]), result)
    assert counts(dit) == (2, 2)


@torch.inference_mode()
def test_two_wrappers_of_one_module(make_dit):
    dit = make_dit()
    outer = nn.Module()
    outer.dit = dit
    outer.forward = lambda **kwargs: dit(**kwargs) + 1
    first = GraphedForward(dit, device="cpu", reference=True)
    second = GraphedForward(outer, device="cpu", reference=True)
    for times in STEPS:
        expected = make_dit(0)(x=X, times=times)
        assert torch.equal(first(x=X, times=times), expected)
        assert torch.equal(second(x=X, times=times), expected + 1)
    assert [(graphed.captures, graphed.stats()["replays"]) for graphed in (first, second)] == [(1, 2)] * 2
    assert dit.adaln_cache.max_bytes == 2**20


@torch.inference_mode()
def test_a_context_of_ones_own_that_sets_the_budget_alone(make_dit):
    dit, entered = make_dit(), []

    @contextmanager
    def own():
        before, dit.adaln_cache.max_bytes = dit.adaln_cache.max_bytes, 0
        entered.append(before)
        try:
            yield
        finally:
            dit.adaln_cache.max_bytes = before

    graphed = GraphedForward(dit, device="cpu", reference=True, capture_context=own)
    for times in STEPS:
        graphed(x=X, times=times)
    assert (graphed.captures, graphed.stats()["replays"]) == (1, 2)
    assert entered == [2**20]
    assert dit.adaln_cache.max_bytes == 2**20


@torch.inference_mode()
def test_an_embedding_that_is_prepared_stays_so(make_dit):
    dit = make_dit()
    t_emb = dit.time(STEPS[0])
    projection = dit.projections[0]
    dit.adaln_cache.prepare(t_emb)
    value = dit.adaln_cache.project("blocks.0", projection, t_emb, lambda: projection(t_emb))
    with capture_context(dit), capture_context(dit):
        fresh = dit.adaln_cache.project("blocks.0", projection, t_emb, lambda: projection(t_emb))
        assert counts(dit) == (0, 1)
    again = dit.adaln_cache.project("blocks.0", projection, t_emb, lambda: pytest.fail("not remembered"))
    assert counts(dit) == (1, 1)
    assert torch.equal(value, fresh)
    assert torch.equal(value, again)


@torch.inference_mode()
def test_captures_ahead_count_as_one_eager_forward(make_dit):
    dit = make_dit()
    graphed = GraphedForward(dit, device="cpu", reference=True)
    assert graphed.prepare(x=X, times=STEPS[0])
    assert counts(dit) == (0, 2)
    assert torch.equal(graphed(x=X, times=STEPS[1]), make_dit(0)(x=X, times=STEPS[1]))
    assert counts(dit) == (0, 2)
