"""Python state that a forward keeps on its module, which a replay would neither read nor write."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from graphreplay.errors import CaptureError
from graphreplay.values import value_token

_MISSING = object()


class StatefulForwardError(CaptureError):
    """The forward keeps Python state between calls."""


@contextmanager
def attributes_kept(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
    """Puts plain attributes of the modules back as they were, and refuses a body that changed one.

    A forward that counts its calls, or keeps its last activation, does so in Python: a replay would skip that, and what
    it stored would be memory of the graph. Weights, buffers and submodules that are bound anew count as well. Setting
    an attribute to the value that it has is no change.

    Args:
        modules: names and modules, as from ``named_modules``.

    Raises:
        StatefulForwardError: the body ran and changed an attribute.
    """
    before = [(name, module.__dict__, dict(module.__dict__)) for name, module in modules]
    values = [value for _, _, old in before for value in old.values()]
    contents = {id(value): (value, items) for value in values if (items := _items(value)) is not None}
    changed = None
    try:
        yield
    finally:
        for name, state, old in before:
            for key in old.keys() | state.keys():
                was, now = old.get(key, _MISSING), state.get(key, _MISSING)
                if not _same(was, now) or (id(now) in contents and not _unchanged(*contents[id(now)])):
                    changed = changed or f"{name}.{key}".lstrip(".")
                if was is _MISSING:
                    del state[key]
                elif was is not now:
                    state[key] = was
        for container, items in contents.values():
            if not _unchanged(container, items):
                container.clear()
                container.update(items) if isinstance(container, dict | set) else container.extend(items)
    if changed:
        raise StatefulForwardError(
            f"the forward changes attribute {changed} of its module, which a replay would not do; "
            "make it a registered buffer and update it in place"
        )


def _same(was: Any, now: Any) -> bool:
    if was is now:
        return True
    if type(was) is tuple and type(now) is tuple:
        return len(was) == len(now) and all(map(_same, was, now))
    token = value_token(was)
    return token is not None and token == value_token(now)


def _items(value: Any) -> list[Any] | None:
    """What a mutable container holds (submodules and weights sit in such), or None for anything else."""
    if isinstance(value, dict):
        return list(value.items())
    return list(value) if isinstance(value, list | set | deque) else None


def _unchanged(container: Any, items: list[Any]) -> bool:
    now = _items(container)
    return now is not None and len(now) == len(items) and all(map(_same, items, now))
