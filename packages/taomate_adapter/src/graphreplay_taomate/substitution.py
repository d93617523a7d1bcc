"""Puts this package's names in the place of those that a module of TaoMate has, and takes them out again."""

from __future__ import annotations

import sys
from importlib import import_module
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
_installed: dict[int, tuple[Any, dict[str, Any]]] = {}
"""By the id of the target: the target, and what its own names were bound to."""


def install(target: ModuleType | str | Any) -> tuple[str, ...]:
    """Binds those names of a module that this package has as well to this package's; others are not added.

    Installing again changes nothing, unless names were bound anew meanwhile: those are bound to this package's again,
    and ``uninstall`` still restores what was there at first.

    Args:
        target: a module, the import name of one, or another object with such attributes, as the platform object whose
            ``get_graphed_forward_cls`` is asked. What other modules have imported from it by name stays as it is:
            install into those that call.

    Returns:
        The names that are bound to this package's now.

    Raises:
        ConfigurationError: the target has none of the names.
        ImportError: there is no module of that name.
    """
    if isinstance(target, str):
        target = import_module(target)
    names = tuple(name for name in SUBSTITUTES if hasattr(target, name))
    if not names:
        raise graphreplay.ConfigurationError(f"{target!r} has none of the names {', '.join(SUBSTITUTES)}")
    _, originals = _installed.setdefault(id(target), (target, {}))
    for name in names:
        originals.setdefault(name, vars(target).get(name, _INHERITED))
        setattr(target, name, SUBSTITUTES[name])
    return names


def uninstall(target: ModuleType | str | Any) -> tuple[str, ...]:
    """Binds the names of a target to what they were bound to before ``install``; does nothing where it was not called.

    Returns:
        The names that were restored.
    """
    if isinstance(target, str):
        target = sys.modules.get(target)
    _, originals = _installed.pop(id(target), (target, {}))
    for name, original in originals.items():
        if original is not _INHERITED:
            setattr(target, name, original)
        elif name in vars(target):
            delattr(target, name)
    return tuple(originals)
