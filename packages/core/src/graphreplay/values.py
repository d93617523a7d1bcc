"""Values: leaves with an exact type and a stable, hashable token, which is what a key holds of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from types import EllipsisType, NoneType
from typing import Any, TypeAlias

import torch
from torch import Tensor

PLAIN_TYPES: frozenset[type] = frozenset(
    {
        int,
        bool,
        str,
        bytes,
        NoneType,
        EllipsisType,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
    }
)
"""Types whose own equality, within the exact type, is the equality that a key needs."""

ONLY_STR = {str}

Token: TypeAlias = tuple[Any, ...]


class Refused(Exception):
    """Why a node of a tree is refused; the walk that knows the path turns it into an UnsupportedLeafError."""


def value_token(obj: Any) -> Token | None:
    """A hashable token, equal for two values exactly if they have the same type and value.

    Floats differ by the sign of zero, and one NaN equals the next. Returns None for what is not a value.
    """
    cls = type(obj)
    if cls in PLAIN_TYPES:
        return (cls, obj)
    if cls is float:
        # Zero and NaN are the floats whose == is not the equality of a key; their repr is.
        return (cls, obj) if obj and obj == obj else (cls, repr(obj))
    if cls is complex:
        return (cls, repr(obj))
    if cls is slice:
        return _parts_token(cls, (obj.start, obj.stop, obj.step))
    if cls is range:
        return (cls, obj.start, obj.stop, obj.step)
    if isinstance(obj, Enum):
        return (cls, obj.name) if obj.name in cls.__members__ else (cls, obj.name, repr(obj.value))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(obj, numpy.generic) and not obj.dtype.hasobject:
        is_nan = obj.dtype.kind in "fcmM" and obj != obj
        return (cls, obj.dtype, repr(obj) if is_nan else obj.tobytes())
    return None


def _parts_token(cls: type, parts: Sequence[Any]) -> Token | None:
    tokens = tuple(value_token(part) for part in parts)
    return None if None in tokens else (cls, tokens)


def key_token(key: Any) -> Token:
    """The token of a dict key: a value, or a tuple of such."""
    if type(key) is tuple:
        return (tuple, tuple(key_token(part) for part in key))
    token = value_token(key)
    if token is None:
        raise Refused(f"a dict key of type {type_name(type(key))} has no stable value; use str or int keys")
    if key != key:
        raise Refused("a NaN as dict key, under which nothing is found again; use str or int keys")
    return token


def source_of(token: Token) -> str:
    """The Python text of a value or key, from its token."""
    cls, *parts = token
    value = parts[-1]
    if cls is tuple:
        return f"({', '.join(map(source_of, value))}{',' if len(value) == 1 else ''})"
    if cls is slice:
        return f"slice({', '.join(map(source_of, value))})"
    if cls is str and '"' not in value:
        return '"' + repr("'" + value)[2:]  # repr takes double quotes where it sees a single one
    if cls is torch.device:
        return f"torch.{value!r}"
    if cls is int and value.bit_length() > 8192:
        return hex(value)  # Python refuses to write the decimal digits of very long ones
    if cls in PLAIN_TYPES:
        return repr(value)
    if cls is float or cls is complex:
        text = value if type(value) is str else repr(value)
        return f'{cls.__name__}("{text}")' if "inf" in text or "nan" in text else text
    if cls is range:
        return repr(range(*parts))
    if issubclass(cls, Enum):
        return f"{cls.__qualname__}.{parts[0]}" if parts[0] in cls.__members__ else f"{cls.__qualname__}({value})"
    return value if type(value) is str else repr(sys.modules["numpy"].frombuffer(value, parts[0])[0])


def name_tokens(names: tuple[Any, ...]) -> tuple[Any, ...]:
    """The names of a container as they go into a key: strings as they are, anything else with its type."""
    return names if set(map(type, names)) == ONLY_STR else tuple(map(key_token, names))


def leaf_token(obj: Any) -> Token:
    """The token of a value; raises Refused for anything else."""
    token = value_token(obj)
    if token is None:
        raise Refused(_why_refused(obj))
    return token


def _why_refused(obj: Any) -> str:
    name = type_name(type(obj))
    if isinstance(obj, Tensor):
        return f"{name} is a tensor subclass; pass a plain tensor"
    return (
        f"an object of type {name} may hide a tensor or change without a trace; use tensors, numbers, strings or a "
        "dataclass of such in its place, or keep it on the module and name it by variant= and keep_alive="
    )


def type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
