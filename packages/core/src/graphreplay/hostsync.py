"""Finds host synchronization by the operators and methods that cause it, in one thread and on any device.

CUDA has a debug mode that raises where its runtime waits, but it holds for the whole process: other threads, which may
well wait, would raise as well."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from graphreplay.errors import HostSyncError
from graphreplay.opmode import OpMode, argument_of, per_op, tensor_args, where_now

_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

# Operators that read values back without a tag that says so.
_UNTAGGED = frozenset(
    {
        "aten::item",
        "aten::is_nonzero",
        "aten::equal",
        "aten::allclose",
        "aten::argwhere",
        "aten::nonzero_numpy",
        "aten::_linalg_check_errors",
        "aten::bincount",
        "aten::one_hot",
        "aten::to_sparse",
        "aten::_to_sparse",
    }
)
# Tensor methods that copy to the host below the dispatcher, or not at all where the device is the CPU.
_METHODS = {
    Tensor.cpu: "Tensor.cpu()",
    Tensor.numpy: "Tensor.numpy()",
    Tensor.tolist: "Tensor.tolist()",
    Tensor.__array__: "numpy.asarray(tensor)",
    Tensor.__repr__: "printing a tensor",
    Tensor.__format__: "formatting a tensor",
    Tensor.__dlpack__: "handing a tensor to another library",
}
# They read tensors inside lists one by one, below the dispatcher.
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, Tensor.new)
_SPLITS = (torch.tensor_split, Tensor.tensor_split)
_WATCHED = frozenset({*_METHODS, *_FROM_DATA, *_SPLITS})
_MASKED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_MASK_DTYPES = (torch.bool, torch.uint8)


def syncing_op(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], device_type: str
) -> bool:
    """Whether the operator, with these arguments and the tensors among them, makes the host wait for a device of this
    type: to learn a value or an output's shape, or to copy between host and device. On the CPU itself such copies
    cannot be told from others."""
    if not may_sync(op):
        # Of CPU tensors among those of the device, scalars are read at launch, and larger ones are copied over first.
        return device_type != "cpu" and _are_mixed(given, device_type)
    name = op._schema.name
    if device_type != "cpu":
        on_device = any(tensor.device.type == device_type for tensor in given)
        if name == "aten::_to_copy" and kwargs.get("device") is not None:
            return bool(torch.device(kwargs["device"]).type != args[0].device.type)
        if name == "aten::copy_":
            return bool(args[0].device.type != args[1].device.type)
        if name == "aten::lift_fresh":
            return on_device  # torch.tensor(..., device=...) has copied its data there
        if not on_device:
            return False
        if _are_mixed(given, device_type):
            return True
    if name in _MASKED:
        masks = [index for index in args[1] if index is not None and index.dtype in _MASK_DTYPES]
        # One mask and one scalar make a masked fill, which needs no positions.
        is_fill = name != "aten::index" and len(masks) == 1 and len(args[1]) == 1 and args[2].dim() == 0
        return bool(masks) and not is_fill
    if name == "aten::histc":  # which looks for the bounds itself if they are the same
        low, high = (argument_of(op, args, kwargs, bound) for bound in ("min", "max"))
        return bool(low == high)
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    return _always_syncs(op) or bool(argument_of(op, args, kwargs, "check_errors"))


@per_op
def _always_syncs(op: OpOverload) -> bool:
    return op._schema.name in _UNTAGGED or any(tag in op.tags for tag in _TAGS)


@per_op
def may_sync(op: OpOverload) -> bool:
    """Whether it depends on the arguments of an operator, beside their devices."""
    if op._schema.name == "aten::repeat_interleave":
        return op._overloadname in ("Tensor", "self_Tensor")  # whose counts are in a tensor
    depends = (*_MASKED, "aten::_to_copy", "aten::copy_", "aten::lift_fresh", "aten::histc")
    has_flag = any(argument.name == "check_errors" for argument in op._schema.arguments)
    return op._schema.name in depends or has_flag or _always_syncs(op)


def _are_mixed(given: list[Tensor], device_type: str) -> bool:
    """Whether there are tensors of the device and, beside scalars, of the CPU."""
    on_host = any(tensor.is_cpu and tensor.dim() for tensor in given)
    return on_host and any(tensor.device.type == device_type for tensor in given)


class _Allowed(threading.local):
    here = False


_allowed = _Allowed()


@contextmanager
def host_sync_allowed() -> Iterator[None]:
    """Lets the calling thread wait for the device under a probe, for a library that keeps the wait out of captures."""
    before, _allowed.here = _allowed.here, True
    try:
        yield
    finally:
        _allowed.here = before


class SyncRefusal(OpMode):
    """Raises HostSyncError at an operator that would make the host wait for a device of this type."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def on_op(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.before(op, args, kwargs, tensor_args(args, kwargs))
        result = op(*args, **kwargs)
        self.after(op, tensor_args((result,)))
        return result

    def before(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> None:
        """An operator is about to run, with these tensors among its arguments."""
        if not _allowed.here and syncing_op(op, args, kwargs, given, self.device_type):
            self.on_sync(str(op))

    def after(self, op: OpOverload, made: Iterable[Tensor]) -> None:
        """An operator has run and returned these tensors."""
        for tensor in made:
            if tensor.is_nested:
                self.on_sync(f"{op}, which makes a nested tensor with its sizes on the host,")

    def on_sync(self, what: str) -> None:
        raise host_sync(what)


class SyncProbe(SyncRefusal):
    """Lets the host wait, and keeps what an error of the first time would say."""

    found: str | None = None

    def on_sync(self, what: str) -> None:
        self.found = self.found or str(host_sync(what))


class _MethodProbe(TorchFunctionMode):
    """Tells a probe of what does not come by the dispatcher."""

    def __init__(self, probe: SyncProbe) -> None:
        super().__init__()
        self.probe = probe
        self.device_type = probe.device_type

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WATCHED:
            self._before(func, args)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _before(self, func: Any, args: tuple[Any, ...]) -> None:
        if func in _METHODS and args[0].device.type == self.device_type:
            self.probe.on_sync(_METHODS[func])
        if (
            func in _SPLITS
            and len(args) > 1
            and isinstance(args[1], Tensor)
            and args[1].device.type == self.device_type
        ):
            self.probe.on_sync("tensor_split() at positions in a tensor")
        if func in _FROM_DATA and any(self._in_list(data) for data in args[:2]):
            self.probe.on_sync(f"{func.__name__}() of a list of tensors")

    def _in_list(self, data: Any) -> bool:
        return isinstance(data, list | tuple) and any(
            item.device.type == self.device_type if isinstance(item, Tensor) else self._in_list(item) for item in data
        )


def host_sync(what: str) -> HostSyncError:
    """The error for one synchronization, with the line of the module's code that made it."""
    return HostSyncError(
        f"{what} at {where_now()} makes the host wait for the device, which a replay cannot do; compute it on the "
        "device, or pass it in as a kwarg"
    )


class _Active(threading.local):
    probe: SyncProbe | None = None


_active = _Active()


@contextmanager
def probe_taken_over() -> Iterator[SyncProbe | None]:
    """Takes the mode of the calling thread's HostSyncProbe off, if it is in one, for a body which asks that probe about
    each operator itself: one mode takes half the time of two. Where another mode was entered since, such as the one
    that counts collectives, the probe stays, and None is yielded: modes come off in the order in which they lie."""
    probe = _active.probe
    if probe is None or _get_current_dispatch_mode() is not probe:
        yield None
        return
    probe.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield probe
    finally:
        probe.__enter__()  # type: ignore[no-untyped-call]


class HostSyncProbe:
    """Raises HostSyncError if its body has made the host wait for a device of this type, in the calling thread.

    It does so at the end: a forward that is cut short in the middle would leave its other ranks in their collectives.
    A class, since the frames of a generator would keep the error, and with it the wrapper, until the next collection.
    """

    def __init__(self, device_type: str) -> None:
        self._probe = SyncProbe(device_type)
        self._modes = ExitStack()
        self._before: SyncProbe | None = None

    def __enter__(self) -> None:
        self._modes.enter_context(_MethodProbe(self._probe))
        self._modes.enter_context(self._probe)
        self._before, _active.probe = _active.probe, self._probe

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        _active.probe = self._before
        self._modes.close()
        what, self._probe.found = self._probe.found, None
        if what is not None and (error is None or isinstance(error, Exception)):
            raise HostSyncError(what) from error  # what came later may come of it
