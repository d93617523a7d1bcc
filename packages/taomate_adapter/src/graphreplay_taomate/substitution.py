"""Puts this package's names in the place of those that a module of TaoMate has, and takes them out again."""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import isfunction
from types import ModuleType
from typing import Any

import graphreplay
from graphreplay_taomate.forward import GraphedForward, get_graphed_forward_cls

SUBSTITUTES: dict[str, Any] = {
    "GraphedForward": GraphedForward,
    "clone_static": graphreplay.clone_static,
    "copy_into": graphreplay.copy_into,
    "get_graphed_forward_cls": get_graphed_forward_cls,
    "kwargs_signature": graphreplay.kwargs_signature,
}

_INHERITED = object()
_installed: dict[int, tuple[Any, dict[str, tuple[Any, Any]]]] = {}
"""By the id of the target: the target, and for each name what it was bound to, and what this package bound it to."""


def install(target: ModuleType | str | Any) -> tuple[str, ...]:
    """Binds those names of a module that this package has as well to this package's; others are not added.

    Installing again changes nothing, unless names were bound anew meanwhile: those are bound to this package's again,
    and ``uninstall`` still restores what was there at first.

    Args:
        target: a module, the import name of one, or another object with such attributes, as the platform object whose
            ``get_graphed_forward_cls`` is asked, or its class. What other modules have imported from it by name stays
            as it is: install into those that call.

    Returns:
        The names that are bound to this package's now.

    Raises:
        ConfigurationError: the target has none of the names, or does not let one of them be bound, and is as before;
            or it is graphreplay itself.
        ImportError: there is no module of that name.
    """
    if isinstance(target, str):
        target = import_module(target)
    if isinstance(target, ModuleType) and target.__name__.partition(".")[0] == graphreplay.__name__:
        raise graphreplay.ConfigurationError(f"{target!r} is what this package builds on; install into its callers")
    names = tuple(name for name in SUBSTITUTES if hasattr(target, name))
    if not names:
        raise graphreplay.ConfigurationError(f"{target!r} has none of the names {', '.join(SUBSTITUTES)}")
    _, known = _installed.get(id(target), (target, {}))
    bound, before = dict(known), {}
    try:
        for name in names:
            was = _own(target, name)
            original, ours = known.get(name, (was, _substitute(target, name)))
            _bind(target, name, ours)
            bound[name], before[name] = (original, ours), was
    except Exception as error:
        for name, was in before.items():
            _restore(target, name, was)
        raise graphreplay.ConfigurationError(f"the names of {target!r} cannot be bound: {error}") from error
    _installed[id(target)] = target, bound
    return names


def uninstall(target: ModuleType | str | Any) -> tuple[str, ...]:
    """Binds the names of a target to what they were bound to before ``install``; does nothing where it was not called.

    Names that someone else has bound or deleted since then stay as they are. A module may be named also after it has
    left ``sys.modules``.

    Returns:
        The names that were restored.
    """
    targets = [target]
    if isinstance(target, str):
        modules = [known for known, _ in _installed.values() if isinstance(known, ModuleType)]
        targets = [known for known in modules if known is sys.modules.get(target) or known.__name__ == target]
    restored: dict[str, None] = {}
    for known in targets:
        _, bound = _installed.pop(id(known), (known, {}))
        for name, (original, ours) in bound.items():
            if _own(known, name) is ours:
                _restore(known, name, original)
                restored[name] = None
    return tuple(restored)


def _substitute(target: Any, name: str) -> Any:
    substitute = SUBSTITUTES[name]
    # In a class a function would become a method of its instances.
    return staticmethod(substitute) if isinstance(target, type) and isfunction(substitute) else substitute


def _own(target: Any, name: str) -> Any:
    """What a target's own name is bound to, or _INHERITED."""
    return getattr(target, "__dict__", {}).get(name, _INHERITED)


def _bind(target: Any, name: str, value: Any) -> None:
    """Raises whatever the target raises, or TypeError where the name is kept elsewhere than in its ``__dict__``, so
    that it could not be told whose it is."""
    before = getattr(target, name)
    setattr(target, name, value)
    if _own(target, name) is not value:
        setattr(target, name, before)
        raise TypeError(f"{name} is a slot or a property")


def _restore(target: Any, name: str, original: Any) -> None:
    if original is not _INHERITED:
        setattr(target, name, original)
    elif _own(target, name) is not _INHERITED:
        delattr(target, name)
