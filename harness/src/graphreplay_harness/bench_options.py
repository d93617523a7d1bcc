"""What the benchmarks share: their options, the device they need, and the versions that a result belongs to."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from graphreplay_cuda import native


def parser(prog: str, description: str, repeats: int) -> argparse.ArgumentParser:
    """Options of every benchmark: ``--repeats`` and ``--json``."""
    made = argparse.ArgumentParser(
        prog=f"python -m graphreplay_harness.{prog}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--repeats", type=whole(1), default=repeats, help=f"samples of each (default: {repeats})")
    made.add_argument("--json", type=writable, metavar="FILE", help="writes all numbers there")
    return made


def whole(low: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``low`` on."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text) >= low):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} on")
        return int(text)

    return parse


def has_device(prog: str) -> bool:
    """Whether there is a CUDA device; says so on stderr if not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CUDA build of PyTorch warns where there is no driver
        found = torch.cuda.is_available()
    if not found:
        print(f"graphreplay {prog}: this benchmark needs a CUDA device, and PyTorch finds none", file=sys.stderr)
    return found


def versions(device: str = "cuda") -> dict[str, str | None]:
    """What the numbers were measured on, and with what."""
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "graphreplay-cuda": version("graphreplay-cuda"),
        "compiled part": f"missing: {native.missing}" if native.missing else "there",
    }


class Progress:
    """Says on stderr what is being done, and since when."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self, what: str) -> None:
        print(f"[{time.perf_counter() - self._start:5.1f} s] {what}", file=sys.stderr, flush=True)


def write(path: Path | None, content: dict[str, Any]) -> None:
    """Writes a result as JSON, if it is wanted."""
    if path is not None:
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def writable(text: str) -> Path:
    """A parser of names of files to be written."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():  # to be told now, and not after minutes of measuring
        raise argparse.ArgumentTypeError(f"cannot write {text}: it is a folder, or in none")
    return path
