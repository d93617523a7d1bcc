"""The order of launches that must not run at the same time."""

from __future__ import annotations

import torch

from graphreplay.locks import Locked
from graphreplay_cuda import driver, streams
from graphreplay_cuda.errors import GraphStateError


class Launches(Locked):
    """The launches of one graph, or of several that share memory, which come one at a time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.last: int | None = None
        """The raw stream of the latest one."""

    def take_turn(self) -> None:
        """Orders the current stream behind the latest launch, before the next one. The driver does as much for the
        graph itself, and not for what goes with it: seeds of random numbers, and copies."""
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw != self.last:
            if self.last is not None:
                self.refuse_capture("a launch")
                if self.is_blocked():
                    raise GraphStateError("the stream of the launch before is being captured; launch after that")
                torch.cuda.current_stream(self.device).wait_stream(streams.named(self.last, self.device))
            self.last = raw

    def is_blocked(self) -> bool:
        """Whether the stream of the latest one is being captured, so that nothing can wait for it now."""
        last = self.last or 0  # the legacy default stream is never captured
        return last != 0 and driver.is_capturing(last)

    def wait(self) -> None:
        """Has the host wait for them, which must not be blocked."""
        if self.last is not None:
            # By an event: waiting for the legacy default stream would break captures of other threads.
            done = torch.cuda.Event()
            done.record(streams.named(self.last, self.device))
            done.synchronize()

    def refuse_capture(self, what: str) -> None:
        """Refuses a launch while the stream for it is captured: CUDA would take the graph in as it is now.

        Raises:
            GraphStateError: it is.
        """
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw and driver.is_capturing(raw):  # the legacy default stream, 0, is never captured
            raise GraphStateError(f"{what} inside a capture, which takes in no graphs")
