"""Has the module changed since its graphs were captured?

A graph reads parameters and buffers by address, and it holds the submodules, hooks and modes that were in force at its
capture. In-place updates of weights show in replays by themselves; everything else here makes graphs stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from operator import is_, methodcaller
from types import CellType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.nn.parameter import is_lazy

from graphreplay.tree import TENSOR_TYPES

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    global_hooks._global_forward_hooks,
    global_hooks._global_forward_pre_hooks,
    global_hooks._global_backward_hooks,
)
_STRUCTURE = ("weights or submodules", "training modes", "hooks", "forward methods")


class ModuleWatch:
    """Remembers the modules behind a forward as they are now.

    Tensors from elsewhere that a graph reads are added by ``add``. All storages are kept alive, so that a stale graph
    never reads freed memory.
    """

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self._roots = modules_behind(forward)
        self.modules: list[tuple[str, nn.Module]] = [pair for root in self._roots for pair in root.named_modules()]
        self._members = [members for _, m in self.modules for members in (m._parameters, m._buffers, m._modules)]
        self._hooks = [*_GLOBAL_HOOKS, *(getattr(m, kind) for _, m in self.modules for kind in _HOOKS)]
        self._structure = self._structure_now()
        self._tensors: list[tuple[str, Tensor, _Place]] = []
        self._storages: list[torch.UntypedStorage] = []
        self.storage_ids: set[int] = set()
        self._lazy: list[tuple[str, Tensor]] = []
        self.refusal: str | None = None
        """Why the modules cannot be watched, and so not be captured, or None."""
        for prefix, m in self.modules:
            for name, tensor in _own_tensors(m):
                path = f"{prefix}.{name}" if prefix else name
                if is_lazy(tensor):
                    self._lazy.append((path, tensor))
                elif type(tensor) not in TENSOR_TYPES or tensor.layout is not torch.strided:
                    what = f"a {type(tensor).__name__} of layout {tensor.layout}"
                    self.refusal = f"weight {path} is {what}, whose memory cannot be watched"
                else:
                    self.add(path, tensor)

    def add(self, name: str, tensor: Tensor) -> None:
        """Watches one more tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storage_ids:
            self.storage_ids.add(storage._cdata)
            self._storages.append(storage)
        self._tensors.append((name, tensor, _place(tensor)))

    @property
    def buffers(self) -> list[Tensor]:
        return [t for _, m in self.modules for t in m._buffers.values() if type(t) in TENSOR_TYPES]  # type: ignore[misc]

    def requires_grad(self) -> bool:
        return any(tensor.requires_grad for _, tensor, _ in self._tensors)

    def changed(self) -> str | None:
        """What changed since this watch began, or None. Every call asks, so it loops in C where it can."""
        for name, tensor, place in self._tensors:
            if (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) != place:
                return f"weight {name} moved to other memory, or is seen with another shape, strides or dtype"
        for name, tensor in self._lazy:
            if not is_lazy(tensor):
                return f"weight {name} was initialized"
        now = self._structure_now()
        for what, was, is_now in zip(_STRUCTURE, self._structure, now, strict=True):
            if len(was) != len(is_now) or not all(map(is_, was, is_now)):
                return f"the module has other {what} than at capture"
        return None

    def _structure_now(self) -> tuple[list[Any], ...]:
        """Objects in a fixed order, to be compared by identity: == of tensors would compare values. The watch holds on
        to them, so that no address is reused."""
        return (
            [*modules_behind(self._forward), *chain.from_iterable(map(_values, self._members))],
            [m.training for _, m in self.modules],
            list(chain.from_iterable(map(_values, filter(None, self._hooks)))),
            [m.__dict__.get("forward") for _, m in self.modules],
        )


_values = methodcaller("values")
_Place: TypeAlias = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


def _place(tensor: Tensor) -> _Place:
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def modules_behind(forward: Any) -> list[nn.Module]:
    """The modules whose state a forward reads: itself, the one that it is a method of, those that a partial, a closure
    or a default holds, and those that a function names among its globals."""
    if isinstance(forward, nn.Module):
        return [forward]
    if isinstance(forward, partial):
        held = [forward.func, *forward.args, *forward.keywords.values()]
    elif isinstance(forward, MethodType):
        held = [forward.__self__, forward.__func__]
    elif isinstance(forward, FunctionType):
        cells = [cell.cell_contents for cell in forward.__closure__ or () if cell != _EMPTY_CELL]
        named = [forward.__globals__.get(name) for name in forward.__code__.co_names]
        held = [*cells, *named, *(forward.__defaults__ or ()), *(forward.__kwdefaults__ or {}).values()]
        held = [obj for obj in held if isinstance(obj, nn.Module | partial | MethodType)]
    else:
        return []
    return [module for obj in held for module in modules_behind(obj)]


_EMPTY_CELL = CellType()
