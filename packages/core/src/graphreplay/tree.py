"""Trees of kwargs and outputs: what counts as a container, a value or a tensor, and what is refused.

A tree is taken apart here and nowhere else. Three kinds of node exist:

* a tensor (``torch.Tensor`` or ``nn.Parameter``, no other subclass);
* a value: something with an exact type and a stable, hashable token (``value_token``);
* a container: dict, list, tuple, OrderedDict, namedtuple, dataclass and what is built on them (``Container``).

Anything else is refused, since it may hide a tensor or change without showing it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import EllipsisType, NoneType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from graphreplay.errors import UnsupportedLeafError

MAX_DEPTH = 64
"""Containers nest no deeper than this, so that a cycle ends in an error and not in a recursion crash."""

MAX_CONTAINERS = 100_000
"""A tree holds no more containers than this, so that subtrees shared many times over end in an error too."""

TENSOR_TYPES = frozenset({Tensor, Parameter})

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

_ONLY_STR = {str}

Names: TypeAlias = tuple[Any, ...] | None
Token: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Container:
    """How one container type is taken apart, put together and addressed."""

    children: Callable[[Any], tuple[Names, Names, Sequence[Any]]]
    """Names in canonical order (None: the positions), the same as tokens for a key, and the values in that order."""
    rebuild: Callable[[Any, Sequence[Any]], Any]
    """A new container like the first one, holding these values (given in ``children`` order)."""
    accessor: Callable[[Any], str]
    """The Python text that reaches a child from its parent, by the token of its name or by its position."""
    is_record: bool = False
    """A dataclass: without tensors inside it is passed on as the same object."""


class Refused(Exception):
    """Why a node is refused; the walk that knows the path turns it into an UnsupportedLeafError."""


# --------------------------------------------------------------------------------------------- values


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
        raise Refused(f"a dict key of type {_type_name(type(key))} has no stable value; use str or int keys")
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
    return names if set(map(type, names)) == _ONLY_STR else tuple(map(key_token, names))


# ----------------------------------------------------------------------------------------- containers

_STR_ORDERS: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def _canonical_order(keys: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Dict keys in an order that does not depend on insertion, and their tokens."""
    # The types come first: a str enum equals its str, and a memo that is asked by == would mix them up.
    if set(map(type, keys)) != _ONLY_STR:
        order = tuple(sorted(keys, key=lambda key: repr(key_token(key))))
        return order, name_tokens(order)
    order = _STR_ORDERS.get(keys, ())
    if not order:
        if len(_STR_ORDERS) >= 4096:
            _STR_ORDERS.clear()
        order = _STR_ORDERS[keys] = tuple(sorted(keys))
    return order, order


def _dict_children(obj: dict[Any, Any]) -> tuple[Names, Names, list[Any]]:
    names, tokens = _canonical_order(tuple(obj))
    return names, tokens, [obj[name] for name in names]


def _dict_rebuild(obj: dict[Any, Any], values: Sequence[Any]) -> dict[Any, Any]:
    by_name = dict(zip(_canonical_order(tuple(obj))[0], values, strict=True))
    return {name: by_name[name] for name in obj}


def _item(name: Any) -> str:
    return f"[{source_of(name if type(name) is tuple else (type(name), name))}]"


def _attribute(name: str) -> str:
    return f".{name}"


def _record_children(field_names: tuple[str, ...]) -> Callable[[Any], tuple[Names, Names, list[Any]]]:
    known = frozenset(field_names)

    def children(obj: Any) -> tuple[Names, Names, list[Any]]:
        # What was put on the instance beside its fields (a cached property, say) may be a tensor as well.
        extra = sorted(set(getattr(obj, "__dict__", ())) - known)
        names = field_names + tuple(extra)
        try:
            return names, names, [getattr(obj, name) for name in names]
        except AttributeError as error:
            raise Refused(f"a {_type_name(type(obj))} without one of its fields ({error})") from None

    return children


def _record_rebuild(obj: Any, values: Sequence[Any]) -> Any:
    names, _, _ = container_of(type(obj)).children(obj)  # type: ignore[union-attr]
    new = object.__new__(type(obj))
    for name, value in zip(names or (), values, strict=True):
        object.__setattr__(new, name, value)
    return new


def _mapping_record_children(obj: Any) -> tuple[Names, Names, list[Any]]:
    names = tuple(obj)
    known, attributes = {field.name for field in fields(obj)}, vars(obj)
    stray = {n for n in (*known, *names, *attributes) if n not in known or attributes.get(n) is not obj.get(n)}
    if stray:
        raise Refused(f"a {_type_name(type(obj))} whose attributes and items differ: {sorted(stray)}")
    return names, name_tokens(names), [obj[name] for name in names]


def _mapping_record_rebuild(obj: Any, values: Sequence[Any]) -> Any:
    # An item that is None is not among the items, and its field's default may be another.
    absent = {field.name: None for field in fields(obj) if field.init}
    return type(obj)(**absent | dict(zip(tuple(obj), values, strict=True)))


