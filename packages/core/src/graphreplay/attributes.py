"""Python state that a forward keeps on its module, which a replay would neither read nor write."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from itertools import repeat
from operator import is_
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from graphreplay.errors import CaptureError
from graphreplay.hooks import BackendHooks
from graphreplay.looks import dict_version
from graphreplay.tree import TENSOR_TYPES
from graphreplay.values import value_token

MAX_CONTAINERS = 20_000
"""How many containers and objects a snapshot looks into."""

_MISSING = object()
_OPAQUE = (nn.Module, BackendHooks, Tensor, type, ModuleType, FunctionType, MethodType, Enum, torch.Generator)
_LEAVES = frozenset({bool, int, float, str, NoneType, Tensor, nn.Parameter, FunctionType})
"""The types of most attributes; nothing is inside."""
_CONTAINERS = frozenset({dict, OrderedDict, list, set, deque})
"""The types of most containers."""


class StatefulForwardError(CaptureError):
    """The forward keeps Python state between calls."""


class Holding(NamedTuple):
    """Where something is held: under a key of a dict, at a position of a list, or somewhere in a set."""

    path: str
    container: Any
    key: Any
    value: Any

    def lasts(self) -> bool:
        """Whether it is still held there."""
        container = self.container
        if isinstance(container, dict):
            return container.get(self.key, _MISSING) is self.value
        if isinstance(container, set):
            return any(item is self.value for item in container)
        return self.key < len(container) and container[self.key] is self.value


_Place: TypeAlias = str | tuple[Any, Any]
"""Where a container is: the name of a module, whose attributes it holds; or the place of another, and a key of that. As
the path is rarely asked for, most are never written out."""


_Kept: TypeAlias = tuple[_Place, Any, Any, int | None]
"""A container, where it is, a copy of it, and its version if it holds the attributes of a module."""


class AttributeSnapshot:
    """The attributes of modules as they are now, with the containers and plain objects that they reach.

    Args:
        modules: names and modules, as from ``named_modules``.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.generators: list[torch.Generator] = []
        """The random generators in them."""
        self.tensors: list[Tensor] = []
        """The plain tensors in them, weights and buffers of modules excepted."""
        self._kept: list[_Kept] = []
        self._empty: list[Any] = []
        """Those with nothing in them, as most of a module's are, so that one look at all of them is enough."""
        seen: set[int] = set()
        pending: list[tuple[_Place, Any]] = [(name, module.__dict__) for name, module in modules]
        for place, container in pending:  # which grows meanwhile
            if id(container) in seen:
                continue
            if len(self._kept) >= MAX_CONTAINERS:
                break
            seen.add(id(container))
            version = dict_version(container) if isinstance(place, str) else None
            was = container.copy()
            self._kept.append((place, container, was, version))
            for key, value in _items(was):
                cls = type(value)
                if cls in _LEAVES:
                    if cls is Tensor and not (type(place) is tuple and place[1] == "_buffers"):
                        self.tensors.append(value)
                    continue
                if cls in _CONTAINERS:
                    if value:
                        pending.append(((place, key), value))
                    else:
                        self._empty.append(value)
                elif cls is torch.Generator:
                    self.generators.append(value)
                elif not isinstance(value, nn.Module):
                    pending += [((place, key), inner) for inner in _inside(value)]

    def touched(self) -> list[tuple[str, Any, Any]]:
        """The containers that hold other objects than they did: their paths, they, and what they held."""
        found: list[tuple[str, Any, Any]] = []
        if any(self._empty):
            filled = (held for held in self._empty if held)
            found += [(self._path_of(held), held, {} if isinstance(held, dict) else ()) for held in filled]
        for place, container, was, version in self._kept:
            if (version is None or dict_version(container) != version) and not _untouched(container, was):
                found.append((_path(place), container, was))
        return found

    def _path_of(self, value: Any) -> str:
        """The path of something that is kept."""
        places = ((place, key) for place, _, was, _ in self._kept for key, held in _items(was) if held is value)
        return _path(next(places))

    def holdings(self, storages: Set[int]) -> list[Holding]:
        """Where tensors over these storages are held, and what leads there from the modules."""
        found: dict[tuple[int, Any], Holding] = {}
        on_the_way: set[int] = set()
        count = -1
        while count < len(on_the_way):
            count = len(on_the_way)
            for place, container, was, _ in self._kept:
                for key, value in was.items() if isinstance(was, dict) else enumerate(was):
                    if _leads(value, storages, on_the_way):
                        held = Holding(_path((place, key)), container, key, value)
                        found.setdefault((id(container), key), held)
                        on_the_way.add(id(container))
        return list(found.values())

    def restore(self) -> None:
        """Puts everything back as it was."""
        for _, container, was in self.touched():
            if isinstance(container, dict):
                # Key by key: another thread that reads an attribute meanwhile must find it.
                for key in container.keys() - was.keys():
                    del container[key]
                for key, value in was.items():
                    if container.get(key, _MISSING) is not value:
                        container[key] = value
                if isinstance(container, OrderedDict) and list(container) != list(was):
                    for key in was:
                        container.move_to_end(key)
            else:
                container.clear()
                container.update(was) if isinstance(container, set) else container.extend(was)

    def changed(self) -> str | None:
        """The path of an attribute that is not as it was, or None. Setting one to the value it has is no change."""
        for path, container, was in self.touched():
            if isinstance(container, dict):
                for key in was.keys() | container.keys():
                    if not _same(was.get(key, _MISSING), container.get(key, _MISSING)):
                        return f"{path}.{key}".strip(".")
                if isinstance(container, OrderedDict) and list(container) != list(was):
                    return path
            elif isinstance(container, set):
                if container != was:
                    return path
            elif len(container) != len(was) or not all(map(_same, container, was)):
                return path
        return None


