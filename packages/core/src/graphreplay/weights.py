"""Has the module changed since its graphs were captured?

A graph reads parameters and buffers by address, and it holds the submodules, hooks and modes that were in force at its
capture. In-place updates of weights show in replays by themselves; everything else here makes graphs stale.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_, methodcaller
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.nn.parameter import is_lazy

from graphreplay.attributes import AttributeSnapshot, Holding, StatefulForwardError
from graphreplay.behind import attributes_of, held_behind, modules_behind, nested
from graphreplay.hooks import BackendHooks
from graphreplay.looks import SightOf, move_back, places_of, sight_of
from graphreplay.storage import is_freed
from graphreplay.tree import TENSOR_TYPES

_MEMBERS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
_GLOBAL_HOOKS = (
    global_hooks._global_forward_hooks,
    global_hooks._global_forward_pre_hooks,
    global_hooks._global_backward_hooks,
)
_STRUCTURE = (
    "weights or submodules",
    "tensors or graphed forwards among its attributes",
    "training modes",
    "hooks",
    "classes or forward methods",
)


class ModuleWatch:
    """Remembers the modules behind a forward as they are now.

    Tensors from elsewhere that a graph reads are added by ``add``. All storages are kept alive, so that a stale graph
    never reads freed memory.
    """

    def __init__(self, forward: Any, sight_of: SightOf = sight_of) -> None:
        self._forward = forward
        self._sight_of = sight_of
        self._is_module = isinstance(forward, nn.Module)
        self._roots = modules_behind(forward)
        roots = [*self._roots, *(module for root in self._roots for module in nested(root))]
        self.modules: list[tuple[str, nn.Module]] = [pair for root in roots for pair in root.named_modules()]
        members = [members for _, m in self.modules for members in (m._parameters, m._buffers, m._modules)]
        hooks = [*_GLOBAL_HOOKS, *(getattr(m, kind) for _, m in self.modules for kind in _HOOKS)]
        self._members, self._hooks = list(filter(None, members)), list(filter(None, hooks))
        self._hook_flags = [m.__dict__.get(kind, ()) for _, m in self.modules for kind in _HOOK_FLAGS]
        self._empty = [held for held in (*members, *hooks) if not held]
        self._bare = [m for _, m in self.modules]
        # Attributes whose graphs are stale once they are bound to something else.
        self._bound = [(m.__dict__, key) for m, key in attributes_of(self._bare, _BOUND)]
        self._states = [m.__dict__ for _, m in self.modules]
        self._structure = self._structure_now()
        self._outline = self._outline_now()
        self._dicts = [*self._states, *self._members, *self._hooks]
        self._ordered = [held for held in self._dicts if isinstance(held, OrderedDict)]
        # Those of a TorchScript module are no dicts.
        self._seeable = all(isinstance(held, dict) for held in (*self._dicts, *self._empty))
        self._lasts: Callable[[], bool] | None = None
        """Whether what a close look has found unchanged is so still."""
        self._orders: list[tuple[Any, ...]] = []
        self._holdings: list[Holding] = []
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._places: list[list[Any]] = places_of([])
        self._storages: list[torch.UntypedStorage] = []
        self._lazy: list[tuple[str, Tensor]] = []
        self.storage_ids: set[int] = set()
        self.refusal: str | None = None
        """Why the modules cannot be watched, and so not be captured, or None."""
        plain: list[tuple[str, Tensor]] = []
        for prefix, m in self.modules:
            for name, tensor in _own_tensors(m):
                path = f"{prefix}.{name}" if prefix else name
                if is_lazy(tensor):
                    self._lazy.append((path, tensor))
                elif not _is_plain(tensor):
                    kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
                    what = f"a {type(tensor).__name__} that is {kind}"
                    self.refusal = f"weight {path} is {what}, whose memory cannot be watched"
                else:
                    plain.append((path, tensor))
        self._add_all(plain)
        for path, tensor in plain:
            if is_freed(tensor):
                self.refusal = f"weight {path} has no memory between calls, so that a graph cannot hold its address"

    def add(self, name: str, tensor: Tensor) -> None:
        """Watches one more tensor."""
        self._add_all([(name, tensor)])

    def _add_all(self, named: Sequence[tuple[str, Tensor]]) -> None:
        tensors = [tensor for _, tensor in named]
        for storage in map(Tensor.untyped_storage, tensors):
            if storage._cdata not in self.storage_ids:
                self.storage_ids.add(storage._cdata)
                self._storages.append(storage)
        self._names += [name for name, _ in named]
        self._tensors += tensors
        self._lasts = None
        for places, values in zip(self._places, places_of(tensors), strict=True):
            places += values

    def hold(self, holdings: Sequence[Holding]) -> None:
        """Watches what is held in containers among the attributes of the modules."""
        known = {(id(held.container), held.key) for held in self._holdings}
        self._holdings += [held for held in holdings if (id(held.container), held.key) not in known]

    @property
    def buffers(self) -> list[Tensor]:
        return [t for _, m in self.modules for t in m._buffers.values() if t is not None and _is_plain(t)]

    def generators(self, attributes: AttributeSnapshot) -> list[torch.Generator]:
        """The random generators among the attributes of the modules, and those that their forwards hold or name."""
        # Most modules share a forward with others of their class, which is looked at once.
        shared = {id(forward): forward for forward in map(_forward_of, self._bare)}
        forwards = [self._forward, *shared.values()]
        held = (found for forward in forwards for found in held_behind(forward, torch.Generator))
        return [*attributes.generators, *held]

    def requires_grad(self) -> bool:
        return any(tensor.requires_grad for tensor in self._tensors)

    def changed(self) -> str | None:
        """What changed since this watch began, or None. Every call asks, so it loops in C where it can."""
        if self.is_untouched():
            return None
        places = places_of(self._tensors)
        if places != self._places:
            rows = zip(self._names, zip(*places, strict=True), zip(*self._places, strict=True), strict=True)
            name = next(name for name, now, was in rows if now != was)
            return f"weight {name} moved to other memory, or has another shape, strides, dtype or requires_grad"
        for name, tensor in self._lazy:
            if not is_lazy(tensor):
                return f"weight {name} was initialized"
        if any(self._empty):
            return "the module has more weights, submodules or hooks than at capture"
        for what, before, outline in zip(_STRUCTURE, self._outline, self._outline_now(), strict=True):
            if before != outline:
                return f"the module has other {what} than at capture"
        now = self._structure_now()
        for what, was, is_now in zip(_STRUCTURE, self._structure, now, strict=True):
            if not _same(was, is_now):
                return f"the module has other {what} than at capture"
        for held in self._holdings:
            if not held.lasts():
                return f"{held.path} of the module is something other than at capture"
        self._lasts, self._orders = self._sight_now(), list(map(tuple, self._ordered))
        return None

    def is_untouched(self) -> bool:
        """Whether nobody has touched any of it since ``changed`` looked closely: a quick answer to most calls. Backends
        may leave out whether weights require gradients, which counts where grad mode is on: see ``requires_grad``."""
        return (
            self._lasts is not None
            and self._lasts()
            and (not self._ordered or list(map(tuple, self._ordered)) == self._orders)  # no part of their versions
            and (not self._holdings or all(map(Holding.lasts, self._holdings)))
            and (self._is_module or _same(modules_behind(self._forward), self._roots))
        )

    def _sight_now(self) -> Callable[[], bool] | None:
        """What a quick answer compares with, if there can be one. What tensors look like depends on modes of the
        thread: those of this call will mostly be those of the next."""
        if not self._seeable or not self._tensors or self._lazy:
            return None
        tensors = list({id(tensor): tensor for tensor in self._tensors}.values())
        return self._sight_of(tensors, self._dicts, self._empty, self._bare)

    @contextmanager
    def kept(self, more: Sequence[Tensor]) -> Iterator[None]:
        """Puts watched tensors, and these, back where they were, and refuses a body that moved one (``x.data = y``).

        Raises:
            StatefulForwardError: the body ran and moved a tensor.
        """
        tensors = [*self._tensors, *more]
        names = [*self._names, *["a kwarg"] * len(more)]
        data, before = list(map(Tensor.detach, tensors)), places_of(tensors)
        moved = []
        try:
            yield
        finally:
            now = places_of(tensors)
            if now != before:
                places = zip(zip(*now, strict=True), zip(*before, strict=True), strict=True)
                moved = [position for position, (place, was) in enumerate(places) if place != was]
                for position in moved:
                    move_back(tensors[position], data[position], [[was[position]] for was in before])
        if moved:
            raise StatefulForwardError(
                f"the forward moves {names[moved[0]]} to other memory or changes how it is seen, which a replay would "
                "not do; update it in place"
            )

    def _structure_now(self) -> tuple[list[Any], ...]:
        """Objects in a fixed order, to be compared by identity: == of tensors would compare values. The watch holds on
        to them, so that no address is reused."""
        return (
            [*modules_behind(self._forward), *self._held(_MEMBERS), *chain.from_iterable(map(_values, self._members))],
            [state.get(key) for state, key in self._bound],
            list(map(_training, self._bare)),
            [*self._held(_HOOKS), *chain.from_iterable(map(_values, self._hooks))],
            [*map(_own_forward, self._states), *map(type, self._bare)],
        )

    def _outline_now(self) -> tuple[Any, ...]:
        """What the objects themselves do not show, in the order of ``_STRUCTURE``: the names of weights and submodules,
        which may trade places, how many attributes are watched, and whose hooks are whose and how they are called."""
        attributes = chain.from_iterable(map(list, map(_values, self._states)))  # lists: other threads may add some
        kinds = Counter(map(type, attributes)).items()
        watched = sum(count for kind, count in kinds if issubclass(kind, _BOUND))
        hooks = list(map(len, chain(self._hooks, self._hook_flags)))
        return list(map(tuple, map(_keys, self._members))), watched, None, hooks, None

    def _held(self, kinds: Sequence[str]) -> list[Any]:
        """The dicts themselves: ``module._forward_hooks = OrderedDict()`` is how many remove hooks."""
        return [state.get(kind) for state in self._states for kind in kinds]


_keys, _values, _own_forward = methodcaller("keys"), methodcaller("values"), methodcaller("get", "forward")
_training = attrgetter("training")


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))


def _forward_of(module: nn.Module) -> Any:
    """The forward of a module, without the module where it is a method of that."""
    forward: Any = module.forward
    return forward.__func__ if isinstance(forward, MethodType) and forward.__self__ is module else forward


def _is_plain(value: Any) -> bool:
    return type(value) in TENSOR_TYPES and value.layout is torch.strided and not value.is_nested


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


_BOUND = (Tensor, BackendHooks)
