"""Has the module changed since its graphs were captured?

A graph reads parameters and buffers by address, and it holds the submodules, hooks and modes that were in force at its
capture. In-place updates of weights show in replays by themselves; everything else here makes graphs stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from graphreplay.errors import CaptureError
from graphreplay.tree import TENSOR_TYPES

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    global_hooks._global_forward_hooks,
    global_hooks._global_forward_pre_hooks,
    global_hooks._global_backward_hooks,
)
_STRUCTURE = ("weights or submodules", "training modes", "hooks", "forward methods")


class ModuleWatch:
    """Remembers one module tree as it is now (or nothing, for a plain callable).

    Tensors from elsewhere that a graph reads are added by ``add``. All storages are kept alive, so that a stale graph
    never reads freed memory.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._modules: list[tuple[str, nn.Module]] = [] if module is None else list(module.named_modules())
        self._states = [m.__dict__ for _, m in self._modules]
        self._members = [state[kind] for state in self._states for kind in ("_parameters", "_buffers", "_modules")]
        self._hooks = [*_GLOBAL_HOOKS, *(state[kind] for state in self._states for kind in _HOOKS)]
        self._structure = self._structure_now()
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._storages: list[torch.UntypedStorage] = []
        self.storage_ids: set[int] = set()
        self._odd: list[tuple[str, Tensor]] = []
        for prefix, m in self._modules:
            for name, tensor in _own_tensors(m):
                path = f"{prefix}.{name}" if prefix else name
                if _is_odd(tensor):
                    self._odd.append((path, tensor))
                else:
                    self.add(path, tensor)

    @property
    def refusal(self) -> str | None:
        """Why the module cannot be watched, and so not be captured, or None. Lazy weights are odd until a forward
        initializes them."""
        name, tensor = next(((n, t) for n, t in self._odd if _is_odd(t)), ("", None))
        if tensor is None:
            return None
        return f"weight {name} is a {type(tensor).__name__} of layout {tensor.layout}, whose memory cannot be watched"

    def add(self, name: str, tensor: Tensor) -> None:
        """Watches one more tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storage_ids:
            self.storage_ids.add(storage._cdata)
            self._storages.append(storage)
        self._tensors.append((name, tensor, tensor.data_ptr()))

    @property
    def buffers(self) -> list[Tensor]:
        return [t for _, m in self._modules for t in m._buffers.values() if type(t) in TENSOR_TYPES]  # type: ignore[misc]

    def requires_grad(self) -> bool:
        return any(tensor.requires_grad for _, tensor, _ in self._tensors)

    def changed(self) -> str | None:
        """What changed since this watch began, or None. Every call asks, so it loops in C where it can."""
        for name, tensor, address in self._tensors:
            if tensor.data_ptr() != address:
                return f"weight {name} moved to other memory"
        if self._odd:
            return f"weight {self._odd[0][0]} was initialized"
        now = self._structure_now()
        for what, was, is_now in zip(_STRUCTURE, self._structure, now, strict=True):
            if len(was) != len(is_now) or not all(map(is_, was, is_now)):
                return f"the module has other {what} than at capture"
        return None

    def _structure_now(self) -> tuple[list[Any], ...]:
        """Objects in a fixed order, to be compared by identity: == of tensors would compare values. The watch holds on
        to them, so that no address is reused."""
        return (
            list(chain.from_iterable(map(dict.values, self._members))),
            [state["training"] for state in self._states],
            list(chain.from_iterable(map(dict.values, filter(None, self._hooks)))),
            [state.get("forward") for state in self._states],
        )

    @contextmanager
    def attributes_kept(self) -> Iterator[None]:
        """Puts plain attributes of the modules back as they were, and refuses a body that changed one.

        A forward that counts its calls, or keeps its last activation, does so in Python: a replay would skip that, and
        what it stored would be memory of the graph.

        Raises:
            StatefulForwardError: the body ran and changed an attribute.
        """
        before = [(name, m.__dict__, dict(m.__dict__)) for name, m in self._modules]
        contents = {id(v): (v, _contents(v)) for _, _, old in before for v in old.values() if _contents(v)}
        changed = None
        try:
            yield
        finally:
            for name, state, old in before:
                for key in old.keys() | state.keys():
                    value = state.get(key, _MISSING)
                    if value is not old.get(key, _MISSING) or _differs(contents.get(id(value))):
                        changed = changed or f"{name}.{key}".lstrip(".")
                        state.pop(key, None)
                if changed:
                    state.update(old)
            for container, was in contents.values():
                if _differs((container, was)):
                    container.clear()
                    container.update(was) if isinstance(container, dict) else container.extend(was)
        if changed:
            raise StatefulForwardError(
                f"the forward changes attribute {changed} of its module, which a replay would not do; "
                "make it a registered buffer and update it in place"
            )


class StatefulForwardError(CaptureError):
    """The forward keeps Python state between calls."""


_MISSING = object()


def _contents(value: Any) -> Any:
    """A shallow copy of a dict or list (weights and submodules are held in such), or None."""
    return value.copy() if isinstance(value, dict | list) else None


def _differs(kept: tuple[Any, Any] | None) -> bool:
    """Whether a dict or list holds other objects than when it was copied."""
    if kept is None:
        return False
    now, was = ([*v.keys(), *v.values()] if isinstance(v, dict) else v for v in kept)
    return len(now) != len(was) or any(a is not b for a, b in zip(now, was, strict=True))


def _is_odd(tensor: Tensor) -> bool:
    return type(tensor) not in TENSOR_TYPES or tensor.layout is not torch.strided


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def module_behind(forward: Callable[..., Any]) -> nn.Module | None:
    """The module whose state a forward reads: itself, or the one that it is a method of."""
    owner = forward if isinstance(forward, nn.Module) else getattr(forward, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
