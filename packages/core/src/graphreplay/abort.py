"""Ending collectives that would never end by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import torch
from torch import distributed as dist

from graphreplay.stats import logger

ABORT_LIMIT = 5.0
"""Seconds to wait for NCCL to abort. Collectives end at once; the rest waits for every graph that holds some."""


_under_way: list[threading.Thread] = []


def wait_for_aborts() -> None:
    """Waits for aborts under way, now that graphs have gone: whoever destroys a group meanwhile brings the process
    down."""
    end = time.monotonic() + ABORT_LIMIT
    for thread in tuple(_under_way):
        thread.join(max(0.0, end - time.monotonic()))
        if not thread.is_alive():
            _under_way.remove(thread)


class CollectiveAbort:
    """Ends the collectives that process groups have issued on a device since this was made; later ones raise.

    Backends of the CPU are left alone, since they wake by their timeout. NCCL does not: a kernel that waits for its
    peer keeps the device busy, and with it everybody who waits for the device.

    Args:
        group: whose collectives end in any case.
        patience: seconds to wait for what was issued before, which other ranks have issued too.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, patience: float) -> None:
        self._group, self._device, self._patience = group, device, patience
        self._before: torch.Event | None = None
        if device.type != "cpu":
            self._before = torch.Event(device)
            self._before.record()

    def __call__(self, groups: Iterable[dist.ProcessGroup] = ()) -> None:
        """Aborts the group, and these. No graph of theirs may be replayed any more."""
        if self._before is None:
            return
        end = time.monotonic() + self._patience
        while not self._before.query() and time.monotonic() < end:
            time.sleep(0.001)
        threads = [
            threading.Thread(target=self._abort, args=(group,), name="graphreplay-abort", daemon=True)
            for group in {self._group, *groups}
        ]
        for thread in threads:
            thread.start()
        _under_way.extend(threads)
        wait_for_aborts()
        if any(thread.is_alive() for thread in threads):
            logger.warning("aborting the collectives goes on: it waits for graphs that hold some; close their wrappers")

    def _abort(self, group: dist.ProcessGroup) -> None:
        try:
            group._get_backend(self._device).abort()
        except RuntimeError as error:
            logger.warning("collectives of a group cannot be aborted, and may hang: %s", str(error))
