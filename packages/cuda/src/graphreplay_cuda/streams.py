"""Streams that captures run on. torch's own come from a pool of 32 that wraps around: two captures would then share a
stream, and with it a cuBLAS workspace that both of their graphs write at once.

A graph has the address of its stream's workspace, and torch may free that at any time: its own cudagraph trees free all
workspaces of the process at every recording. So workspaces are memory of pools of their own, one for each stream, which
give nothing back: what torch frees there goes to later workspaces of the stream alone.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from graphreplay_cuda import driver

_lock = threading.Lock()
_dedicated: dict[int, torch.cuda.Stream] = {}
"""Where captures of a device run that name no stream."""

_bodies: dict[tuple[int, int], torch.cuda.Stream] = {}
"""Where bodies run, by device and raw parent stream: bodies of one parent come one after another."""

_lent: dict[int, list[torch.cuda.Stream]] = defaultdict(list)
"""Streams of memory pools that are gone, for the next ones. A stream's workspace is never freed, so none is wasted."""

_taken: set[tuple[int, int]] = set()
"""Streams that a capture runs on, by device and raw stream."""

_workspace_pools: dict[tuple[int, int], torch.cuda.MemPool] = {}
"""Where the workspaces of a stream are, by device and raw stream."""

_workspace_lock = threading.RLock()
"""Held while one is allocated: torch sends memory of one thread at a time to a pool."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.served: set[tuple[int, int]] = set()
        """Streams that this thread has all workspaces for, unless torch has freed them since."""


_here = _Here()


def dedicated_stream(index: int) -> torch.cuda.Stream:
    """The side stream of a device for captures that name none."""
    with _lock:
        if index not in _dedicated:
            _dedicated[index] = _new(index)
        return _dedicated[index]


def borrow_stream(index: int) -> torch.cuda.Stream:
    """A stream of a device that nobody else captures on until ``give_back``."""
    with _lock:
        free = _lent[index]
        return free.pop() if free else _new(index)


def give_back(stream: torch.cuda.Stream) -> None:
    """Ends the use of a borrowed stream."""
    _lent[stream.device.index].append(stream)


def take(stream: torch.cuda.Stream) -> bool:
    """Takes a stream for one capture, until ``let_go``; returns False where another one has it. The driver tells only
    whether a stream is being captured right now, and a capture needs it for a moment before and after that."""
    key = _key(stream)
    with _lock:
        if key in _taken:
            return False
        _taken.add(key)
        return True


def let_go(stream: torch.cuda.Stream) -> None:
    """Ends the use of a stream that a capture took."""
    _taken.discard(_key(stream))  # without the lock, which the collector may find held by its own thread


def follow_current(stream: torch.cuda.Stream) -> None:
    """Orders a stream behind what the current one of its device holds, if nobody captures that."""
    current = torch.cuda.current_stream(stream.device)
    if current.cuda_stream == 0 or not driver.is_capturing(current.cuda_stream):
        stream.wait_stream(current)


def wait_for(stream: torch.cuda.Stream) -> None:
    """Has the host wait for what a stream holds, if nobody captures it: the wait would break the capture. An error of
    that work comes up again at whatever uses the device next."""
    with suppress(RuntimeError), driver.relaxed():
        if not driver.is_capturing(stream.cuda_stream):
            done = torch.cuda.Event()  # no wait that torch.cuda.set_sync_debug_mode would tell the user of
            done.record(stream)
            done.synchronize()


def body_stream(parent: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream for bodies below a parent stream."""
    with _lock:
        key = _key(parent)
        if key not in _bodies:
            _bodies[key] = _new(parent.device.index)
        return _bodies[key]


def give_workspace(stream: torch.cuda.Stream) -> None:
    """Has torch allocate the workspaces of a stream for this thread now, where it has none. Inside a capture they would
    become memory of one graph, and all later ones on the stream would use it; elsewhere, once torch has freed them,
    memory of anyone. One that the stream has already stays where it is.

    Other threads may capture meanwhile, and this one on another stream, with its memory not sent to any pool.
    """
    key = _key(stream)
    driver.ensure_context()  # the thread may be new
    with _workspace_lock, driver.relaxed(), torch.cuda.stream(stream):
        before = _allocations(stream.device)
        with _own_memory(key):
            torch.cuda.current_blas_handle()
        if key in _here.served and _allocations(stream.device) == before:
            return
        # The first time, or torch has freed all of them; then that of cuBLASLt as well, which has one of its own unless
        # TORCH_CUBLASLT_UNIFIED_WORKSPACE says otherwise, and no call that allocates it.
        _here.served.discard(key)
        with suppress(RuntimeError):  # then the first product of the forward says why
            _multiply_by_lt(stream.device, key)
            _here.served.add(key)


def _multiply_by_lt(device: torch.device, key: tuple[int, int]) -> None:
    """Runs a product that torch gives to cuBLASLt, unseen by the user's modes."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        # Not in the pool: a graph in flight may still use what is free there.
        bias, left, right, out = torch.empty(4, 16, 16, dtype=torch.float16, device=device)
        with _own_memory(key):
            torch.addmm(bias[0], left, right, out=out)


@contextmanager
def _own_memory(key: tuple[int, int]) -> Iterator[None]:
    """Has what this thread allocates come from the pool for the workspaces of a stream, which is current."""
    if torch.cuda.get_allocator_backend() != "native":  # no other has such pools
        yield
        return
    if key not in _workspace_pools:
        pool = torch.cuda.MemPool()
        # Never destroyed, not even at the end of the process, when a capture may be under way or the device be gone.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
        _workspace_pools[key] = pool
    with torch.cuda.use_mem_pool(_workspace_pools[key], key[0]):
        yield


def _allocations(device: torch.device) -> int:
    """How many allocations a device has seen."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)["allocation"]["all"]["allocated"])


def _key(stream: torch.cuda.Stream) -> tuple[int, int]:
    return stream.device.index, stream.cuda_stream


def named(raw: int, device: torch.device) -> torch.cuda.Stream:
    """The stream of a device that has this raw handle."""
    return torch.cuda.ExternalStream(raw, device=device) if raw else torch.cuda.default_stream(device)


def _new(index: int) -> torch.cuda.Stream:
    with torch.cuda.device(index):
        driver.ensure_context()
        return torch.cuda.ExternalStream(driver.new_stream(), device=index)
