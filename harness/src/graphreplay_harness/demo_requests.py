"""One request of the demo: a prompt's embedding conditions a few Euler steps; run eagerly and graphed, and compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphreplay import GraphedForward
from graphreplay_harness.demo_models import CHANNELS, Models

FIRST_LENGTH, NEXT_LENGTHS = 207, (198, 198, 199)
"""Latents of the first request, and of the ones after it, in turn."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Request:
    """The inputs of one generation, all on the device."""

    number: int
    """From 1."""
    prompt: str
    input_ids: Tensor
    """[1, tokens], int64."""
    cut: bool
    """Whether the prompt was longer than the encoder takes."""
    noise: Tensor
    """[1, CHANNELS, length], float32."""
    rope: tuple[Tensor, Tensor]

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def length(self) -> int:
        return self.noise.shape[2]


@dataclass(frozen=True)
class Outcome:
    """What one request showed. Graphed means first visit (captures included) and second visit (replays alone)."""

    request: Request
    captures: int
    """In both visits, of encoder and DiT."""
    replays: int
    replays_again: int
    """In the second visit."""
    eager_ms: float
    first_ms: float
    again_ms: float
    difference: float
    """The largest between a latent of either graphed visit and its eager one, absolute."""
    finite: bool
    """Whether all latents are."""
    added: float
    """The most by which the steps moved a latent: the scale for the difference."""


def make_request(models: Models, prompt: str, index: int, seed: int, device: torch.device) -> Request:
    """Tokenizes a prompt and draws its noise, which depends on the seed and the request's index alone."""
    ids, cut = models.tokenizer(prompt)
    length = FIRST_LENGTH if index == 0 else NEXT_LENGTHS[(index - 1) % len(NEXT_LENGTHS)]
    noise = torch.randn(1, CHANNELS, length, generator=torch.Generator().manual_seed(seed + index))
    return Request(
        index + 1, prompt, torch.tensor([ids], device=device), cut, noise.to(device), models.rope(length, device)
    )


def generate(encoder: Callable[..., Any], dit: Callable[..., Any], request: Request, steps: int) -> Tensor:
    """Encodes the prompt and integrates the DiT's velocity from noise to sound with Euler's method.

    The host never waits for the device in here, and timesteps are tensors: as a Python float, each would be another
    key, and no graph would ever be replayed.

    Returns:
        Latents, [1, CHANNELS, length]. They stay in float32 between steps, as samplers of diffusers keep them, while
        the models compute in their own dtype.
    """
    text, summary = encoder(input_ids=request.input_ids)
    times = torch.linspace(1, 0, steps + 1, device=request.noise.device)
    deltas = times.diff()
    latents = request.noise
    for step in range(steps):
        velocity = dit(
            latents=latents.to(text.dtype),
            timestep=times[step : step + 1],
            text=text,
            summary=summary,
            rope=request.rope,
        )
        latents = latents + deltas[step] * velocity.float()
    return latents


def compare(
    encoder: GraphedForward, dit: GraphedForward, request: Request, steps: int, doing: Callable[[str], None]
) -> Outcome:
    """Runs a request eagerly, then graphed twice, on the same noise."""
    device = request.noise.device

    def eager() -> Tensor:
        return generate(encoder.module, dit.module, request, steps)

    def graphed() -> Tensor:
        return generate(encoder, dit, request, steps)

    doing(f"request {request.number}: eager, to warm up")
    eager()  # untimed: a shape's first run also picks its kernels
    doing(f"request {request.number}: eager")
    expected, eager_ms = timed(device, eager)
    captures, replays = _counts(encoder, dit)
    doing(f"request {request.number}: graphed, captures included")
    first, first_ms = timed(device, graphed)
    _, replays_first = _counts(encoder, dit)
    doing(f"request {request.number}: graphed, replays alone")
    again, again_ms = timed(device, graphed)
    captures_now, replays_now = _counts(encoder, dit)
    return Outcome(
        request=request,
        captures=captures_now - captures,
        replays=replays_now - replays,
        replays_again=replays_now - replays_first,
        eager_ms=eager_ms,
        first_ms=first_ms,
        again_ms=again_ms,
        difference=max((latents - expected).abs().max().item() for latents in (first, again)),
        finite=all(bool(latents.isfinite().all()) for latents in (expected, first, again)),
        added=(expected - request.noise).abs().max().item(),
    )


def forward_medians(
    encoder: GraphedForward, dit: GraphedForward, request: Request, repeats: int
) -> tuple[float, float]:
    """Medians, in ms, of one DiT forward eager and graphed: from a quiet device until its result is there."""
    device = request.noise.device
    text, summary = encoder(input_ids=request.input_ids)
    kwargs = {
        "latents": request.noise.to(text.dtype),
        "timestep": torch.ones(1, device=device),
        "text": text,
        "summary": summary,
        "rope": request.rope,
    }
    eager: list[float] = []
    graphed: list[float] = []
    for repeat in range(3 + repeats):
        # In turn, so that both meet the same clocks; the first three warm up.
        for forward, times in ((partial(dit.module, **kwargs), eager), (partial(dit, **kwargs), graphed)):
            _, ms = timed(device, forward)
            if repeat >= 3:
                times.append(ms)
    return statistics.median(eager), statistics.median(graphed)


def timed(device: torch.device, work: Callable[[], _Result]) -> tuple[_Result, float]:
    """The result of some work and its milliseconds, from a quiet device to a quiet device."""
    _synchronize(device)
    start = time.perf_counter()
    result = work()
    _synchronize(device)
    return result, (time.perf_counter() - start) * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _counts(*wrappers: GraphedForward) -> tuple[int, int]:
    """Captures and replays so far."""
    stats = [wrapper.stats() for wrapper in wrappers]
    return sum(each["captures"] for each in stats), sum(each["replays"] for each in stats)
