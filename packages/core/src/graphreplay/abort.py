"""Ending collectives that would never end by themselves."""

from __future__ import annotations

import threading
import time

import torch
from torch import distributed as dist

from graphreplay.agreement import health_of
from graphreplay.stats import logger

ABORT_LIMIT = 5.0
"""Seconds to wait for NCCL to abort. Collectives end at once; the rest waits for every graph that holds some."""


class CollectiveAbort:
    """Ends the collectives that a process group has issued on a device since this was made; later ones raise.

    Backends of the CPU are left alone, since they wake by their timeout. NCCL does not: a kernel that waits for its
    peer keeps the device busy, and with it everybody who waits for the device.

    Args:
        limit: seconds to wait for what was issued before, which other ranks have issued too.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, limit: float) -> None:
        self._group, self._device, self._limit = group, device, limit
        self._before: torch.Event | None = None
        if device.type != "cpu":
            self._before = torch.Event(device)
            self._before.record()

    def __call__(self, reason: str) -> None:
        """Aborts; graphs of this group must not be replayed any more."""
        if self._before is None:
            return
        health_of(self._group).aborted = reason
        end = time.monotonic() + self._limit
        while not self._before.query() and time.monotonic() < end:
            time.sleep(0.001)
        thread = threading.Thread(target=self._abort, name="graphreplay-abort", daemon=True)
        thread.start()
        thread.join(ABORT_LIMIT)

    def _abort(self) -> None:
        try:
            self._group._get_backend(self._device).abort()
        except RuntimeError as error:
            logger.warning("the group's collectives cannot be aborted, and may hang: %s", error)