_MAPPING_RECORD = Container(
    children=_mapping_record_children,
    rebuild=_mapping_record_rebuild,
    accessor=_item,
)
_SEQUENCE = Container(
    children=lambda obj: (None, None, obj), rebuild=lambda obj, values: type(obj)(values), accessor=_item
)
_NAMED_TUPLE = Container(
    children=lambda obj: (type(obj)._fields, type(obj)._fields, obj),
    rebuild=lambda obj, values: type(obj)._make(values),
    accessor=_attribute,
)
_CONTAINERS: dict[type, Container | None] = {
    dict: Container(children=_dict_children, rebuild=_dict_rebuild, accessor=_item),
    OrderedDict: Container(
        children=lambda obj: (tuple(obj), name_tokens(tuple(obj)), list(obj.values())),
        rebuild=lambda obj, values: OrderedDict(zip(tuple(obj), values, strict=True)),
        accessor=_item,
    ),
    list: _SEQUENCE,
    tuple: _SEQUENCE,
}


def container_of(cls: type) -> Container | None:
    """How instances of exactly this type are taken apart, or None if it is no container."""
    try:
        return _CONTAINERS[cls]
    except KeyError:
        return _CONTAINERS.setdefault(cls, _derive_container(cls))


def _derive_container(cls: type) -> Container | None:
    slots = {name for base in cls.__mro__ for name in _slots(base)}
    if issubclass(cls, tuple):
        if cls.__module__ == "torch.return_types":
            return _SEQUENCE
        # A subclass with attributes of its own would lose them when it is rebuilt.
        plain = cls.__new__ is not tuple.__new__ and "__dict__" not in dir(cls) and not slots
        return _NAMED_TUPLE if plain and hasattr(cls, "_fields") and hasattr(cls, "_make") else None
    if not is_dataclass(cls):
        return None
    names = tuple(field.name for field in fields(cls))
    if issubclass(cls, OrderedDict):
        return _MAPPING_RECORD
    # Built-in and slotted bases hold state that object.__new__ and __dict__ do not show.
    if cls.__new__ is not object.__new__ or issubclass(cls, torch.nn.Module) or not slots <= set(names):
        return None
    return Container(children=_record_children(names), rebuild=_record_rebuild, accessor=_attribute, is_record=True)


def _slots(cls: type) -> set[str]:
    slots = cls.__dict__.get("__slots__", ())
    return ({slots} if isinstance(slots, str) else set(slots)) - {"__dict__", "__weakref__"}


def _type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


# --------------------------------------------------------------------------------------------- walks


def walk(tree: Any, root: str = "kwargs") -> Iterator[tuple[str, Any]]:
    """Yields every leaf with its path, tensors and values alike, in the order of all other functions here.

    Raises:
        UnsupportedLeafError: at the first node that is refused, with its path.
    """
    budget = [MAX_CONTAINERS]

    def visit(obj: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        try:
            container = container_of(type(obj))
            if container is None:
                _check_leaf(obj)
                yield path, obj
                return
            budget[0] -= 1
            check_size(depth, budget[0])
            _, names, values = container.children(obj)
        except Refused as refusal:
            raise UnsupportedLeafError(path, str(refusal)) from None
        for name, value in zip(range(len(values)) if names is None else names, values, strict=True):
            yield from visit(value, path + container.accessor(name), depth + 1)

    return visit(tree, root, 0)


def leaf_token(obj: Any) -> Token:
    """The token of a value; raises Refused for anything else."""
    token = value_token(obj)
    if token is None:
        raise Refused(_why_refused(obj))
    return token


def check_size(depth: int, containers_left: int) -> None:
    if depth >= MAX_DEPTH:
        raise Refused(f"nested deeper than {MAX_DEPTH} containers; does the tree contain itself?")
    if containers_left < 0:
        raise Refused(f"the tree holds more than {MAX_CONTAINERS} containers")


def _check_leaf(obj: Any) -> None:
    if type(obj) in TENSOR_TYPES:
        check_tensor(obj)
    else:
        leaf_token(obj)


def check_tensor(tensor: Tensor) -> None:
    if tensor.is_nested:
        raise Refused("a nested tensor; pass a padded tensor, or values and offsets")
    if tensor.layout is not torch.strided:
        raise Refused(f"a tensor of layout {tensor.layout}; only strided tensors have a static copy")
    if tensor.is_quantized:
        raise Refused("a quantized tensor; pass its integer values and scale")
    if tensor.is_meta:
        raise Refused("a meta tensor; it has no values to copy")


def _why_refused(obj: Any) -> str:
    name = _type_name(type(obj))
    if isinstance(obj, Tensor):
        return f"{name} is a tensor subclass; pass a plain tensor"
    return (
        f"an object of type {name} may hide a tensor or change without a trace; pass tensors, numbers, strings, "
        "or a dataclass of such, or name it by variant= and keep_alive="
    )


def tensors(tree: Any, root: str = "kwargs") -> list[Tensor]:
    """The tensor leaves, in the order of ``walk``. Raises UnsupportedLeafError as ``walk`` does."""
    return [leaf for _, leaf in walk(tree, root) if type(leaf) in TENSOR_TYPES]


def path_of(leaf: Any, tree: Any, root: str = "kwargs") -> str:
    """The path of a leaf that is known to be in the tree."""
    return next(path for path, other in walk(tree, root) if other is leaf)


def replace_tensors(tree: Any, new: Iterator[Tensor]) -> Any:
    """The tree rebuilt with each tensor leaf taken from ``new``, in the order of ``walk``.

    Values and dataclasses without tensors are passed on as the same objects.
    """
    cls = type(tree)
    if cls in TENSOR_TYPES:
        return next(new)
    container = container_of(cls)
    if container is None:
        return tree
    if container.is_record and not tensors(tree):
        return tree
    _, _, values = container.children(tree)
    return container.rebuild(tree, [replace_tensors(value, new) for value in values])
