"""An audio teacher's nine Euler steps as one CUDA graph, whose loop ends where a tensor on the device says.

Three ways from the same noise to sound; each step is a forward of the demo's diffusion transformer:

    eager   a Python loop launches the steps kernel by kernel
    replay  one step is a graph, and a Python loop replays it
    loop    the whole request is a graph with a while node: one launch, however many steps the request asks for

The number of steps is a tensor and changes from request to request; nothing is captured again. The results of loop and
replay have to be equal bit for bit, those of loop and eager but for the rounding that the demo allows. Without a GPU
there are no graphs, while_loop is a Python loop, and its results have to be those of eager; nothing is timed.

Exit codes: 0, the results agree; 1, some do not; 2, bad options. `make setup` installs what this needs into .venv.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphreplay_cuda import CUDAGraph, graph, while_loop
from graphreplay_harness.demo_checks import allowed_difference
from graphreplay_harness.demo_models import CHANNELS, load_models
from graphreplay_harness.demo_options import DTYPES, PROMPTS
from graphreplay_harness.demo_requests import FIRST_LENGTH

STEP_COUNTS = (9, 4, 9, 1, 0, 20)
"""Of the requests. Graphs are captured before the first of them, and never again."""

_ON_CPU = "steps  loop-eager"
_ON_GPU = """\
         largest difference              ms, median        loop is faster than     µs until return
steps  loop-eager loop-replay    eager  replay    loop       eager  replay      replay    loop"""


@dataclass(frozen=True)
class Request:
    """The inputs of one generation."""

    steps: int
    """For Python loops."""
    count: Tensor
    """The same for the loop on the device: [1], int64."""
    noise: Tensor
    """[1, CHANNELS, FIRST_LENGTH], float32."""


Way = Callable[[Request], Tensor]
"""From a request to its latents, which the next call may overwrite."""


class Teacher:
    """The transformer with one prompt. Graphs read its tensors by address, so it has to outlive them."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        models = load_models(device, dtype, seed)
        ids, _ = models.tokenizer(PROMPTS[0])
        text, summary = models.encoder(input_ids=torch.tensor([ids], device=device))
        self._dit = models.dit
        self._conditions = {"text": text, "summary": summary, "rope": models.rope(FIRST_LENGTH, device)}
        self._dtype = dtype

    def step(self, latents: Tensor, done: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """One Euler step of count, behind those that are done. Returns the new latents and how many are done then.

        Every step is the same work for the device, which computes even the timestep, from 1 (noise) to 0 (sound).
        """
        velocity = self._dit(latents=latents.to(self._dtype), timestep=1 - done / count, **self._conditions)
        return latents - velocity.float() / count, done + 1

    def eager(self, request: Request) -> Tensor:
        latents, done = request.noise, torch.zeros_like(request.count)
        for _ in range(request.steps):
            latents, done = self.step(latents, done, request.count)
        return latents

    def loop(self, noise: Tensor, count: Tensor) -> Tensor:
        """All steps: a while node where it is captured, a Python loop elsewhere."""
        latents, _ = while_loop(
            lambda latents, done: done < count,
            lambda latents, done: self.step(latents, done, count),
            (noise, torch.zeros_like(count)),
        )
        return latents


def captured_step(teacher: Teacher, first: Request) -> Way:
    """One step as a graph, which goes on where its last replay ended."""
    latents, done, count = first.noise.clone(), torch.zeros_like(first.count), first.count.clone()
    one_step = CUDAGraph()
    with graph(one_step):
        new_latents, new_done = teacher.step(latents, done, count)
        latents.copy_(new_latents)
        done.copy_(new_done)

    def replay(request: Request) -> Tensor:
        latents.copy_(request.noise)
        done.zero_()
        count.copy_(request.count)
        for _ in range(request.steps):
            one_step.replay()
        return latents

    return replay


def captured_loop(teacher: Teacher, first: Request) -> Way:
    """All steps as a graph, which also copies what a request brings."""
    noise, count = first.noise.clone(), first.count.clone()
    all_steps = CUDAGraph()
    with graph(all_steps):
        latents = teacher.loop(noise, count)

    def launch(request: Request) -> Tensor:
        all_steps.stage_and_launch([noise, count], [request.noise, request.count])
        return latents

    return launch


def ways_of(teacher: Teacher, first: Request) -> dict[str, Way]:
    """The ways that there are on the device, captured where they are graphs."""
    if first.noise.device.type == "cpu":
        return {"eager": teacher.eager, "loop": lambda request: teacher.loop(request.noise, request.count)}
    # Libraries set themselves up when first called, which no capture can hold. torch wants that on a side stream.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        teacher.loop(first.noise, first.count)
    torch.cuda.current_stream().wait_stream(side)
    return {"eager": teacher.eager, "replay": captured_step(teacher, first), "loop": captured_loop(teacher, first)}


def clocked(way: Way, request: Request) -> tuple[float, float]:
    """Times a call on a quiet device: ms until the latents are there, and µs until it returns."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    way(request)
    returned = time.perf_counter()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, (returned - start) * 1e6


@torch.inference_mode()
def run(device: torch.device, dtype: torch.dtype, repeats: int, seed: int) -> list[str]:
    """Prints a row for each request. Returns what went wrong."""
    print("loading, warming up and capturing ...", file=sys.stderr)
    noises = torch.randn(len(STEP_COUNTS), 1, CHANNELS, FIRST_LENGTH, generator=torch.Generator().manual_seed(seed))
    counts = torch.tensor(STEP_COUNTS).unsqueeze(1)
    requests = list(map(Request, STEP_COUNTS, counts.to(device), noises.to(device)))
    teacher = Teacher(device, dtype, seed)
    ways = ways_of(teacher, requests[0])
    failures = []
    print(_ON_CPU if device.type == "cpu" else _ON_GPU, flush=True)
    for request in requests:
        latents = {name: way(request) for name, way in ways.items()}
        result = latents.pop("loop")
        row = f"{request.steps:>5}"
        for name, expected in latents.items():
            off, added = (result - expected).abs().max(), (expected - request.noise).abs().max()
            allowed = added * (allowed_difference(device, dtype) if name == "eager" else 0)
            row += f"{off:>12.3g}"
            if not off <= allowed:  # so that nan fails as well
                failures.append(f"{request.steps} steps: loop is off {name} by {off:.3g}; {allowed:.3g} is allowed")
        if device.type != "cpu" and repeats > 0:
            turns = torch.tensor([[clocked(way, request) for way in ways.values()] for _ in range(repeats)])
            (eager, _), (replay, replay_host), (loop, loop_host) = turns.quantile(0.5, dim=0).tolist()
            row += f"{eager:>9.2f}{replay:>8.2f}{loop:>8.2f}{eager / loop:>12.2f}{replay / loop:>8.2f}"
            row += f"{replay_host:>12.0f}{loop_host:>8.0f}"
        print(row, flush=True)
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    found = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda") if found else ("cpu",), default="cuda" if found else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="of the models (default: float32 on cpu, else bfloat16)")
    parser.add_argument("--repeats", type=int, default=20, help="of each timing (default: 20; 0: none)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and noise (default: 0)")
    options = parser.parse_args(argv)
    if options.device == "cpu":
        why = "On the CPU, as asked" if found else "No GPU was found"
        print(f"{why}: eager is compared with while_loop as a Python loop. Nothing is captured or timed.")
    dtype = DTYPES[options.dtype or ("float32" if options.device == "cpu" else "bfloat16")]
    failures = run(torch.device(options.device), dtype, options.repeats, options.seed)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
