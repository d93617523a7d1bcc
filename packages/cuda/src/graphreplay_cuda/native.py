"""The compiled part of this package: what is asked of every tensor and dict in each call, asked in C.

It is built for no one torch, nor one CPython from 3.11 on, but finds out here what it has to know of them, and tries
that. Where it cannot be had (no compiler when the package was built, a free-threaded Python, a torch that holds its
tensors otherwise), calls take longer and return the same. All of it is for 64 bits.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from graphreplay import looks
from graphreplay.stats import logger
from graphreplay.tree import TENSOR_TYPES

INTERFACE = 5
"""Of native.h: goes up there and here with each change of what the compiled part takes, or does."""

_FUNCTIONS = ("data_ptr", "storage_size", "dtype", "device_type", "device_index", "dim", "sizes", "strides")
"""What it asks of a tensor, in the order of native.h."""

_WORD = 8
_IMPL_BYTES = 192
"""How far to look for the keys in what a tensor points to. They are its last word in torch 2.11, at 176, and in 2.13,
at 168; the search ends there."""

_DICT_VERSION = 24
"""Where Python 3.11 has the version of a dict."""

try:
    import graphreplay_cuda._native as _native
except ModuleNotFoundError:
    _why_not_built = "it was not built; install a C compiler and the headers of Python, and graphreplay-cuda once more"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        _why_not_built = "it is for Pythons that are not free-threaded"
except ImportError as error:
    _why_not_built = f"it cannot be loaded: {error}"
else:
    _why_not_built = ""


def _bind() -> str | None:
    """Tells the compiled part what it has to know; returns why it cannot serve, or None."""
    if getattr(_native, "INTERFACE", 0) != INTERFACE:
        return "it was built for another version of this package; install that once more"
    try:
        return _bind_tensors() or _watch_dicts()
    except Exception as error:  # whatever another torch or Python lacks
        return f"torch or Python are other than it takes them for: {type(error).__name__}: {error}"


def _bind_tensors() -> str | None:
    """Tells it how to read tensors; returns why it cannot, or None."""
    library = ctypes.CDLL(torch._C.__file__)  # and what it is linked to
    functions = tuple(_address(getattr(library, f"aoti_torch_get_{name}")) for name in _FUNCTIONS)
    base: Any = torch._C.TensorBase
    zeros = partial(torch.zeros, device="cpu")
    lazy = zeros(3, dtype=torch.complex64).conj()
    with torch.inference_mode():
        samples = [zeros(4), zeros(4)[2:], zeros(0), lazy.clone(), lazy, lazy.imag]
    samples += [zeros(2, dtype=torch.int8), Parameter(zeros(2, 3)), lazy.clone(), lazy, lazy.imag]
    tensors = _place(object.__basicsize__, base.__basicsize__, [(id(t), t._cdata) for t in samples])
    keys = _place(_WORD, _IMPL_BYTES, [(t._cdata, torch._C._dispatch_keys(t).raw_repr()) for t in samples])
    if tensors is None or keys is None:
        return "torch has no place of a tensor in its Python object, or of its keys in itself"
    _native.bind(functions, tensors, keys, base)
    if any(_native.address(tensor) != tensor.data_ptr() for tensor in samples):
        return "torch's C interface to tensors gives other addresses"
    return None


def _watch_dicts() -> str | None:
    """Has changed dicts be noticed; returns why they cannot be, or None."""
    if sys.version_info >= (3, 12):
        api = ctypes.pythonapi  # where eight watchers of dicts are to be had
        _native.watch(*map(_address, (api.PyDict_AddWatcher, api.PyDict_Watch, api.PyDict_Unwatch)))
        return None
    sample = {"a": 0}
    for value in range(3):
        sample["a"] = value
        if _place(_DICT_VERSION, _DICT_VERSION + _WORD, [(id(sample), looks.dict_version(sample))]) is None:
            return "this Python has the versions of its dicts elsewhere"
    _native.read_versions(_DICT_VERSION)
    return None


def _place(start: int, end: int, found: Sequence[tuple[int, int]]) -> int | None:
    """The first offset from all of some addresses at which there is the number that goes with each."""
    read = ctypes.c_uint64.from_address
    offsets = range(start, end - _WORD + 1, _WORD)
    return next((offset for offset in offsets if all(read(at + offset).value == number for at, number in found)), None)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether what the tensors say of themselves comes from torch, and not from a subclass."""
    return set(map(type, tensors)) <= TENSOR_TYPES


def _compiled_looks_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """As ``looks.looks_of``, but for ``requires_grad``; it may say no where that finds that modes hide a difference."""
    if not _are_plain(tensors):
        return looks.looks_of(tensors)
    firsts: dict[int, int] = {}  # modes of the thread show alike in tensors of equal keys
    for position, tensor in enumerate(tensors):
        firsts.setdefault(torch._C._dispatch_keys(tensor).raw_repr(), position)
    check = looks.looks_of([tensors[position] for position in firsts.values()])
    return _native.Looks(tuple(tensors), tuple(firsts.values()), check).alike


def _compiled_sight_of(
    tensors: Sequence[Tensor],
    dicts: Sequence[dict[Any, Any]],
    empty: Sequence[dict[Any, Any]],
    objects: Sequence[Any],
) -> Callable[[], bool]:
    """As ``looks.sight_of``, but for ``requires_grad`` and modes of the thread; and dicts which were filled and emptied
    again have changed."""
    if any(empty):
        return lambda: False
    if not _are_plain(tensors):
        return looks.sight_of(tensors, dicts, empty, objects)
    alike = _native.Looks(tuple(tensors), (), None).alike
    return _native.Sight(alike, tuple(tensors), (*dicts, *empty), tuple(objects)).lasts


@cache
def warn_if_missing() -> None:
    """Says so once, where calls will take longer."""
    if missing is not None:
        logger.warning("graphreplay-cuda goes without its compiled part, so that calls take longer: %s", missing)


missing: str | None = _why_not_built or _bind()
"""Why the compiled part does not serve, or None where it does."""

looks_of: looks.LooksOf = looks.looks_of if missing else _compiled_looks_of
sight_of: looks.SightOf = looks.sight_of if missing else _compiled_sight_of
