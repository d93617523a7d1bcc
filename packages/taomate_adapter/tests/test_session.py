"""A teacher session end to end, with TaoMate's own memo class."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from graphreplay_harness import teacher, teacher_session
from graphreplay_harness.teacher_model import PLAN, SMALL, make_teacher
from graphreplay_harness.teacher_session import CAPTURES, LAYOUTS, SHAPES, STEPS, Session

CPU = torch.device("cpu")


@pytest.fixture
def session(real_memo_class):
    teacher = make_teacher(CPU, torch.float32, SMALL, real_memo_class())
    return Session(teacher, CPU, torch.float32)


@torch.inference_mode()
def test_four_requests_with_lora_off_and_on(session, real_memo_class, monkeypatch):
    names = real_memo_class.prepare.__globals__
    digest, budgets = names["tensor_digest"], []

    def counted(embedding):
        budgets.append(session.teacher.adaln_cache.max_bytes)
        return digest(embedding)

    monkeypatch.setitem(names, "tensor_digest", counted)
    memo, projections = session.teacher.adaln_cache, SMALL.layers + 1

    session.warm_up()
    assert [(layout.audio, layout.reference) for layout in SHAPES] == [(207, 0), (198, 24), (199, 24)]
    assert (CAPTURES, session.graphed.captures) == (6, 6)
    assert budgets == [2**28] * CAPTURES  # each shape's own eager forward, and none of its captures
    assert (memo.hits, memo.misses) == ((CAPTURES - 1) * projections, projections)  # all at the first step

    outcomes = list(session.run(repeats=1))
    assert [(o.lora, o.request, o.latents, o.reference) for o in outcomes] == [
        (lora, number, layout.audio, layout.reference)
        for lora in ("off", "on")
        for number, layout in enumerate(LAYOUTS, start=1)
    ]
    assert [outcome.difference for outcome in outcomes] == [0] * 8
    assert [outcome.replays for outcome in outcomes] == [STEPS] * 8
    assert [outcome.memo_lookups for outcome in outcomes] == [0] * 8
    assert all(outcome.finite and outcome.moved > 0.1 for outcome in outcomes)
    moved = [outcome.moved for outcome in outcomes]
    assert len(set(moved)) == 8  # LoRA matters, and so does the request
    stats = session.graphed.stats()
    documented = ("graphs", "pinned", "captures", "replays", "evictions", "eager_calls")
    assert [stats[key] for key in documented] == [6, 6, 6, 8 * STEPS, 0, 0]
    assert memo.max_bytes == 2**28
    assert memo.misses == STEPS * projections  # one schedule for all requests


@torch.inference_mode()
@pytest.mark.parametrize("kwarg", ["x", "audio_x", "text_embeddings", "unique_timesteps", "inverse_indices", "rope"])
def test_every_tensor_matters_to_eager_and_replayed_alike(session, kwarg):
    request = session.requests[1]
    kwargs = session._step(request, request.noise, request.noise[: request.layout.reference], 3)
    with session._planned(request.layout):
        before = session._replayed(**kwargs)
        kwargs[kwarg] = kwargs[kwarg].flip(-1) * (1 if kwarg == "inverse_indices" else 0.5)
        replayed, eager = session._replayed(**kwargs), session.teacher(**kwargs)
    assert (session.graphed.captures, session.graphed.stats()["replays"]) == (1, 1)
    assert torch.equal(replayed, eager)
    assert not torch.equal(replayed, before)


@torch.inference_mode()
def test_a_plan_lives_as_long_as_its_graph_and_no_longer(session):
    request = session.requests[0]
    kwargs = session._step(request, request.noise, torch.empty(0), 0)
    original = session._plans[request.layout]

    def call(plan):
        token = PLAN.set(plan)
        try:
            return session._replayed(**kwargs), session.teacher(**kwargs)
        finally:
            PLAN.reset(token)

    captured_with = replace(original, modalities=original.modalities.clone())
    alive = weakref.ref(captured_with)
    call(captured_with)
    del captured_with
    gc.collect()
    assert alive() is not None
    assert torch.equal(*call(original))  # by a replay, which reads the plan that it was captured with
    assert session.graphed.stats()["replays"] == 1
    other = replace(original, modalities=original.modalities.flip(0), fingerprint="another")
    assert torch.equal(*call(other))
    assert session.graphed.captures == 2
    session.graphed.reset()
    gc.collect()
    assert alive() is None


def test_the_script_with_taomates_memo(capsys, memo_file):
    assert teacher.main(["--repeats", "1", "--cache", str(memo_file)]) == 0
    out = capsys.readouterr().out
    assert f"AdaLN memo: TaoMate's, from {memo_file}\n" in out
    assert out.endswith(f"memo: {(6 + 144 - 9) * 4} hits, {9 * 4} misses, all by eager forwards\n")


@pytest.mark.cuda
def test_the_script_on_a_gpu_with_taomates_memo(capsys, memo_file):
    assert teacher.main(["--device", "cuda", "--repeats", "1", "--cache", str(memo_file)]) == 0
    assert "\n6 captures, 6 pinned, 72 replays, 0 evictions, 0 eager_calls\n" in capsys.readouterr().out


def test_latents_are_those_of_taomate():
    assert teacher_session.LATENTS == (207, 198, 198, 199)
    assert [layout.reference > 0 for layout in LAYOUTS] == [False, True, True, True]
