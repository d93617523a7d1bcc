"""What programs of several ranks share: the option for their device, and what is checked before the ranks meet."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable

import torch

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The backend of torch.distributed by device type."""


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds ``--device``."""
    parser.add_argument("--device", choices=tuple(BACKENDS), default="cpu", help="(default: cpu, with gloo)")


def count_gpus() -> int:
    """How many GPUs PyTorch finds. Counting them may set CUDA up in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CUDA build of PyTorch warns where there is no driver
        return torch.cuda.device_count()


def check_ranks(parser: argparse.ArgumentParser, device_type: str, count: Callable[[], int] = count_gpus) -> int:
    """How many ranks there are. Ends the process with what to do and exit status 2 if torchrun has not started it, or
    if its ranks on this machine are more than the GPUs that they want."""
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, or torch.distributed.run")
    if device_type == "cuda":
        here, found = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), count()
        if found < here:
            parser.error(
                f"--device cuda takes a GPU for each rank, and PyTorch finds {found} for {here} here; "
                "start fewer ranks, or take --device cpu"
            )
    return int(os.environ["WORLD_SIZE"])


def own_device(device_type: str) -> torch.device:
    """This rank's device, which becomes the current one."""
    if device_type != "cuda":
        return torch.device(device_type)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
