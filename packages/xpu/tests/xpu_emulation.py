"""torch.xpu emulated on the CPU, so that the XPU backend runs where no Intel GPU is.

Work is done at once, by the CPU; graphs are recorded and replayed as by the core's reference backend. On top of that
the emulation keeps the books that a device keeps: which stream has waited for which, which replays the host has waited
for, which stream is recorded, which pool has graphs. It raises where a device would fail, and also where a device would
just compute something wrong: replays of one pool that are not ordered, a graph freed under a replay, a replay that may
draw random numbers by the seed that the beginning of a capture writes.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from graphreplay.opmode import uncompiled, written_args
from graphreplay.reference import RecordedGraph, _Recorder

DEVICES = 2
STREAMS = 32
"""torch hands out so many streams a device, and then begins again."""


class Race(AssertionError):
    """Work that a device would run in the wrong order. It would not notice, so this is no RuntimeError."""


@dataclass
class Queue:
    """One stream of the device, under however many Stream objects."""

    seen: dict[tuple[int, int], int] = field(default_factory=dict)
    """What has run before its next work: ticks of each queue, its own among them."""
    recording: XPUGraph | None = None


class Machine:
    """All state of the emulated devices.

    Attributes:
        faults: what the next matching step does: "begin", "end" and "finalize" fail, "lose" loses a capture's work.
        lasting: those of them that come about each time.
        limit: bytes that one capture may allocate.
        synced: how often the host waited for an event.
        seeded: when the latest capture of each device wrote the seed that replays read: queue and tick.
        generator_captures: whether the random generator believes in a capture.
    """

    def __init__(self):
        self.queues = {(index, number): Queue() for index in range(DEVICES) for number in range(STREAMS + 1)}
        self.host = {}
        self.faults = set()
        self.lasting = set()
        self.limit = 1 << 40
        self.synced = 0
        self.seeded = {}
        self.generator_captures = False
        self.pools = {}  # graphs by handle
        self.uses = Counter()  # of each pool, as torch counts them; with the last one it drops the pool
        self.gone = set()
        self.latest = {}  # the last replay of each pool: queue and tick
        self.numbers = itertools.count()
        self.handles = itertools.count(1)
        self.graphs = set()
        self.current = threading.local()
        self.routed = set()

    def fault(self, name):
        if name in self.lasting:
            return True
        if name not in self.faults:
            return False
        self.faults.remove(name)
        return True


machine = Machine()


def _merge(into, seen):
    for key, tick in seen.items():
        into[key] = max(tick, into.get(key, 0))


def _index(device):
    if device is None:
        return current_device()
    return device if isinstance(device, int) else torch.device(device).index or 0


class Stream:
    def __init__(self, device=None, priority=0, **kwargs):
        self.key = kwargs.get("key") or (_index(device), 1 + next(machine.numbers) % STREAMS)
        self.device = torch.device("xpu", self.key[0])

    @property
    def queue(self):
        return machine.queues[self.key]

    def work(self):
        """Puts something on it, and returns its time."""
        self.queue.seen[self.key] = self.queue.seen.get(self.key, 0) + 1
        return self.queue.seen[self.key]

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def synchronize(self):
        if self.queue.recording is not None:
            raise RuntimeError("wait cannot be called for a queue which is recording to a command graph")
        _merge(machine.host, self.queue.seen)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def __eq__(self, other):
        return isinstance(other, Stream) and self.key == other.key

    def __hash__(self):
        return hash(self.key)


class Event:
    def __init__(self, enable_timing=False):
        self._seen = {}
        self._recorded = None

    def record(self, stream=None):
        stream = stream or current_stream()
        stream.work()
        self._seen, self._recorded = dict(stream.queue.seen), stream.queue.recording

    def wait(self, stream=None):
        stream = stream or current_stream()
        if self._recorded is not stream.queue.recording and self._recorded is not None:
            raise RuntimeError("an event of a capture was waited for outside of it")
        _merge(stream.queue.seen, self._seen)

    def synchronize(self):
        if self._recorded is not None:
            raise RuntimeError("wait method cannot be used for an event associated with a command graph")
        machine.synced += 1
        _merge(machine.host, self._seen)


class _Work(_Recorder):
    def on_op(self, op, args, kwargs):
        result = super().on_op(op, args, kwargs)
        if self._graph.nbytes > machine.limit:
            raise torch.OutOfMemoryError("XPU out of memory. Tried to allocate more than there is")
        return result


class XPUGraph:
    def __init__(self, keep_graph=False):
        self._work = RecordedGraph()
        self._scope = ExitStack()
        self._stream = self._pool = None
        self._ended = False
        self._replays = {}

    def capture_begin(self, pool=None):
        stream = current_stream()
        if self._ended:
            raise RuntimeError("This XPUGraph instance already owns a captured graph")
        if pool in machine.gone:
            raise RuntimeError("the pool was dropped with its last graph")
        if stream.queue.recording is not None:
            raise RuntimeError("the queue is already in the recording state")
        machine.generator_captures = True
        machine.seeded[stream.device.index] = (stream.key, stream.work())
        machine.graphs.add(self)
        self._stream, self._pool = stream, pool or graph_pool_handle()
        machine.routed.add(self._pool)
        machine.uses[self._pool] += 1
        if machine.fault("begin"):
            raise RuntimeError("begin_recording failed")
        stream.queue.recording = self
        self._scope.enter_context(uncompiled())
        self._scope.enter_context(_Work(self._work))

    def capture_end(self):
        if self._stream is None or self._stream.queue.recording is not self:
            raise RuntimeError("capture_end() without a capture")
        if current_stream() != self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self._scope.close()
        if machine.fault("end"):
            raise RuntimeError("end_recording failed\nand a page of advice")  # the queue is still recorded
        self._stream.queue.recording = None
        machine.routed.discard(self._pool)
        machine.generator_captures = False
        self._ended = True
        machine.pools.setdefault(self._pool, set()).add(self)
        if machine.fault("finalize"):
            raise RuntimeError("finalize failed")
        if machine.fault("lose"):
            self._work.calls.clear()
        if not any(map(_computes, self._work.calls)):
            warnings.warn("The XPU Graph is empty. This usually means that the graph was ...", stacklevel=2)

    def replay(self):
        if not self._ended:
            raise RuntimeError("Called XPUGraph::replay without a preceding successful capture.")
        stream = current_stream(self._stream.device)
        key, tick = machine.latest.get(self._pool, (stream.key, 0))
        if stream.queue.seen.get(key, 0) < tick:
            raise Race(f"a replay on {stream.key} that does not wait for the last one of its pool, on {key}")
        seeding, tick = machine.seeded[stream.device.index]
        if max(stream.queue.seen.get(seeding, 0), machine.host.get(seeding, 0)) < tick:
            raise Race(f"a replay on {stream.key} that may meet the seed which a capture on {seeding} writes")
        self._replays[stream.key] = stream.work()
        machine.latest[self._pool] = (stream.key, self._replays[stream.key])
        self._work.replay()

    def reset(self):
        late = {key for key, tick in self._replays.items() if machine.host.get(key, 0) < tick}
        if late:
            raise Race(f"a graph freed while it may run on {late}")
        if self._ended:
            machine.pools[self._pool].discard(self)
            release_pool(self._stream.device, self._pool)
        self._ended, self._replays = False, {}
        machine.graphs.discard(self)
        self._work.reset()


def _computes(call):
    made = any(storage.nbytes() for _, storage in call.fresh)
    return made or any(tensor.numel() for tensor in written_args(call.op, call.args, call.kwargs))


class stream:
    def __init__(self, stream):
        self._stream = stream

    def __enter__(self):
        self._before = current_stream()
        set_stream(self._stream)

    def __exit__(self, type, value, traceback):
        set_stream(self._before)


def set_stream(stream):
    machine.current.stream = stream


def current_stream(device=None):
    here = getattr(machine.current, "stream", None) or Stream(key=(0, 0))
    return here if here.key[0] == _index(device) else Stream(key=(_index(device), 0))


def current_device():
    here = getattr(machine.current, "stream", None)
    return here.key[0] if here else 0


def device_count():
    return DEVICES


def is_available():
    return True


def is_current_stream_capturing():
    return current_stream().queue.recording is not None


def graph_pool_handle():
    return (0, next(machine.handles))


def memory_reserved(device=None):
    return sum(graph._work.nbytes for graph in machine.graphs if graph._stream.device.index == _index(device))


def end_allocate_to_pool(device, mempool_id):
    if mempool_id not in machine.routed:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    machine.routed.discard(mempool_id)


def release_pool(device, mempool_id):
    assert machine.uses[mempool_id] > 0, "a pool was released once too often"
    machine.uses[mempool_id] -= 1
    if not machine.uses[mempool_id]:
        machine.gone.add(mempool_id)


EMULATED = (
    *(Stream, Event, XPUGraph, stream, set_stream, current_stream, current_device, device_count, is_available),
    *(is_current_stream_capturing, graph_pool_handle, memory_reserved),
)
"""Each stands for what has its name in torch.xpu."""

EMULATED_IN_C = {"_xpu_endAllocateToPool": end_allocate_to_pool, "_xpu_releasePool": release_pool}


def _waits_for_the_device(*_):
    raise AssertionError("a device-wide wait, which has crashed after replays")


def install(monkeypatch):
    """Puts a fresh machine in the place of torch.xpu; whatever is not emulated finds that there is no XPU."""
    global machine
    machine = Machine()
    for stand_in in EMULATED:
        monkeypatch.setattr(torch.xpu, stand_in.__name__, stand_in)
    for name, function in EMULATED_IN_C.items():
        monkeypatch.setattr(torch._C, name, function)
    for name in ("synchronize", "empty_cache", "graph"):
        monkeypatch.setattr(torch.xpu, name, _waits_for_the_device)
    return machine
