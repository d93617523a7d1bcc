"""What counts as a failure of the demo."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from graphreplay import GraphedForward
from graphreplay_harness.demo_requests import Outcome


def allowed_difference(device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference from eager, as a fraction of the most by which the steps move a latent.

    None on a CPU: the reference backend runs the very operators of the eager forward. On a GPU the same kernels usually
    run too, and the difference is zero, but a library may choose another kernel inside a graph, which sums in another
    order and so rounds another way. Measured over nine steps, with one attention kernel in place of another, in units
    of the dtype's epsilon: up to 3 in bfloat16 and float16, up to 12 in float32 (whose latents round as often as its
    models). Allowed is almost three times that. A graph stuck on another prompt is off by 30 or more in bfloat16, one
    stuck on the first timestep by 1 to 5 only; float32 shows either ten thousandfold.
    """
    if device.type == "cpu":
        return 0.0
    return (32 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps


def faults(outcome: Outcome, allowed: float, steps: int | None) -> Iterator[str]:
    """What is wrong with an outcome.

    Args:
        steps: how many DiT forwards the second visit should have replayed, besides one of the encoder; None where
            graphs are off.
    """
    name = f"request {outcome.request.number}"
    if not outcome.finite:
        yield f"{name}: its latents are not finite"
    elif outcome.difference > allowed * outcome.added:
        yield (
            f"{name}: graphed and eager latents differ by up to {outcome.difference:.3g}; "
            f"{allowed * outcome.added:.3g} is allowed"
        )
    if steps is not None and outcome.replays_again != steps + 1:
        yield f"{name}: its second graphed visit replayed {outcome.replays_again} forwards in place of {steps + 1}"


def without_graph(*wrappers: GraphedForward) -> list[str]:
    """Forwards that ran without a graph, with the wrappers' own reasons."""
    found = []
    for wrapper in wrappers:
        stats = wrapper.stats()
        if not stats["enabled"]:
            found.append(f"{wrapper.name} captures no graphs: {stats['disabled_reason']}")
        else:
            found += [f"{wrapper.name} ran eagerly {n} times: {why}" for why, n in stats["eager_reasons"].items()]
    return found
