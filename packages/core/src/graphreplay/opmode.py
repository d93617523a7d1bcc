"""A dispatch mode that sees the operators a forward runs, one level below the composite ones."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from types import FrameType, MappingProxyType, TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKey, _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from graphreplay.collectives import written_by_collective
from graphreplay.errors import CaptureError

_LIBRARIES = frozenset(
    {"torch", "graphreplay", "graphreplay_cuda", "graphreplay_xpu", "graphreplay_taomate", "contextlib"}
)
"""Modules whose frames are no place in a user's forward."""

Fact = TypeVar("Fact")

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def per_op(fact: Callable[[OpOverload], Fact]) -> Callable[[OpOverload], Fact]:
    """Remembers a fact about each operator: as ``functools.cache``, which would hash the operator in Python."""
    known: dict[int, tuple[OpOverload, Fact]] = {}  # with the operator, so that no other one gets its id

    @wraps(fact)
    def remembered(op: OpOverload) -> Fact:
        found = known.get(id(op))
        if found is None:
            found = known[id(op)] = op, fact(op)
        return found[1]

    return remembered


class OpMode(TorchDispatchMode, ABC):
    """Hands every operator of the calling thread to ``on_op``.

    Under inference mode composite operators arrive whole, hiding the views, writes and synchronizations inside them.
    Their C++ kernel, which would run anyway, is run under this mode instead, so that its parts arrive one by one.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._composites: list[OpOverload] = []  # those that the current operator is part of, the outermost first

    @abstractmethod
    def on_op(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the operator and returns its result."""

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            raise CaptureError(f"higher-order operator {func} at {where_now()} runs a body that cannot be observed")
        if torch.is_inference_mode_enabled() and is_composite(func):
            self._composites.append(func)
            _push_on_torch_dispatch_stack(self)  # all that ``with self`` does within itself, in a third of the time
            try:
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
            finally:
                _pop_torch_dispatch_stack(None)
                self._composites.pop()
        result = self.on_op(func, args, kwargs)
        return self._as_part(result, args) if self._composites else result

    def _as_part(self, result: Any, args: tuple[Any, ...]) -> Any:
        """The result of an operator that is composite, or part of one."""
        if _is_weight_view(result, args):
            # Without a mode a view of a weight requires grad here too, and matmul picks its kernel by that.
            result.requires_grad_()
        return result


# Not in the class body: torch would wrap it there, and import torch._dynamo at the first operator. That takes a second
# of someone's first capture, and keeps frames alive that hold the wrapper. No frame is compiled under a mode anyway.
OpMode.__torch_dispatch__ = OpMode._dispatch  # type: ignore[method-assign, assignment]


def _is_weight_view(result: Any, args: tuple[Any, ...]) -> bool:
    if not (args and isinstance(result, Tensor) and isinstance(args[0], Tensor) and args[0].requires_grad):
        return False
    fresh = not result.requires_grad and not result.is_inference()
    return fresh and result.untyped_storage()._cdata == args[0].untyped_storage()._cdata


def compiler_is_loaded() -> bool:
    """Whether anything can have been compiled; importing torch._dynamo to ask would take a second."""
    return "torch._dynamo" in sys.modules


def uncompiled() -> AbstractContextManager[Any]:
    """Runs torch.compile'd code in its body plainly: dynamo cannot compile under a mode, and would give up on the frame
    for good."""
    if not compiler_is_loaded():
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@per_op
def is_composite(op: OpOverload) -> bool:
    """Whether the operator is made of others on every device, by one C++ kernel."""

    def has(key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)

    backends = ("CPU", "CUDA", "XPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return has("CompositeImplicitAutograd") and not any(map(has, backends))


def tensor_args(args: Iterable[Any], kwargs: Mapping[str, Any] = _NOTHING) -> list[Tensor]:
    """The tensors among an operator's arguments, lists of tensors included."""
    # Each operator of an observed forward comes by several times, so this is no walk over trees of any kind.
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensor_args(value)
        elif isinstance(value, dict):
            found += tensor_args(value.values())
    return found


@dataclass(frozen=True, slots=True)
class _Schema:
    """What an operator is called, and where its arguments are."""

    namespace: str
    positions: dict[str, int]
    written: tuple[str, ...]
    """Those that it writes."""
    defaults: dict[str, Any]

    @classmethod
    def of(cls, op: OpOverload) -> _Schema:
        arguments = op._schema.arguments
        written = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
        positions = {argument.name: position for position, argument in enumerate(arguments)}
        defaults = {argument.name: argument.default_value for argument in arguments}
        return cls(op.namespace, positions, tuple(written), defaults)


_schema = per_op(_Schema.of)


def namespace_of(op: OpOverload) -> str:
    """As ``op.namespace``, which reads it out of the schema's name each time."""
    return _schema(op).namespace


@per_op
def may_write(op: OpOverload) -> bool:
    """Whether the operator may write some of its arguments; see ``written_args``."""
    schema = _schema(op)
    return bool(schema.written) or schema.namespace != "aten" or "running_mean" in schema.positions


def argument_of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument, or its default; None if the operator has none of this name."""
    schema = _schema(op)
    position = schema.positions.get(name)
    if position is None:
        return None
    return args[position] if position < len(args) else kwargs.get(name, schema.defaults[name])


def written_args(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that the operator writes: those of its schema, and the running statistics of normalization layers,
    which the schemas leave out."""
    if not may_write(op):
        return []
    schema = _schema(op)
    written = tensor_args(argument_of(op, args, kwargs, name) for name in schema.written)
    if schema.namespace == "c10d":  # whose schemas say nothing
        written += tensor_args(written_by_collective(op, args))
    if "running_mean" in schema.positions and any(
        argument_of(op, args, kwargs, flag) for flag in ("training", "train", "use_input_stats")
    ):
        written += tensor_args(argument_of(op, args, kwargs, name) for name in ("running_mean", "running_var"))
    return written


def where_now() -> str:
    """``file:line in function`` of the innermost frame outside torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    return "an unknown place" if frame is None else _place(frame, frame.f_lineno)


def where_raised(error: BaseException) -> str:
    """``file:line in function`` of the innermost frame outside torch and this package that an error passed through."""
    traceback: TracebackType | None = error.__traceback__
    place = "an unknown place"
    while traceback is not None:
        if not _is_library(traceback.tb_frame):
            place = _place(traceback.tb_frame, traceback.tb_lineno)
        traceback = traceback.tb_next
    return place


def _is_library(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] in _LIBRARIES and not name.startswith("graphreplay.testing")


def _place(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
