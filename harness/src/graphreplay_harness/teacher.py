"""A streaming session of an audio teacher as TaoMate runs it, eager against graphed.

Four requests of nine forwards each, with 207, 198, 198 and 199 audio latents and a reference tail from the second one
on, with LoRA off and then on. Every shape is captured up front and pinned; after that there are replays alone. Eager
forwards use a memo of their AdaLN projections, and graphs hold the projections themselves.

Exit codes: 0, graphed agrees with eager, by one capture for each shape and LoRA state; 1, not so; 2, bad input.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from graphreplay_harness.bench_options import has_device, parser, write
from graphreplay_harness.teacher_memo import Memo, ProjectionMemo, load_memo_class, single_rank_vllm
from graphreplay_harness.teacher_model import LARGE, SMALL, make_teacher
from graphreplay_harness.teacher_session import CAPTURES, LATENTS, LORA, STEPS, Outcome, Session


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the session with these arguments (None: the process's own); returns the exit code."""
    options = parser("teacher", __doc__ or "", repeats=3)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    options.add_argument(
        "--cache", type=Path, metavar="FILE", help="exact_projection_cache.py of vllm-omni (default: a memo of ours)"
    )
    given = options.parse_args(argv)
    if given.device == "cuda" and not has_device("teacher"):
        return 2
    memo: Memo = ProjectionMemo()
    if given.cache is not None:
        try:
            memo = load_memo_class(given.cache)()
        except Exception as error:  # the file is code, which may raise anything
            options.error(f"--cache {given.cache}: {type(error).__name__}: {error}")
    device = torch.device(given.device)
    dtype, size = (torch.float32, SMALL) if device.type == "cpu" else (torch.bfloat16, LARGE)
    print(f"{size.layers} layers of width {size.width}, {dtype} on {device}; {_memo_in_words(given.cache)}")
    # Outside of inference mode: of weights that are made in it TaoMate's memo remembers nothing.
    teacher = make_teacher(device, dtype, size, memo)
    session = Session(teacher, device, dtype)
    with torch.inference_mode(), single_rank_vllm() if given.cache else nullcontext():
        session.warm_up()
        outcomes = []
        print("LoRA  request  latents  reference  eager ms  graphed ms  ratio  difference")
        for outcome in session.run(given.repeats):
            print(_row(outcome), flush=True)
            outcomes.append(outcome)
    stats = session.graphed.stats()
    print(", ".join(f"{stats[key]} {key}" for key in ("captures", "pinned", "replays", "evictions", "eager_calls")))
    print(f"memo: {memo.hits} hits, {memo.misses} misses, all by eager forwards")
    failures = list(faults(outcomes, stats, allowed_difference(device, dtype), given.repeats))
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    content = {"requests": [outcome.as_json() for outcome in outcomes], "stats": stats, "failures": failures}
    write(given.json, {"torch": torch.__version__, "device": given.device, "repeats": given.repeats, **content})
    return 1 if failures else 0


def allowed_difference(device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference from eager, as a fraction of the most by which the steps move a latent: none on a CPU,
    whose reference backend runs the very operators of the eager forward; a few roundings on a GPU, where a library may
    choose another kernel inside a graph."""
    return 0.0 if device.type == "cpu" else 8 * torch.finfo(dtype).eps


def faults(outcomes: Sequence[Outcome], stats: dict[str, object], allowed: float, repeats: int) -> Iterator[str]:
    """What is wrong with a session."""
    for outcome in outcomes:
        name = f"request {outcome.request}, LoRA {outcome.lora}"
        if not outcome.finite:
            yield f"{name}: its latents are not finite"
        elif outcome.difference > allowed * outcome.moved:
            limit = allowed * outcome.moved
            yield f"{name}: graphed and eager differ by up to {outcome.difference:.3g}; {limit:.3g} is allowed"
        if outcome.replays != STEPS:
            yield f"{name}: {outcome.replays} replays in place of {STEPS}"
        if outcome.memo_lookups:
            yield f"{name}: {outcome.memo_lookups} lookups in the memo by replays"
    runs = len(LATENTS) * len(LORA) * STEPS * repeats
    documented = {"captures": CAPTURES, "pinned": CAPTURES, "replays": runs, "evictions": 0, "eager_calls": 0}
    for key, count in documented.items():
        if stats[key] != count:
            yield f"{stats[key]} {key} in place of {count}; eager because: {stats['eager_reasons']}"


def _memo_in_words(cache: Path | None) -> str:
    if cache is None:
        return "AdaLN memo: one of ours, in place of TaoMate's, since --cache names no file of its class"
    return f"AdaLN memo: TaoMate's, from {cache}"


def _row(outcome: Outcome) -> str:
    ratio = outcome.eager_ms / outcome.graphed_ms
    return (
        f"{outcome.lora:>4}  {outcome.request:>7}  {outcome.latents:>7}  {outcome.reference:>9}"
        f"  {outcome.eager_ms:>8.1f}  {outcome.graphed_ms:>10.1f}  {ratio:>5.2f}  {outcome.difference:>10.3g}"
    )


if __name__ == "__main__":
    sys.exit(main())
