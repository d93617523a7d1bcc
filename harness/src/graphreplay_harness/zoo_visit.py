"""A visit to one model of the zoo: calls through a wrapper, beside calls of a plain copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from graphreplay import get_graphed_forward_cls
from graphreplay_harness.zoo_compare import differences, not_finite
from graphreplay_harness.zoo_model import Model

ROUNDS = 3
"""How often each shape is called."""


@dataclass(frozen=True)
class Outcome:
    """What came of a visit."""

    model: Model
    outcome: str
    """``graphed``: each shape was captured once, and all its other calls were replayed; ``eager``: nothing was
    captured; ``mixed``: neither; ``skipped``: the library cannot be imported;
    ``failed``: a call raised an error."""
    captures: int = 0
    replays: int = 0
    equal: bool = True
    """Whether all results, and the buffers afterwards, were eager's."""
    reason: str = ""
    """The wrapper's own, where calls ran eagerly; or what cannot be imported."""
    faults: list[str] = field(default_factory=list)
    """What is not as it should be."""


def visit(model: Model, device: torch.device) -> Outcome:
    """Calls the model with each of its shapes in turn, ROUNDS times over, and compares each result with eager's."""
    try:
        # Without gradients, since weights that others are computed from (weight_norm) could not be copied else.
        with _seeded(0, torch.device("cpu")), torch.no_grad():
            module = model.build().train(model.training)
            plain = copy.deepcopy(module).to(device)
    except ImportError as error:
        return Outcome(model, "skipped", reason=str(error))
    module = module.to(device)  # after the copy: the weights of an LSTM become one piece of memory on a GPU
    cls = get_graphed_forward_cls(device)
    with cls(module, device=device, name=model.name) as graphed, torch.inference_mode():
        unequal, vain = _calls(model, graphed, plain, device)
        got, wanted = (dict(each.named_buffers()) for each in (module, plain))
        unequal += [f"afterwards, buffer{what}" for what in differences(got, wanted, device)]
        stats = graphed.stats()
    faults = unequal + vain
    shapes = len(model.shapes)
    if (stats["captures"], stats["replays"], stats["eager_calls"]) == (shapes, shapes * (ROUNDS - 1), 0):
        outcome = "graphed"
    else:
        outcome = "mixed" if stats["captures"] else "eager"
    reason = stats["disabled_reason"] or next(iter(stats["eager_reasons"]), "")
    expected, why = model.expected(device.type), model.why_eager(device.type)
    if outcome != expected:
        faults.append(f"{outcome} and not {expected}, as declared: {reason}")
    elif why not in reason:
        faults.append(f"eager for another reason than {why!r}: {reason}")
    return Outcome(model, outcome, stats["captures"], stats["replays"], not unequal, reason, faults)


def _calls(model: Model, graphed: Any, plain: Any, device: torch.device) -> tuple[list[str], list[str]]:
    """Where the wrapper's results were not eager's, and where eager's could not have shown it."""
    unequal: list[str] = []
    vain: list[str] = []
    earlier: dict[tuple[int, ...], Any] = {}
    for number in range(ROUNDS * len(model.shapes)):
        shape = model.shapes[number % len(model.shapes)]
        call = f"call {number + 1}, of {shape}"
        results = []
        for forward in (graphed, plain):
            with _seeded(number + 1, device), device:
                kwargs = model.inputs(*shape)
            results.append(forward(**kwargs))
        got, wanted = results
        unequal += [f"{call}: result{what}" for what in differences(got, wanted, device)]
        vain += [f"{call}: result{path} is not finite" for path in not_finite(wanted)]
        # Else a graph that is stuck on older inputs would not show.
        if shape in earlier and not any(differences(earlier[shape], wanted, device)):
            vain.append(f"{call}: eager's result is the same for other inputs")
        earlier[shape] = wanted
    return unequal, vain


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators, and puts them back."""
    on_gpu = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(on_gpu, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(seed)
        yield
