"""Watches one warm-up forward: which outside storages it touches, which it writes, and how to undo the writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from graphreplay.collectives import COLLECTIVES, ForeignCollectiveError, process_groups
from graphreplay.errors import CaptureError, StateLostError
from graphreplay.generators import DefaultGenerators, OwnGenerators, generator_id, generators_among, may_draw
from graphreplay.hostsync import SyncProbe, probe_taken_over
from graphreplay.opmode import OpMode, namespace_of, tensor_args, uncompiled, written_args
from graphreplay.storage import byte_view

_LIFT_FRESH = torch.ops.aten.lift_fresh.default


class Snapshot:
    """The bytes of storages, and the states of generators, at one moment, to be put back later."""

    def __init__(self, tensors: Iterable[Tensor] = (), generators: Iterable[torch.Generator] = ()) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        for tensor in tensors:
            self.add(tensor)
        for generator in generators:
            self.add_generator(generator)

    @property
    def tensors(self) -> list[Tensor]:
        """One tensor for each storage, the first that was added."""
        return list(self._tensors.values())

    @property
    def generators(self) -> list[torch.Generator]:
        return [generator for generator, _ in self._generators.values()]

    def add(self, tensor: Tensor) -> None:
        """Saves the tensor's whole storage, unless it is saved already."""
        storage = tensor.untyped_storage()._cdata
        if storage not in self._saved:
            with torch.inference_mode(False), torch.no_grad():
                live = byte_view(tensor)
                self._saved[storage] = (live, live.clone())
            self._tensors[storage] = tensor

    def add_generator(self, generator: torch.Generator) -> None:
        """Saves the state of a generator, unless it is saved already."""
        if generator_id(generator) not in self._generators:
            self.set_generator(generator, generator.get_state())

    def set_generator(self, generator: torch.Generator, state: Tensor) -> None:
        """Saves this state for a generator, whatever is saved already."""
        self._generators[generator_id(generator)] = (generator, state)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All of each storage as it is now, and as it was, as numbers of the dtype of the tensor in it."""
        for storage, tensor in self._tensors.items():
            live, saved = self._saved[storage]
            whole = live.numel() // tensor.element_size() * tensor.element_size()
            yield live[:whole].view(tensor.dtype), saved[:whole].view(tensor.dtype)

    def restore(self) -> None:
        """Puts all of it back.

        Raises:
            StateLostError: the device refused.
        """
        try:
            self._put_back()
        except Exception as error:
            raise StateLostError(
                f"what the forward wrote in a trial run could not be put back: {type(error).__name__}: {error}; load "
                "the module's state anew"
            ) from error
        except BaseException:  # an interrupt, which must not leave half of it
            self._put_back()
            raise

    def _put_back(self) -> None:
        for generator, state in self._generators.values():
            generator.set_state(state)
        with torch.inference_mode(False), torch.no_grad():
            for live, saved in self._saved.values():
                live.copy_(saved)


class Recorder(OpMode):
    """Records what one forward reads and writes outside itself.

    Args:
        static: storage ids of the static inputs: written or not, they are no business of the snapshot.
        snapshot: receives every other outside storage just before its first write.

    Attributes:
        outside: every tensor that came from outside, by storage id: parameters, buffers, globals.
        written: ids of outside storages (static inputs included) that the forward wrote.
    """

    def __init__(self, static: Iterable[int], snapshot: Snapshot) -> None:
        super().__init__()
        self.outside: dict[int, Tensor] = {}
        self.written: set[int] = set()
        self._static = frozenset(static)
        self._snapshot = snapshot
        # Weak references: holding on to every intermediate would multiply the forward's memory, and a bare id would
        # soon be that of another storage. A weak reference keeps the id from being given out again, not the bytes.
        self._inside: dict[int, StorageWeakRef] = {}

    def on_op(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._before_op(op, args, kwargs, tensor_args(args, kwargs))
        for generator in generators_among(op, args, kwargs):
            self._snapshot.add_generator(generator)
        result = op(*args, **kwargs)
        self._after_op(tensor_args((result,)))
        return result

    def _before_op(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> None:
        if op is _LIFT_FRESH:  # torch.tensor(...) in the forward: a constant of its code
            self._note_inside(args[0])
        for tensor in _with_storage(given):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._inside and storage not in self._static:
                self.outside.setdefault(storage, tensor)
        for tensor in _with_storage(written_args(op, args, kwargs)):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._inside:
                self.written.add(storage)
                if storage not in self._static:
                    self._snapshot.add(tensor)

    def _after_op(self, made: list[Tensor]) -> None:
        for tensor in _with_storage(made):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._static and storage not in self.outside:
                self._note_inside(tensor)

    def _note_inside(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._inside:
            self._inside[storage._cdata] = StorageWeakRef(storage)


class Observer(Recorder):
    """Records, and refuses what no graph of this wrapper can do.

    Args:
        device: where the forward computes.
        static, snapshot: see Recorder.
        generators: those that the forward is known to hold, where the run before left them.
        ranks: those that run the forward's collectives together with this one; None: it may have none.
        why_no_collectives: why it may have none at all.

    Attributes:
        repeatable: the forward left nothing behind but its outputs and static inputs: it wrote no other outside
            storage, drew no random numbers and ran no collective.
    """

    def __init__(
        self,
        device: torch.device,
        static: Iterable[int],
        snapshot: Snapshot,
        *,
        generators: Iterable[torch.Generator] = (),
        ranks: list[int] | None = None,
        why_no_collectives: str | None = None,
    ) -> None:
        super().__init__(static, snapshot)
        self._ranks = ranks
        self._why_no_collectives = why_no_collectives
        self._leaves_more = False
        self._probe: SyncProbe | None = None
        self._default_generators = DefaultGenerators(device)
        self._own_generators = OwnGenerators(device, generators, snapshot.set_generator)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Surrounds the forward, right inside the host-sync probe, if that is to look as well."""
        self._default_generators.begin()
        with uncompiled(), probe_taken_over() as self._probe, self:
            yield
        self._own_generators.end()
        # Random by the states and not by the operators: attention counts as random even where it drops nothing out.
        if self._default_generators.end():
            self._leaves_more = True

    def not_watching(self) -> AbstractContextManager[None]:
        """Surrounds another run of the forward."""
        return self._own_generators.unwatched_run()

    def watching_capture(self) -> AbstractContextManager[None]:
        """Surrounds the run of the forward that a graph is made of. Asked for before the capture begins."""
        return self._own_generators.second_run()

    @property
    def repeatable(self) -> bool:
        return not self._leaves_more and self.written <= self._static

    def on_op(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, generators = tensor_args(args, kwargs), generators_among(op, args, kwargs)
        if self._probe is not None:
            self._probe.before(op, args, kwargs, given)
        self._own_generators.look(generators)
        self._before_op(op, args, kwargs, given)
        namespace = namespace_of(op)
        if namespace in COLLECTIVES:
            self._check_group(op, args, kwargs)
        # Operators of others may do anything, and a generator of the forward's own steps.
        if namespace != "aten" or generators:
            self._leaves_more = True
        draws = may_draw(op, generators)
        if draws:
            self._default_generators.look()
        result = op(*args, **kwargs)
        if draws:
            self._default_generators.note()
            self._own_generators.note(generators)
        made = tensor_args((result,))
        if namespace in COLLECTIVES and any(type(tensor) is not Tensor for tensor in made):
            raise CaptureError(f"{op} makes a tensor subclass, which graphs do not hold; use the in-place collectives")
        if self._probe is not None:
            self._probe.after(op, made)
        self._after_op(made)
        return result

    def _check_group(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses collectives of ranks that do not capture together, before they are issued: every rank does so."""
        if self._why_no_collectives is not None:
            raise ForeignCollectiveError(f"the forward runs collectives: {self._why_no_collectives}")
        if torch.distributed.get_world_size() == 1:
            return
        if self._ranks is None:
            raise ForeignCollectiveError(
                "the forward runs collectives; pass group=, so that its ranks capture together"
            )
        groups = process_groups(args, kwargs)
        if not groups and op is not torch.ops._c10d_functional.wait_tensor.default:
            raise ForeignCollectiveError(f"the forward runs {op}, whose process group cannot be found")
        for group in groups:
            ranks = torch.distributed.get_process_group_ranks(group)
            if not set(ranks) <= set(self._ranks):
                raise ForeignCollectiveError(
                    f"the forward runs collectives on the ranks {ranks}, and the group of its wrapper has "
                    f"{self._ranks}; pass a group of all ranks that it runs on"
                )

    def written_static(self, static: Iterable[Tensor]) -> list[Tensor]:
        """Those of the static inputs that the forward wrote."""
        return [tensor for tensor in static if tensor.untyped_storage()._cdata in self.written]


def _with_storage(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Sparse tensors among a forward's intermediates have none."""
    return [tensor for tensor in tensors if tensor.layout is torch.strided]
