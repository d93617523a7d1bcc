"""What a GraphPool keeps on an XPU device: memory, and the stream that its captures run on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from graphreplay.stats import logger

STREAMS = 32
"""How many streams torch hands out for a device before it begins again."""

one_at_a_time = threading.RLock()
"""Held by whoever warms up or captures. Captures of one process share the state of the random generator, and torch
hands out its streams in turn, so that two pools may have the same one: what one of them warms up with would go into the
graph that the other one captures."""


class PoolMemory:
    """torch's memory pool under the graphs of a GraphPool. torch drops a pool with its last graph, so that the next one
    opens another.

    Graphs are let go from any thread, and wherever the garbage collector runs, be it in here: so the lock is reentrant,
    and nothing is freed under it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._graphs = 0
        self._handle: Any = None  # torch has a type of its own for it
        self._begins = False
        self._late: list[Callable[[], None]] = []

    @contextmanager
    def enter(self) -> Iterator[Any]:
        """torch's handle of the pool, for one more graph, whose capture begins in the body: until it has, torch does
        not count it, so that graphs which leave meanwhile are freed at the end of the body."""
        with self._lock:
            self._begins = True  # first: from here on no graph is freed
            if self._graphs == 0:
                self._handle = torch.xpu.graph_pool_handle()
            self._graphs += 1
            handle = self._handle
        try:
            yield handle
        finally:
            with self._lock:
                self._begins = False
                late, self._late = self._late, []
            for free in late:
                try:
                    free()
                except Exception as error:
                    logger.warning("a graph could not be freed: %s: %s", type(error).__name__, str(error))

    def leave(self, free: Callable[[], None]) -> None:
        """Frees a graph by ``free()``, with which it leaves the pool.

        It is counted out first: a capture that begins meanwhile opens another pool, rather than enter one that torch
        drops under it. The order in which several leave at once does not matter then.
        """
        with self._lock:
            self._graphs -= 1
            if self._begins:
                self._late.append(free)
                return
        free()


class PoolState:
    """What a GraphPool keeps for this backend."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.renew()
        self.last_stream = torch.xpu.current_stream(device)
        """Where the pool's latest work was put."""

    def renew(self) -> None:
        """Has later captures run on another stream and in other memory."""
        self.memory = PoolMemory()
        # Warm-ups run here too, so that whatever libraries allocate at a stream's first use is no memory of a graph.
        self.capture_stream = torch.xpu.Stream(self.device)
        for _ in range(STREAMS - 1):  # some may be recorded for good, by captures that torch could not end
            if not is_capturing(self.capture_stream):
                break
            self.capture_stream = torch.xpu.Stream(self.device)

    @contextmanager
    def side(self) -> Iterator[None]:
        """Runs its body on the capture stream, ordered after the work before it and before the work after it."""
        with one_at_a_time:
            side, current = self.capture_stream, torch.xpu.current_stream(self.device)
            side.wait_stream(current)
            try:
                with torch.xpu.stream(side):
                    yield
            except BaseException as failure:
                try:
                    current.wait_stream(side)
                except Exception as error:
                    failure.add_note(f"and {type(error).__name__}: {error}")
                raise
            current.wait_stream(side)

    @property
    def blocked(self) -> bool:
        """Whether the stream of the latest work is being captured, and is not the current one: then nothing can wait
        for it."""
        return torch.xpu.current_stream() != self.last_stream and is_capturing(self.last_stream)


def wait_for(stream: torch.xpu.Stream) -> None:
    """Has the host wait for what a stream holds, unless that is being captured: by a capture that could not be ended.
    An error of that work comes up again at whatever uses the device next."""
    if not is_capturing(stream):
        with suppress(RuntimeError):
            stream.synchronize()


def is_capturing(stream: torch.xpu.Stream) -> bool:
    """Whether a stream is being captured."""
    with torch.xpu.stream(stream):
        return torch.xpu.is_current_stream_capturing()
