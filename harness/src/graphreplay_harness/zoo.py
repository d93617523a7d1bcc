"""Models that others wrote, graphed beside a plain copy: which of them graph, which run eagerly, and why.

    python -m graphreplay_harness.zoo --device cuda

Nothing is downloaded: the models are small, with random weights. Those of libraries that are not installed are skipped.

Exit codes: 0, all results are equal and all outcomes as declared; 1, not so; 2, bad options.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

import torch

from graphreplay import GraphReplayError, get_graphed_forward_cls
from graphreplay_harness import bench_options
from graphreplay_harness.zoo_model import Model
from graphreplay_harness.zoo_models import MODELS
from graphreplay_harness.zoo_report import as_json, markdown, table
from graphreplay_harness.zoo_visit import Outcome, visit


def main(argv: Sequence[str] | None = None) -> int:
    """Visits models as these arguments say (None: the process's own); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m graphreplay_harness.zoo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    parser.add_argument("--model", nargs="+", metavar="NAME", help="these alone (default: all)")
    parser.add_argument("--list", action="store_true", help="names the models, and runs none")
    parser.add_argument("--json", type=bench_options.writable, metavar="FILE", help="writes all outcomes there")
    parser.add_argument("--markdown", type=bench_options.writable, metavar="FILE", help="writes docs/models.md there")
    given = parser.parse_args(argv)
    unknown = [name for name in given.model or () if name not in MODELS]
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; --list names them")
    if given.markdown and given.model:
        parser.error("--markdown takes all models, and no --model")
    models = [MODELS[name] for name in given.model or MODELS]
    if given.list:
        for model in models:
            print(f"{model.name:<28} {model.made_of}")
        return 0
    try:
        get_graphed_forward_cls(given.device)
    except GraphReplayError as error:
        parser.error(str(error))
    progress = bench_options.Progress()
    outcomes = []
    for number, model in enumerate(models, start=1):
        progress(f"{number} of {len(models)}: {model.name}")
        outcomes.append(_visit(model, torch.device(given.device)))
    progress("done")
    print(table(outcomes))
    bench_options.write(
        given.json, {"torch": torch.__version__, "device": given.device, "models": as_json(outcomes, given.device)}
    )
    if given.markdown:
        given.markdown.write_text(markdown(outcomes), encoding="utf-8")
    return 1 if any(outcome.faults for outcome in outcomes) else 0


def _visit(model: Model, device: torch.device) -> Outcome:
    """A visit that ends in an error is a fault of that model, and the others are visited all the same."""
    try:
        return visit(model, device)
    except Exception as error:
        traceback.print_exc()
        return Outcome(model, "failed", equal=False, faults=[f"{type(error).__name__}: {error}"])


if __name__ == "__main__":
    sys.exit(main())
