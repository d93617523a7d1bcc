"""What the user gives the demo: options and prompts. Anything unusable is a BadInput with a message of one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from graphreplay import GraphedForward, GraphReplayError, get_graphed_forward_cls

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

PROMPTS = (
    "Rain on a tin roof and distant thunder",
    "A steam train leaves the station while children shout",
    "Waves break slowly on a pebble beach",
    "A slow waltz for solo piano, recorded in an old wooden church 🎹",
)


class BadInput(Exception):
    """What the user gave cannot be used."""


@dataclass(frozen=True)
class Options:
    """Checked options."""

    prompts: Sequence[str]
    empty_lines: int
    """Skipped in the file of prompts."""
    device: torch.device
    cls: type[GraphedForward]
    """What graphs forwards on the device."""
    dtype: torch.dtype
    """Of the models."""
    seed: int
    steps: int


def read_options(argv: Sequence[str] | None, description: str) -> Options:
    """Parses and checks a command line (None: the process's own).

    Raises:
        BadInput: it cannot be used.
    """
    given = _parser(description).parse_args(argv)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        cls = get_graphed_forward_cls(device)
        parsed = cls.resolve_device(torch.device(device))
    except GraphReplayError as error:
        raise BadInput(str(error)) from error
    prompts, empty_lines = (PROMPTS, 0) if given.prompts is None else _read_prompts(given.prompts)
    dtype = DTYPES[given.dtype or ("float32" if parsed.type == "cpu" else "bfloat16")]
    return Options(prompts, empty_lines, parsed, cls, dtype, given.seed, given.steps)


def _read_prompts(path: Path) -> tuple[list[str], int]:
    """The prompts, and how many empty lines lay among them."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")]
    prompts = [line for line in lines if line]
    if not prompts:
        raise BadInput(f"{path} holds no prompts; write one on each line")
    return prompts, len(lines) - len(prompts)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} (see --help)")


def _parser(description: str) -> _Parser:
    parser = _Parser(
        prog="python -m graphreplay_harness.demo",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="prompts, one on each line (default: four of ours)"
    )
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--seed", type=_whole(0, 2**32), default=0, help="of weights and noise (default: 0)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the models (default: float32 on cpu, else bfloat16)")
    parser.add_argument("--steps", type=_whole(1, 1000), default=9, help="Euler steps of a request (default: 9)")
    return parser


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return parse
