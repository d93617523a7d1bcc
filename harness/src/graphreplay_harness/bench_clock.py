"""How long calls keep the host and the device, in microseconds, each by a clock of its own.

A call may run more than once for one number.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Given = TypeVar("Given")

_BUSY_CYCLES = 200_000
"""How long the device is kept busy before a call, to begin with: about 100 µs."""

_DOUBLINGS = 12
"""Of that, before a call counts as one that waits for the device."""


def settle() -> None:
    """Waits until the device is idle, if there is one in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def host_us(call: Callable[[Given], object], given: Sequence[Given]) -> float:
    """Median microseconds until the call returns, over one call for each thing given, each from an idle device on.

    The calls come in a row, as in a loop that serves, behind one that does not count: the first call after other code
    finds the caches full of that, and costs two or three times as much where much of it is Python.
    """
    times = []
    for each in (given[-1], *given):
        settle()
        start = time.perf_counter_ns()
        result = call(each)
        times.append((time.perf_counter_ns() - start) / 1e3)
        del result  # what it takes to free it is no part of the call
    return statistics.median(times[1:])


def whole_us(call: Callable[[], object]) -> float:
    """Microseconds from an idle device until the call has returned and the device is idle again."""
    settle()
    start = time.perf_counter_ns()
    result = call()
    settle()
    elapsed = time.perf_counter_ns() - start
    del result
    return elapsed / 1e3


def device_us(call: Callable[[Given], object], given: Given) -> float:
    """Microseconds that the device works on what the call puts on the current stream, with one pair of events around.

    The device is kept busy until the call has returned; otherwise the time would hold gaps in which the device waits
    for the host.

    Raises:
        RuntimeError: the call waits for the device.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for doubling in range(_DOUBLINGS):
        torch.cuda.synchronize()
        torch.cuda._sleep(_BUSY_CYCLES << doubling)
        begin.record()
        call(given)
        end.record()
        in_time = not begin.query()
        end.synchronize()
        if in_time:
            return float(begin.elapsed_time(end)) * 1e3
    raise RuntimeError("a call that waits for the device cannot be timed on the device alone")


def queued_us(call: Callable[[Given], object], given: Sequence[Given], calls: int) -> float:
    """Microseconds a call when so many are put back to back and awaited together. They take what is given in turn."""
    turns = [given[number % len(given)] for number in range(calls)]
    settle()
    start = time.perf_counter_ns()
    for each in turns:
        call(each)
    settle()
    return (time.perf_counter_ns() - start) / 1e3 / calls


def interleave(names: Sequence[str], repeats: int, sample: Callable[[str, int], float]) -> dict[str, list[float]]:
    """Calls ``sample(name, repeat)`` for every name in each repeat, so that noise hits all alike. The order is shuffled
    anew each time, since a call also finds the caches as the one before has left them."""
    shuffle = random.Random(0).shuffle
    samples: dict[str, list[float]] = {name: [] for name in names}
    order = list(names)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for repeat in range(repeats):
            shuffle(order)
            for name in order:
                samples[name].append(sample(name, repeat))
    finally:
        if collecting:
            gc.enable()
    return samples
