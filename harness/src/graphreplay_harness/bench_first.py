"""The suite ``first-call``: what the first call of a shape costs, and which steps of the capture take how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

import graphreplay.capture
import graphreplay.observe
import graphreplay.road
from graphreplay import GraphedForward, get_graphed_forward_cls
from graphreplay_harness.bench_call import SHAPE, Module
from graphreplay_harness.bench_clock import interleave, settle, whole_us
from graphreplay_harness.bench_suite import Block, Setting, SuiteResult, Target

TARGET = 3.5

REPEATS_EACH = 10
"""Calls of the suite ``call`` that one sample here stands for, since it takes that much longer."""

EAGER, FIRST, REPLAY = "eager call", "first call of a shape", "second call"

CLONE, PROBED, WARM_UP, CAPTURE, ENTRY = (
    "clone the kwargs",
    "warm-up 1, observed",
    "other warm-ups",
    "capture",
    "prepare to stage and hand out",
)
CHECKS, OWN = "rest of the capture", "key, eager forward, bookkeeping"
STEPS = (OWN, CLONE, PROBED, WARM_UP, CAPTURE, ENTRY, CHECKS)
_BUILD = "build_entry"


@dataclass(frozen=True)
class Workload:
    """A module, and kwargs of any length for it."""

    title: str
    module: torch.nn.Module
    make: Callable[[int], dict[str, Any]]
    lengths: tuple[int, int]
    """Of the shape before, and from which on the new shapes count up."""


def run(setting: Setting) -> SuiteResult:
    """Measures a small module and, where its libraries are installed, the audio teacher."""
    workloads = [_small(setting)]
    try:
        workloads.append(_teacher(setting))
        missing = []
    except ImportError as error:
        setting.say(f"first-call: the teacher is left out: {error}")
        missing = [Target("first-call, teacher: first call / eager call", TARGET, None, f"left out: {error}")]
    blocks, targets = [], missing
    for workload in workloads:
        block = _calls(workload, setting)
        blocks += [block, _steps(workload, setting)]
        ratio = block.ratio("whole", FIRST, EAGER)
        targets.append(Target(f"first-call, {workload.title}: first call / eager call", TARGET, ratio))
    return SuiteResult("first-call", blocks, targets)


def _small(setting: Setting) -> Workload:
    module = Module(1).to(setting.device).eval().requires_grad_(False)
    return Workload(
        "module of 25 parameters",
        module,
        lambda rows: {"x": torch.randn(rows, SHAPE[1], device=setting.device)},
        (SHAPE[0], SHAPE[0] + 1),
    )


def _teacher(setting: Setting) -> Workload:
    from graphreplay_harness.bench_dit import dit_kwargs, dtype_on  # they need the extra "demo"
    from graphreplay_harness.demo_models import CHANNELS, load_models
    from graphreplay_harness.demo_options import PROMPTS
    from graphreplay_harness.demo_requests import FIRST_LENGTH, make_request

    device = setting.device
    setting.say("first-call: loading the teacher")
    models = load_models(device, dtype_on(device), seed=0)
    kwargs = dit_kwargs(models, make_request(models, PROMPTS[0], 0, 0, device))

    def make(length: int) -> dict[str, Any]:
        latents = torch.randn(1, CHANNELS, length, device=device, dtype=dtype_on(device))
        return {**kwargs, "latents": latents, "rope": models.rope(length, device)}

    return Workload(f"teacher of {models.layers} layers", models.dit, make, (FIRST_LENGTH, FIRST_LENGTH - 100))


@contextmanager
def _after_one_shape(workload: Workload, setting: Setting) -> Iterator[GraphedForward]:
    """A new wrapper with memory of its own, which has captured one shape."""
    with get_graphed_forward_cls(setting.device)(workload.module, device=setting.device) as graphed:
        graphed(**workload.make(workload.lengths[0]))
        yield graphed


def _calls(workload: Workload, setting: Setting) -> Block:
    """Calls of a shape that is new to the wrapper, though not to the libraries below: those choose their kernels at
    the first eager call."""

    def sample(name: str, repeat: int) -> float:
        kwargs = workload.make(workload.lengths[1] + repeat)
        workload.module(**kwargs)
        if name == EAGER:
            return whole_us(lambda: workload.module(**kwargs))
        with _after_one_shape(workload, setting) as graphed:
            if name == REPLAY:
                graphed(**kwargs)
            return whole_us(lambda: graphed(**kwargs))

    names = (EAGER, FIRST, REPLAY)
    setting.say(f"first-call: {workload.title}: calls")
    interleave(names, 1, sample)  # does not count
    samples = {"whole": interleave(names, max(1, setting.repeats // REPEATS_EACH), sample)}
    return Block(workload.title, samples, EAGER)


def _steps(workload: Workload, setting: Setting) -> Block:
    """The same first calls, in samples of their own, since each step waits for the device."""
    setting.say(f"first-call: {workload.title}: steps of a capture")
    samples: dict[str, list[float]] = {step: [] for step in STEPS}
    for repeat in range(max(1, setting.repeats // REPEATS_EACH)):
        kwargs = workload.make(workload.lengths[1] + repeat)
        workload.module(**kwargs)
        with _after_one_shape(workload, setting) as graphed, steps_timed(graphed) as times:
            call_us = whole_us(lambda graphed=graphed, kwargs=kwargs: graphed(**kwargs))  # type: ignore[misc]
        for step, us in divided(call_us, times).items():
            samples[step].append(us)
    return Block(f"{workload.title}, steps of its first call", {"step": samples}, None)


def divided(call_us: float, times: dict[str, float]) -> dict[str, float]:
    """The microseconds of each step of a call, from those of the functions that it went through."""
    inner = {step: times[step] for step in (CLONE, PROBED, CAPTURE, ENTRY)}
    inner[WARM_UP] = times[WARM_UP] - times[PROBED]  # the first one is among them
    return {**inner, CHECKS: times[_BUILD] - sum(inner.values()), OWN: call_us - times[_BUILD]}


@contextmanager
def steps_timed(graphed: GraphedForward) -> Iterator[dict[str, float]]:
    """Adds up the microseconds of each function that a capture of this wrapper goes through, from outside."""
    times = dict.fromkeys((*STEPS, _BUILD), 0.0)

    @contextmanager
    def timing(step: str) -> Iterator[None]:
        settle()
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            settle()
            times[step] += (time.perf_counter_ns() - start) / 1e3

    def call(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with timing(step):
                return function(*args, **kwargs)

        return timed

    def block(step: str, make: Callable[..., AbstractContextManager[None]]) -> Callable[..., Any]:
        @contextmanager
        def timed(*args: Any) -> Iterator[None]:
            with timing(step), make(*args):
                yield

        return timed

    with ExitStack() as patches:
        for owner, name, wrap, step in (
            (graphreplay.road, "build_entry", call, _BUILD),
            (graphreplay.capture, "clone_static", call, CLONE),
            (graphreplay.capture, "Entry", call, ENTRY),
            (graphed, "_warmup_stream", block, WARM_UP),
            (graphreplay.observe.Observer, "watching", block, PROBED),
            (graphed, "_capture_graph", call, CAPTURE),
        ):
            patches.enter_context(patch.object(owner, name, wrap(step, getattr(owner, name))))
        yield times
