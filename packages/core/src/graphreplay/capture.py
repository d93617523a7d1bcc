"""From a miss to a graph: what every capture does, on any platform."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from graphreplay.attributes import AttributeSnapshot, StatefulForwardError, attributes_kept
from graphreplay.entry import Entry
from graphreplay.errors import CaptureError, GraphReplayError, UnsupportedLeafError
from graphreplay.hostrandom import HostRandom
from graphreplay.observe import Observer, Recorder
from graphreplay.opmode import compiler_is_loaded, where_raised
from graphreplay.request import Request
from graphreplay.snapshot import Snapshot
from graphreplay.state import GraphStore
from graphreplay.static import clone_static
from graphreplay.storage import storage_ids
from graphreplay.together import Alone, Failure
from graphreplay.tree import replace_tensors, tensors
from graphreplay.weights import ModuleWatch

TURN_LIMIT, TURN_LIMIT_AHEAD = 2.0, 30.0
"""Seconds that a capture without peers waits for one of another thread, which may be waiting for this very thread: one
behind a call, which another call can make up for, and one ahead of calls."""

_turn = threading.RLock()
"""Held by a capture without peers: two at once would put back each other's random generators."""


class _Thread(threading.local):
    capturing = False


thread = _Thread()
"""Of the calling thread: whether it is inside the warm-up or capture of some graphed forward."""


class _CollectorHold:
    """Holds off garbage collection while any thread captures; the last one to end puts it back as it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._holders += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._was_enabled:
                gc.enable()

    def let_go(self) -> None:
        """Ends it for all who held it."""
        self._lock = threading.Lock()
        if self._holders and self._was_enabled:
            gc.enable()
        self._holders = 0


collector_hold = _CollectorHold()


def _in_child() -> None:
    """After a fork, when whoever captured is no thread of this process, unless it was the one that forked."""
    global _turn
    if not thread.capturing:
        _turn = threading.RLock()
        collector_hold.let_go()


os.register_at_fork(after_in_child=_in_child)


def capturing_here() -> bool:
    """Whether this thread is inside the warm-up or capture of some graphed forward."""
    return thread.capturing


@contextmanager
def quiet_capture(device: torch.device, *, alone: bool = True, ahead: bool = False) -> Iterator[None]:
    """Keeps the rest of the process out of a capture, and the capture out of the rest of the process.

    Collection is held off, since a graph or tensor freed in the window breaks it; random generators end as they were,
    so that warm-up draws nothing that an eager call would not; the autocast weight cache is off, since it would hand
    memory of one graph to others. All of it is as before afterwards.

    Args:
        alone: whether no other rank waits for this capture, so that it can wait for those of other threads.
        ahead: whether it is made ahead of calls.

    Raises:
        Failure: another thread captures, and goes on to do so.
    """
    if alone and not _turn.acquire(timeout=TURN_LIMIT_AHEAD if ahead else TURN_LIMIT):
        raise Failure("skip", "another thread captures; a later call may be captured")
    caching = torch.is_autocast_cache_enabled()
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type  # without devices it saves the CPU's generator alone
    try:
        with torch.random.fork_rng(devices, device_type=kind), collector_hold:
            thread.capturing = True
            torch.set_autocast_cache_enabled(False)
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(caching)
                thread.capturing = False
    finally:
        if alone:
            _turn.release()


@contextmanager
def body_error_wins(make: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enters ``make()`` for the body. If both the body and the exit raise, the body's error is the one that counts, and
    an exit cannot swallow it."""
    context = make()
    context.__enter__()
    try:
        yield
    except BaseException as error:
        try:
            context.__exit__(type(error), error, error.__traceback__)
        except Exception as exit_error:
            error.add_note(f"and leaving {context!r} raised {type(exit_error).__name__}: {exit_error}")
        raise error
    context.__exit__(None, None, None)


class PhaseError(CaptureError):
    """A capture failed; the message says in which phase, why, and where in the forward."""


