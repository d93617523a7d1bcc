"""Text conditions a diffusion transformer, both replayed as graphs.

Each prompt is encoded at its own token count, and its embedding conditions a few Euler steps of a DiT. Every request
runs eagerly, and then graphed twice on the same noise: first with its captures, then by replays alone.

Exit codes: 0, every graphed result agrees with eager; 1, one does not, or a forward ran without a graph; 2, bad input.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from graphreplay import GraphPool
from graphreplay.forward import DISABLE_VARIABLE
from graphreplay_harness.demo_options import BadInput, Options, read_options

FORWARD_REPEATS = 30
"""How often a single DiT forward is timed on a GPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo with these arguments (None: the process's own); returns the exit code."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: every model is local
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # prompts may hold what the terminal cannot show
    try:
        options = read_options(argv, __doc__ or "")
        with _one_thread():
            failures = run(options)
    except BadInput as error:
        print(f"graphreplay demo: {error}", file=sys.stderr)
        return 2
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps PyTorch to one thread on the CPU: the small model gains little from more, and on a busy machine threads
    that wait for each other make it many times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run(options: Options) -> list[str]:
    """The demo itself. Returns what went wrong."""
    try:
        # Here and not above: bad input should not wait seconds for these imports.
        from graphreplay_harness.demo_checks import allowed_difference, faults, without_graph
        from graphreplay_harness.demo_models import load_models
        from graphreplay_harness.demo_report import Report
        from graphreplay_harness.demo_requests import compare, forward_medians, make_request
    except ImportError as error:
        raise BadInput(f"{error}; the demo needs: pip install 'graphreplay-harness[demo]'") from error
    device = options.device
    off = os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0")
    report = Report(sys.stdout)
    report.introduction(options, off)

    report.doing("loading the models")
    models = load_models(device, options.dtype, options.seed)
    requests = [make_request(models, prompt, i, options.seed, device) for i, prompt in enumerate(options.prompts)]
    report.loaded(models, requests)

    # The encoder gets one graph a token count, the DiT one a number of latents. The two never run at the same time, so
    # they share the memory of their graphs.
    pool = GraphPool()
    token_counts = {request.tokens for request in requests}
    encoder = options.cls(models.encoder, device=device, pool=pool, name="encoder", max_entries=len(token_counts))
    dit = options.cls(models.dit, device=device, pool=pool, name="DiT")

    outcomes = []
    with torch.inference_mode():
        report.headings()
        for request in requests:
            outcome = compare(encoder, dit, request, options.steps, report.doing)
            report.outcome(outcome)
            outcomes.append(outcome)
        report.statistics(encoder, dit)
        if device.type != "cpu" and not off:
            report.doing("timing single DiT forwards")
            eager_ms, graphed_ms = forward_medians(encoder, dit, requests[0], FORWARD_REPEATS)
            report.forward(requests[0], FORWARD_REPEATS, eager_ms, graphed_ms)

    allowed = allowed_difference(device, options.dtype)
    failures = [fault for outcome in outcomes for fault in faults(outcome, allowed, None if off else options.steps)]
    failures += [] if off else without_graph(encoder, dit)
    report.conclusion(outcomes, allowed, not failures)
    return failures


if __name__ == "__main__":
    sys.exit(main())
