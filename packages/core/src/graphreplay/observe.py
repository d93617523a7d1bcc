"""Watches one warm-up forward: which outside storages it touches, and which it writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter

from graphreplay.collectives import COLLECTIVES, ForeignCollectiveError, process_groups
from graphreplay.errors import CaptureError
from graphreplay.generators import DefaultGenerators, OwnGenerators, generators_among, may_draw
from graphreplay.hostsync import SyncProbe, probe_taken_over
from graphreplay.opmode import OpMode, namespace_of, tensor_args, uncompiled, written_args
from graphreplay.places import Places
from graphreplay.plainops import plain_op
from graphreplay.snapshot import Snapshot

_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_STRIDED = torch.strided
"""The layout of tensors that have a storage: sparse ones among a forward's intermediates have none."""

_NO_TENSORS = frozenset(
    {int, float, bool, complex, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""The types of most arguments beside tensors."""


class Recorder(OpMode):
    """Records what one forward reads and writes outside itself.

    Args:
        static: storage ids of the static inputs: written or not, they are no business of the snapshot.
        snapshot: receives every other outside storage just before its first write.
        known: tensors that the forward may move before any operator reads them.
        watched: ids of storages whose tensors are put back elsewhere.

    Attributes:
        outside: every tensor that came from outside, by storage id: parameters, buffers, globals.
        written: ids of outside storages (static inputs included) that the forward wrote.
    """

    def __init__(
        self,
        static: Iterable[int],
        snapshot: Snapshot,
        known: Iterable[Tensor] = (),
        watched: Set[int] = frozenset(),
    ) -> None:
        super().__init__()
        self.outside: dict[int, Tensor] = {}
        self._places = Places(known)
        self._watched = watched
        self.written: set[int] = set()
        self._static = frozenset(static)
        self._snapshot = snapshot
        self._inside = _HeldIds()
        self._known = set(self._static)
        """Ids of all storages that the forward has read or made; static inputs, too."""

    def on_op(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._before_op(op, args, kwargs, tensor_args(args, kwargs))
        for generator in generators_among(op, args, kwargs):
            self._snapshot.add_generator(generator)
        result = op(*args, **kwargs)
        self._after_op(tensor_args((result,)))
        return result

    def _before_op(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> None:
        if op is _LIFT_FRESH:  # torch.tensor(...) in the forward: a constant of its code
            self._note_inside(args[0].untyped_storage())
        for tensor in given:
            if tensor.layout is _STRIDED and (storage := tensor.untyped_storage()._cdata) not in self._known:
                self._note_outside(storage, tensor)
        for tensor in written_args(op, args, kwargs):
            if tensor.layout is _STRIDED:
                storage = tensor.untyped_storage()._cdata
                if storage not in self._inside.ids:
                    self.written.add(storage)
                    if storage not in self._static:
                        self._snapshot.add(tensor)

    def _after_op(self, made: Iterable[Tensor]) -> None:
        for tensor in made:
            if tensor.layout is _STRIDED and (storage := tensor.untyped_storage())._cdata not in self._known:
                self._note_inside(storage)

    def _note_outside(self, storage: int, tensor: Tensor) -> None:
        self._known.add(storage)
        self.outside[storage] = tensor
        if storage not in self._watched:
            self._places.note(tensor)

    def places_kept(self) -> AbstractContextManager[None]:
        """Puts outside tensors back to where they were after its body, a run of the forward.

        Raises:
            StatefulForwardError: the body ran and moved one.
        """
        return self._places.kept()

    def _note_inside(self, storage: torch.UntypedStorage) -> None:
        self._inside.add(storage)
        self._known.add(storage._cdata)


class Observer(Recorder):
    """Records, and refuses what no graph of this wrapper can do.

    Args:
        device: where the forward computes.
        static, snapshot, known, watched: see Recorder.
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
        known: Iterable[Tensor] = (),
        watched: Set[int] = frozenset(),
        generators: Iterable[torch.Generator] = (),
        ranks: list[int] | None = None,
        why_no_collectives: str | None = None,
    ) -> None:
        super().__init__(static, snapshot, known, watched)
        self._ranks = ranks
        self._why_no_collectives = why_no_collectives
        self._leaves_more = False
        self._probe: SyncProbe | None = None
        self._probes_device = False
        """Whether the probe looks for host synchronization of a device other than the CPU."""
        self._default_generators = DefaultGenerators(device)
        self._own_generators = OwnGenerators(device, generators, snapshot.set_generator)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Surrounds the forward, right inside the host-sync probe, if that is to look as well."""
        self._default_generators.begin()
        with uncompiled(), probe_taken_over() as self._probe, self:
            self._probes_device = self._probe is not None and self._probe.device_type != "cpu"
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

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        # Of thousands of operators nearly all come this way, which is as short as it can be.
        plain, before = plain_op(func), len(self.outside)
        if plain is None or not self._only_reads(args):
            return super()._dispatch(func, types, args, kwargs)
        result = func._op(*args, **kwargs) if kwargs else func._op(*args)
        made = (result,) if type(result) is Tensor else tensor_args((result,))
        if self._probe is not None:
            self._probe.after(func, made)
        self._after_op(made)
        if plain.whole and result is args[0] and len(self.outside) == before + 1:
            self._known.remove(self.outside.popitem()[0])  # it had nothing to do, and has read nothing
        is_part = self._composites or (plain.whole and torch.is_inference_mode_enabled())
        return self._as_part(result, args) if is_part else result

    def _only_reads(self, values: Iterable[Any]) -> bool:
        """Notes that a plain operator reads these; False if some of them want a closer look."""
        for value in values:
            cls = type(value)
            if cls is Tensor or cls is Parameter:
                if value.layout is not _STRIDED or (self._probes_device and value.is_cpu and value.dim()):
                    return False
                if (storage := value.untyped_storage()._cdata) not in self._known:
                    self._note_outside(storage, value)
            elif cls is list:
                if not self._only_reads(value):
                    return False
            elif cls not in _NO_TENSORS:
                return False
        return True

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

    def note_outputs(self, outputs: Iterable[Tensor]) -> None:
        """Counts what the forward has returned, though no operator made or read it, as tensors from outside."""
        for tensor in outputs:
            if tensor.layout is _STRIDED and (storage := tensor.untyped_storage()._cdata) not in self._known:
                self._note_outside(storage, tensor)

    def written_static(self, static: Iterable[Tensor]) -> list[Tensor]:
        """Those of the static inputs that the forward wrote."""
        return [tensor for tensor in static if tensor.untyped_storage()._cdata in self.written]


class _HeldIds:
    """Ids of storages, none of which is given to another storage while this object lives.

    Holding on to every intermediate would multiply the forward's memory, and a bare id would soon be that of another
    storage. A weak reference keeps the id, not the bytes. torch has a class for one such reference; an object for each
    intermediate would take longer than all else that is noted about it.
    """

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self._free = torch.UntypedStorage._free_weak_ref  # at exit, torch may be gone before this object

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.ids:
            self.ids.add(storage._weak_ref())  # type: ignore[arg-type]  # a number, whatever torch's types say

    def __del__(self) -> None:
        for storage in self.ids:
            self._free(storage)  # type: ignore[no-untyped-call]


# As OpMode's own, which see.
Observer.__torch_dispatch__ = Observer._dispatch  # type: ignore[method-assign, assignment]