class _Phase:
    """Turns an error in its body into a PhaseError. A class, since the frames of a generator would keep the error, and
    with it the wrapper, alive until the next collection."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, UnsupportedLeafError | Failure):
            raise PhaseError(f"{self._name} failed: {describe(error)}") from error


def describe(error: Exception) -> str:
    """An error as a reason: errors of this package speak for themselves, others say where they were raised."""
    if isinstance(error, GraphReplayError):
        return str(error)
    summary = str(error).partition("\n")[0]  # CUDA errors go on with pages of general advice
    return f"{type(error).__name__}: {summary} (raised at {where_raised(error)})"


def rehearse(store: GraphStore, request: Request, watch: ModuleWatch, ranks: Alone) -> None:
    """The eager forward of a call that is not made: lazy initialization stays, everything else is undone.

    Raises:
        Failure: the kwargs cannot be copied, on this rank or another, the other ranks do not come along, or another
            thread captures.
        Exception: whatever the forward itself raises.
    """
    before, failure = Snapshot(watch.buffers), None
    try:
        kwargs = clone_static(request.kwargs)
    except UnsupportedLeafError as error:
        failure = Failure("refuse", str(error))
    failure = ranks.agree(failure)
    if failure is not None:
        raise failure
    attributes = AttributeSnapshot(watch.modules)
    observer, host_random = _observer(store, kwargs, watch, attributes, before), HostRandom(store.device)
    compiler_was_loaded = compiler_is_loaded()
    try:
        quiet = quiet_capture(store.device, alone=ranks.alone, ahead=True)
        with quiet, watch.kept(()), observer.watching(), host_random.watched():
            store.module(**kwargs)
    except Failure:
        raise
    except CaptureError:
        pass  # the capture will say so
    except Exception:
        # A higher-order operator has just loaded the compiler, which cannot trace the observer, and would not try such
        # an operator again. Nothing else has been compiled yet. The capture, which holds it off, names the operator.
        if compiler_was_loaded or not compiler_is_loaded():
            raise
        torch._dynamo.reset()
    finally:
        host_random.put_back()
        before.restore()


def _observer(
    store: GraphStore, kwargs: Any, watch: ModuleWatch, attributes: AttributeSnapshot, snapshot: Snapshot
) -> Observer:
    return Observer(
        store.device,
        storage_ids(tensors(kwargs)),
        snapshot,
        known=attributes.tensors,
        watched=watch.storage_ids,
        generators=watch.generators(attributes),
        ranks=store.peers.ranks,
        why_no_collectives=store.why_no_collectives,
    )


def warm_ups(store: GraphStore, request: Request) -> int:
    """How many forwards come before the capture of a request. The first one is observed, and runs no compiled code; so
    one more has to run as the capture will, where the call's own has not done so."""
    return store.warmup_iters + request.ahead


