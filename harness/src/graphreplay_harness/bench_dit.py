"""The suite ``dit``: an audio teacher's nine steps per request, a text encoder of six layers per prompt, and for
contrast a forward that keeps the device busy for longer than the host needs to launch it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphreplay_harness import bench_peers as peers
from graphreplay_harness.bench_clock import host_us, interleave, whole_us
from graphreplay_harness.bench_handmade import Call, cloned
from graphreplay_harness.bench_suite import Block, Setting, SuiteResult, Target
from graphreplay_harness.demo_models import Models, load_models
from graphreplay_harness.demo_options import PROMPTS
from graphreplay_harness.demo_requests import Request, generate, make_request

STEPS = 9
TARGET = 1.01
NAMES = (peers.EAGER, peers.BARE, peers.LOOP, peers.OURS)

REPEATS_EACH = 5
"""Calls of the suite ``call`` that one sample here stands for, since it takes that much longer."""

ENCODER = "text encoder, one prompt"
LARGE = "compute-bound, eight products of {rows} rows"
LARGE_ROWS = 8192
"""Rows and columns of the matrices on a GPU."""


def run(setting: Setting, steps: int = STEPS) -> SuiteResult:
    """Measures both models at batch 1, on the first of the demo's prompts."""
    device = setting.device
    setting.say("dit: loading the models")
    models = load_models(device, dtype_on(device), seed=0)
    request = make_request(models, PROMPTS[0], 0, 0, device)
    encoded = Call.of({"input_ids": request.input_ids})
    blocks = [
        _measure(ENCODER, models.encoder, encoded, lambda encoder: encoder(**encoded.kwargs), setting),
        _measure(
            f"teacher of {models.layers} layers, {steps} steps",
            models.dit,
            Call.of(dit_kwargs(models, request)),
            _request(models, request, steps),
            setting,
        ),
        _large(setting),
    ]
    return SuiteResult("dit", blocks, targets(blocks))


def _large(setting: Setting) -> Block:
    device = setting.device
    size = LARGE_ROWS if device.type == "cuda" else 64
    options: dict[str, Any] = {"device": device, "dtype": dtype_on(device)}
    layers = [torch.nn.Linear(size, size, **options) for _ in range(8)]
    module = torch.nn.Sequential(*layers).eval().requires_grad_(False)
    example = Call.of({"input": torch.randn(size, size, **options)})
    return _measure(LARGE.format(rows=size), module, example, lambda forward: forward(**example.kwargs), setting)


def dtype_on(device: torch.device) -> torch.dtype:
    """Of the models."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def dit_kwargs(models: Models, request: Request) -> dict[str, Any]:
    """The kwargs of a request's first step."""
    text, summary = models.encoder(input_ids=request.input_ids)
    return {
        "latents": request.noise.to(text.dtype),
        "timestep": torch.ones(1, device=request.noise.device),
        "text": text,
        "summary": summary,
        "rope": request.rope,
    }


def _request(models: Models, request: Request, steps: int) -> Callable[[Callable[..., Any]], Any]:
    encoded = models.encoder(input_ids=request.input_ids)
    return lambda dit: generate(lambda input_ids: encoded, dit, request, steps)


def _measure(
    title: str,
    module: torch.nn.Module,
    example: Call,
    work: Callable[[Callable[..., Any]], Any],
    setting: Setting,
) -> Block:
    """Times some work that calls the module's forward as it is told."""

    def say(what: str) -> None:
        setting.say(f"dit: {title}: {what}")

    # Other values than those that graphs are captured on, so that a graph which ignores them is found out.
    other = cloned(example.kwargs)
    first = next(iter(other))
    other[first] = other[first].flip(-1)
    contenders, left_out = peers.make_all(NAMES, module, [example, Call.of(other)], setting.device, say)
    try:
        forwards = {name: _by_keywords(contender) for name, contender in contenders.items()}

        def whole(name: str, repeat: int) -> float:
            return whole_us(lambda: work(forwards[name]))

        def host(name: str, repeat: int) -> float:
            return host_us(work, [forwards[name]])

        names, repeats = list(contenders), max(1, setting.repeats // REPEATS_EACH)
        interleave(names, 1, whole)  # does not count
        say("from start to result")
        samples = {"whole": interleave(names, repeats, whole)}
        say("host time")
        samples["host"] = interleave(names, repeats, host)
        return Block(title, samples, peers.BARE, left_out)
    finally:
        for contender in contenders.values():
            contender.close()
        contenders.clear()
        gc.collect()


def _by_keywords(contender: peers.Contender) -> Callable[..., Any]:
    return lambda **kwargs: contender.call(Call.of(kwargs))


def targets(blocks: Sequence[Block]) -> list[Target]:
    """Of the teacher; the others have none."""
    return [
        Target(
            f"dit, {block.title}: ours / bare replay, start to result",
            TARGET,
            block.ratio("whole", peers.OURS, peers.BARE),
        )
        for block in blocks
        if block.title.startswith("teacher")
    ]