@contextmanager
def attributes_kept(before: AttributeSnapshot) -> Iterator[None]:
    """Puts attributes back as they were, and refuses a body that changed one.

    A forward that counts its calls, or keeps its last activation, does so in Python: a replay would skip that, and what
    it stored would be memory of the graph. Weights, buffers and submodules that are bound anew count as well.

    Raises:
        StatefulForwardError: the body ran and changed an attribute.
    """
    try:
        yield
        changed = before.changed()
    finally:
        before.restore()
    if changed is not None:
        raise StatefulForwardError(
            f"the forward changes attribute {changed} of its module, which a replay would not do; "
            "make it a registered buffer and update it in place"
        )


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else zip(repeat(""), container)


def _path(place: _Place) -> str:
    return place if isinstance(place, str) else f"{_path(place[0])}.{place[1]}".strip(".")


def _untouched(container: Any, was: Any) -> bool:
    """Whether it holds the same objects in the same order."""
    if isinstance(container, set):  # which has no order: a copy may come in another one
        return set(map(id, container)) == set(map(id, was))
    same = len(container) == len(was) and all(map(is_, container, was))
    return same and (not isinstance(container, dict) or all(map(is_, container.values(), was.values())))


def _leads(value: Any, storages: Set[int], containers: Set[int]) -> bool:
    """Whether a value is a tensor over one of the storages, or has such a tensor or one of the containers inside."""
    if isinstance(value, Tensor):
        return type(value) in TENSOR_TYPES and value.untyped_storage()._cdata in storages
    if isinstance(value, tuple) and any(_leads(item, storages, containers) for item in value):
        return True
    return type(value) not in _LEAVES and any(id(inner) in containers for inner in _inside(value))


def _inside(value: Any) -> Iterator[Any]:
    """The mutable container that a value is, or has its attributes in."""
    if isinstance(value, dict | list | set | deque):
        yield value
    elif isinstance(value, tuple):
        yield from (inner for item in value for inner in _inside(item))
    elif not isinstance(value, _OPAQUE) and type(getattr(value, "__dict__", None)) is dict:
        yield value.__dict__


def _same(was: Any, now: Any) -> bool:
    if was is now:
        return True
    if type(was) is tuple and type(now) is tuple:
        return len(was) == len(now) and all(map(_same, was, now))
    token = value_token(was)
    return token is not None and token == value_token(now)