def build_entry(store: GraphStore, request: Request, watch: ModuleWatch, ranks: Alone) -> Entry:
    """Clones the inputs, warms up, and captures: everything between a miss and a graph.

    The first warm-up runs under the platform's host-sync probe and an observer, which sees what the forward touches and
    saves what it is about to write; the later ones run as the capture will. Whatever happens, buffers end as they were.

    Raises:
        Failure: the other ranks do not come along.
        UnsupportedLeafError: these inputs or outputs cannot be graphed; others may be.
        PhaseError: anything else, with the phase in which it happened.
    """
    with _Phase("clone"):
        try:
            static = clone_static(request.kwargs)
        except NotImplementedError as error:  # a dtype that torch can hold and not copy
            raise UnsupportedLeafError("kwargs", str(error)) from error
    given = tensors(static)
    # CPU scalars are in the key by value: the graph may freeze them, and nothing is staged into them.
    inputs = [leaf for leaf in given if leaf.device == store.device]
    before = Snapshot(watch.buffers)
    host_random = HostRandom(store.device)

    def check_containers(kwargs: Any) -> None:
        if store._flatten(kwargs)[0] != request.key.signature or any(
            a is not b for a, b in zip(tensors(kwargs), given, strict=True)
        ):
            raise UnsupportedLeafError(
                "kwargs", "the forward changes the structure of what it was given: a container, or a shape; pass a copy"
            )

    def forward() -> Any:
        # Containers of its own for each run, so that one that changes them changes them once.
        kwargs = replace_tensors(static, iter(given))
        with host_random.watched():
            outputs = store.module(**kwargs)
        check_containers(kwargs)
        return outputs

    check_containers(static)  # the caller's own, as the eager forward left them
    ranks.begin()
    try:
        # No ExitStack here: its frame would keep an error of these contexts, and that the wrapper, until a collection.
        with body_error_wins(store._capture_context):
            attributes = AttributeSnapshot(watch.modules)  # which the context may have changed
            observer = _observer(store, static, watch, attributes, before)

            @contextmanager
            def kept() -> Iterator[None]:
                # Around each run: what changes and comes back, as two buffers in turn do, looks kept behind several.
                with attributes_kept(attributes), watch.kept(given), observer.places_kept():
                    yield

            with store._warmup_stream():
                first = "warm-up 1 under the host-sync probe"
                with kept(), _Phase(first):
                    with store._sync_probe(), ranks.forward(first), observer.watching():
                        outputs = forward()
                    observer.note_outputs(tensors(outputs, "output"))
                    del outputs
                for iteration in range(1, warm_ups(store, request)):
                    again = f"warm-up {iteration + 1}"
                    with kept(), _Phase(again), ranks.forward(again), observer.not_watching():
                        forward()
            ranks.warmed_up()
            with kept(), _Phase("capture"), ranks.forward("capture") if store.captures_run else nullcontext():
                watching = observer.watching_capture()

                def captured() -> Any:
                    with watching:
                        return forward()

                graph, outputs = store._capture_graph(captured)
    except Exception as error:
        if not ranks.alone:
            attributes = AttributeSnapshot(watch.modules)
            recorder = Recorder(storage_ids(given), before, attributes.tensors, watch.storage_ids)
            with (
                suppress(StatefulForwardError),
                attributes_kept(attributes),
                watch.kept(given),
                recorder.places_kept(),
                store._warmup_stream(),
                recorder,
            ):
                ranks.settle(error, lambda: store.module(**replace_tensors(static, iter(given))))
        raise
    finally:
        host_random.put_back()
        before.restore()
    try:
        host_random.check()
        _check_sources(observer.outside, watch)
        output_leaves = tensors(outputs, "output")
        touched = (*observer.outside.values(), *observer.written_static(given), *output_leaves)
        _check_devices(touched, store.device)
        made = [t for t in (*given, *output_leaves) if t.untyped_storage()._cdata not in watch.storage_ids]
        if any(tensor.requires_grad for tensor in made):
            raise UnsupportedLeafError("forward", "it turns gradients on, which a graph would lose")
        written = [position for position, storage in enumerate(storage_ids(inputs)) if storage in observer.written]
        with _Phase("staging"):
            entry = Entry(
                request.key,
                graph,
                inputs,
                written,
                (before.tensors, before.generators),
                observer.repeatable,
                outputs,
                output_leaves,
                request.options.keep_alive,
                clone_outputs=store.clone_outputs,
            )
    except BaseException:
        graph.reset()
        raise
    elsewhere = {storage: tensor for storage, tensor in observer.outside.items() if storage not in watch.storage_ids}
    for tensor in elsewhere.values():
        watch.add(f"of shape {tuple(tensor.shape)} from outside the module", tensor)
    if elsewhere:
        watch.hold(attributes.holdings(elsewhere.keys()))
    return entry


def _check_sources(outside: dict[int, Tensor], watch: ModuleWatch) -> None:
    """Refuses a forward that reads what a graph can neither watch nor make again."""
    for storage in outside.keys() - watch.storage_ids:
        tensor = outside[storage]
        what = f"it reads or returns a tensor of shape {tuple(tensor.shape)} "
        if isinstance(tensor, Parameter):
            what += "that is a weight of a module which cannot be found from it; wrap the module itself"
            raise UnsupportedLeafError("forward", what)
        if sys.getrefcount(tensor) <= _OURS:  # so nobody holds it who outlives the forward
            what += "that no torch operator of this thread made (but another thread, NumPy, a list of values)"
            raise UnsupportedLeafError("forward", what)


def _references_of_ours() -> int:
    """How many references to a tensor that nobody else holds the loop above sees; interpreters differ."""
    outside = {0: object()}
    for storage in outside:
        tensor = outside[storage]
    return sys.getrefcount(tensor)


_OURS = _references_of_ours()


def _check_devices(touched: Iterable[Tensor], device: torch.device) -> None:
    for tensor in touched:
        if tensor.device != device:
            raise UnsupportedLeafError(
                "forward",
                f"it uses, writes or returns a tensor of shape {tuple(tensor.shape)} on {tensor.device}, and the graphs"
                f" are on {device}; move it there",
            )
