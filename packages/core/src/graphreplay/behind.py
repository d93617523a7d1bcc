"""What a forward holds, or names, and so may read: modules, generators, other forwards that it graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from graphreplay.hooks import BackendHooks

T = TypeVar("T")

_EMPTY_CELL = CellType()
_HOLDERS = (nn.Module, torch.Generator, partial, MethodType, BackendHooks)


def modules_behind(forward: Any) -> list[nn.Module]:
    """The modules whose state a forward reads: itself, the one that it is a method of, the one that it graphs, those
    that a partial, a closure or a default holds, and those that a function names among its globals."""
    return held_behind(forward, nn.Module)


def held_behind(forward: Any, kind: type[T]) -> list[T]:
    """The objects of a kind that a forward is, or holds in the same ways."""
    found: list[T] = []
    seen: set[int] = set()
    pending = [forward]
    while pending:
        obj = pending.pop(0)
        if isinstance(obj, kind):
            found.append(obj)
        elif id(obj) not in seen:  # a closure may hold the very wrapper that graphs it
            seen.add(id(obj))
            pending[:0] = _held_by(obj)
    return found


def _held_by(forward: Any) -> list[Any]:
    if isinstance(forward, BackendHooks):
        return [forward.module]
    if isinstance(forward, partial):
        return [forward.func, *forward.args, *forward.keywords.values()]
    if isinstance(forward, MethodType):
        return [forward.__self__, forward.__func__]
    if not isinstance(forward, FunctionType):
        return []
    cells = [cell.cell_contents for cell in forward.__closure__ or () if cell != _EMPTY_CELL]
    named = [forward.__globals__.get(name) for name in forward.__code__.co_names]
    held = [*cells, *named, *(forward.__defaults__ or ()), *(forward.__kwdefaults__ or {}).values()]
    return [obj for obj in held if isinstance(obj, _HOLDERS)]


def nested(root: nn.Module) -> Iterator[nn.Module]:
    """The modules that graphed forwards among the attributes of a module wrap."""
    for module, key in attributes_of(root.modules(), BackendHooks):
        yield from modules_behind(module.__dict__[key])


def attributes_of(
    modules: Iterable[nn.Module], kinds: type[Any] | tuple[type[Any], ...]
) -> Iterator[tuple[nn.Module, str]]:
    """Where modules hold something of these kinds among their plain attributes: the module and the name."""
    others: set[type[Any]] = set()  # since most modules hold the same few types, each is looked at once
    for module in modules:
        new = set(map(type, module.__dict__.values())) - others
        found = {cls for cls in new if issubclass(cls, kinds)}
        others |= new - found
        if found:
            yield from ((module, key) for key, value in module.__dict__.items() if isinstance(value, kinds))
