"""Letting go of graphs: after failures, inside other captures, and in forked children."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

_kept_graphs: list[torch.cuda.CUDAGraph] = []
"""Graphs that must not be destroyed. Where ``capture_end`` raised, torch (2.11 at least) keeps a raw pointer to the
graph in its pinned-memory allocator and crashes when the graph goes. A few hundred bytes each; their device memory is
given back."""

_deferred: list[Callable[[], None]] = []
"""How to free graphs that were let go inside a capture of someone else, which freeing them would break."""


def release(graph: torch.cuda.CUDAGraph, process: int, free: Callable[[], None]) -> None:
    """Frees a graph by ``free()``, which waits for its replays and resets it: now, or when that harms nobody.

    Args:
        process: the id of the process that captured it.
    """
    if process != os.getpid():
        _kept_graphs.append(graph)  # a forked child has no device to free it on; torch would print that
        return
    _deferred.append(free)
    if not torch.cuda.is_current_stream_capturing():
        free_deferred()


def free_deferred() -> None:
    """Frees what could not be freed when it was let go."""
    while True:
        try:
            free = _deferred.pop()
        except IndexError:  # not by a look first: other threads free as well
            return
        free()


def mend(graph: torch.cuda.CUDAGraph, device: torch.device, number: tuple[int, int]) -> None:
    """Undoes what torch leaves behind when ``capture_end`` raises, with the capture's stream still current."""
    _kept_graphs.append(graph)
    try:
        torch._C._cuda_endAllocateToPool(device.index, number)
    except RuntimeError:
        pass  # a later torch did so itself, and gave the pool back as well
    else:
        torch._C._cuda_releasePool(device.index, number)
    # The random generator still believes in a capture; one that succeeds sets it right.
    trivial = torch.cuda.CUDAGraph()
    trivial.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=device)
    trivial.capture_end()
    trivial.reset()
