"""A streaming session of an audio teacher: requests of nine forwards each, eager and graphed, side by side."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from graphreplay_harness.teacher_model import PLAN, EmbeddingPlan, Layout, Teacher
from graphreplay_taomate import GraphedForward

STEPS = 9
TEXT, VIDEO, REFERENCE = 32, 64, 24
"""Rows of each in a request; the reference is the end of the request before."""

LATENTS = (207, 198, 198, 199)
"""Of the requests of a session. All but the first have a reference tail."""

LAYOUTS = tuple(Layout(TEXT, VIDEO, count, REFERENCE if index else 0) for index, count in enumerate(LATENTS))
SHAPES = tuple(dict.fromkeys(LAYOUTS))
LORA = (False, True)
CAPTURES = len(SHAPES) * len(LORA)
"""Graphs of a session: one for each shape with LoRA on and one with it off."""

Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Request:
    """The inputs of one request, all on the device."""

    layout: Layout
    noise: Tensor
    """[audio rows, audio width], float32."""
    levels: Tensor
    """[STEPS, 3], the unique timesteps of each step."""
    deltas: Tensor
    """[STEPS]."""
    conditions: dict[str, Any]
    """The kwargs that stay the same for all steps."""


@dataclass(frozen=True)
class Outcome:
    """What one request showed."""

    lora: str
    request: int
    """From 1."""
    latents: int
    reference: int
    eager_ms: float
    graphed_ms: float
    difference: float
    """The largest between a latent of a graphed run and its eager one, absolute."""
    moved: float
    """The most by which the steps moved a latent: the scale for the difference."""
    finite: bool
    replays: int
    """Of each graphed run."""
    memo_lookups: int
    """In the memo of the projections, during graphed runs."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Session:
    """One teacher, and its graphed forward, called as TaoMate calls them.

    Args:
        teacher: whose forward is graphed.
        device: where it is.
        dtype: of its weights.
        seed: of all requests.
    """

    def __init__(self, teacher: Teacher, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.teacher, self.device, self.dtype = teacher, device, dtype
        self.graphed = GraphedForward(teacher, device=device, max_entries=16, name="teacher", reference=True)
        self.requests = [self._request(layout, seed + index) for index, layout in enumerate(LAYOUTS)]
        self._plans = {layout: self._plan(layout) for layout in SHAPES}

    def warm_up(self) -> None:
        """Captures every shape, with LoRA on and off, and pins its graph."""
        for self.teacher.lora_on in LORA:
            for request in {request.layout: request for request in self.requests}.values():
                tail = request.noise[: request.layout.reference]
                with self._planned(request.layout):
                    self._replayed(pin=True, **self._step(request, request.noise, tail, 0))

    def run(self, repeats: int) -> Iterator[Outcome]:
        """All requests, with LoRA off and then on, each eagerly and graphed in turn, ``repeats`` times."""
        for self.teacher.lora_on in LORA:
            tail = torch.empty(0, device=self.device)
            for index, request in enumerate(self.requests):
                with self._planned(request.layout):
                    outcome, latents = self._compare(index, request, tail, repeats)
                tail = latents[-REFERENCE:]
                yield outcome

    def _compare(self, index: int, request: Request, tail: Tensor, repeats: int) -> tuple[Outcome, Tensor]:
        # What comes first in a run meets colder caches: it does not count.
        expected = self._generate(self.teacher, request, tail)
        eager, graphed, results = [], [], []
        memo = self.teacher.adaln_cache
        replays, lookups = self.graphed.stats()["replays"], 0
        for _ in range(repeats):
            result, ms = self._timed(self.teacher, request, tail)
            eager.append(ms)
            before = memo.hits + memo.misses
            result, ms = self._timed(self._replayed, request, tail)
            lookups += memo.hits + memo.misses - before
            graphed.append(ms)
            results.append(result)
        outcome = Outcome(
            lora="on" if self.teacher.lora_on else "off",
            request=index + 1,
            latents=request.layout.audio,
            reference=request.layout.reference,
            eager_ms=statistics.median(eager),
            graphed_ms=statistics.median(graphed),
            difference=max((result - expected).abs().max().item() for result in results),
            moved=(expected - request.noise).abs().max().item(),
            finite=all(bool(result.isfinite().all()) for result in (expected, *results)),
            replays=(self.graphed.stats()["replays"] - replays) // repeats,
            memo_lookups=lookups,
        )
        return outcome, expected

    def _timed(self, forward: Forward, request: Request, tail: Tensor) -> tuple[Tensor, float]:
        self._synchronize()
        start = time.perf_counter()
        result = self._generate(forward, request, tail)
        self._synchronize()
        return result, (time.perf_counter() - start) * 1e3

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _generate(self, forward: Forward, request: Request, tail: Tensor) -> Tensor:
        """The latents after nine Euler steps."""
        latents = request.noise
        for step in range(STEPS):
            velocity = forward(**self._step(request, latents, tail, step))
            latents = latents + request.deltas[step] * velocity.float()
        return latents

    def _replayed(self, *, pin: bool = False, **kwargs: Any) -> Tensor:
        plan = PLAN.get()
        variant = ("teacher", "lora_on" if self.teacher.lora_on else "lora_off", plan.fingerprint)
        result: Tensor = self.graphed(variant=variant, keep_alive=(plan,), pin=pin, **kwargs)
        return result

    def _step(self, request: Request, latents: Tensor, tail: Tensor, step: int) -> dict[str, Any]:
        audio = torch.cat((latents, tail)).to(self.dtype) if request.layout.reference else latents.to(self.dtype)
        return {"audio_x": audio, "unique_timesteps": request.levels[step], **request.conditions}

    @contextmanager
    def _planned(self, layout: Layout) -> Iterator[None]:
        token = PLAN.set(self._plans[layout])
        try:
            yield
        finally:
            PLAN.reset(token)

    def _plan(self, layout: Layout) -> EmbeddingPlan:
        counts = (layout.text, layout.video, layout.audio, layout.reference)
        modalities = [kind for kind, count in enumerate(counts) for _ in range(count)] + [0] * _padding(layout)
        fingerprint = hashlib.sha256(bytes(modalities)).hexdigest()
        return EmbeddingPlan(torch.tensor(modalities, device=self.device), fingerprint)

    def _request(self, layout: Layout, seed: int) -> Request:
        generator, size = torch.Generator().manual_seed(seed), self.teacher.size
        seq_len = layout.rows + _padding(layout)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device)

        times = torch.linspace(0, 1, STEPS + 1, device=self.device)
        levels = torch.stack((times[:-1], torch.full_like(times[:-1], 0.5), torch.ones_like(times[:-1])), dim=1)
        level_of_row = [2] * layout.text + [1] * layout.video + [0] * layout.audio
        level_of_row += [2] * (seq_len - len(level_of_row))
        positions = torch.arange(seq_len, device=self.device)
        half = size.width // size.heads // 2
        angles = positions[:, None] * torch.logspace(0, -3, half, device=self.device)
        conditions = {
            "x": draw(1, layout.video, size.video_width).to(self.dtype),
            "text_embeddings": draw(1, layout.text, size.text_width).to(self.dtype),
            "inverse_indices": torch.tensor(level_of_row, device=self.device),
            "positions": positions,
            "cu_seqlens": torch.tensor([0, layout.rows, seq_len], dtype=torch.int32, device=self.device),
            "rope": torch.stack((angles.cos(), angles.sin()), dim=-1),
            "seq_len": seq_len,
            "max_seqlen": layout.rows,
            "attention_mask": None,
            "layout": layout,
        }
        return Request(layout, draw(layout.audio, size.audio_width), levels, times.diff(), conditions)


def _padding(layout: Layout) -> int:
    """Rows up to the next multiple of 16, and at least one, since an empty sequence attends to nothing."""
    return 16 - layout.rows % 16
