"""Letting go of graphs: after failures, inside other captures, and in forked children."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from graphreplay.stats import logger
from graphreplay_cuda import driver
from graphreplay_cuda.current import is_capturing_here

_kept_graphs: list[torch.cuda.CUDAGraph] = []
"""Graphs that must not be destroyed. Where ``capture_end`` raised, torch (2.11 at least) keeps a raw pointer to the
graph in its pinned-memory allocator and crashes when the graph goes. A few hundred bytes each; their device memory is
given back."""

_deferred: list[tuple[Callable[[], bool], Callable[[], None]]] = []
"""Graphs that were let go inside a capture of someone else, which freeing them would break: whether one still cannot be
freed, and how it is."""


def release(
    graph: torch.cuda.CUDAGraph, process: int, is_blocked: Callable[[], bool], free: Callable[[], None]
) -> None:
    """Frees a graph by ``free()``, which waits for its replays and resets it: now, or when that harms nobody.

    Args:
        process: the id of the process that captured it.
        is_blocked: whether its replays cannot be waited for.

    Raises:
        RuntimeError: freeing it now failed.
    """
    if process != os.getpid():
        _kept_graphs.append(graph)  # a forked child has no device to free it on; torch would print that
        return
    if is_capturing_here():
        _deferred.append((is_blocked, free))
        return
    free_deferred()
    if is_blocked():
        _deferred.append((is_blocked, free))
    else:
        _free(free)


def free_late(frees: Sequence[Callable[[], None]]) -> None:
    """Frees graphs by these calls, which something that is over has held up, and what else could not be freed."""
    _deferred.extend((lambda: False, free) for free in frees)
    free_deferred()


def free_deferred() -> None:
    """Frees what could not be freed when it was let go. Errors are logged: whoever comes by has no part in them."""
    for _ in range(len(_deferred)):
        try:
            is_blocked, free = _deferred.pop(0)
        except IndexError:  # other threads free as well
            return
        if is_blocked():
            _deferred.append((is_blocked, free))
            continue
        try:
            _free(free)
        except Exception as error:
            logger.warning("a graph could not be freed: %s: %s", type(error).__name__, first_line(error))


def _free(free: Callable[[], None]) -> None:
    with driver.relaxed():  # other threads may capture meanwhile
        free()


def mend(graph: torch.cuda.CUDAGraph, device: torch.device, number: tuple[int, int]) -> list[str]:
    """Undoes what torch leaves behind when ``capture_end`` raises, with the capture's stream still current.

    Returns:
        What went wrong on the way, for a note to the error that led here.
    """
    _kept_graphs.append(graph)
    with suppress(RuntimeError):  # a later torch did so itself, and gave the pool back as well
        torch._C._cuda_endAllocateToPool(device.index, number)
        torch._C._cuda_releasePool(device.index, number)
    trivial = torch.cuda.CUDAGraph()
    try:
        # The random generator still believes in a capture; one that succeeds sets it right.
        trivial.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        trivial.capture_end()
        trivial.reset()
    except RuntimeError as error:
        _kept_graphs.append(trivial)  # torch may go on pointing to it
        return [f"cleaning up after the capture raised {first_line(error)}"]
    return []


def first_line(error: Exception) -> str:
    """An error in a line: those of CUDA go on with pages of general advice."""
    return str(error).partition("\n")[0]
