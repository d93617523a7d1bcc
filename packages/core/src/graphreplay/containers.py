"""Containers: dict, list, tuple, OrderedDict, namedtuple, dataclass and what is built on them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch

from graphreplay.values import ONLY_STR, Refused, key_token, name_tokens, source_of, type_name

Names: TypeAlias = tuple[Any, ...] | None


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


_STR_ORDERS: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def _canonical_order(keys: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Dict keys in an order that does not depend on insertion, and their tokens."""
    # The types come first: a str enum equals its str, and a memo that is asked by == would mix them up.
    if set(map(type, keys)) != ONLY_STR:
        order = tuple(sorted(keys, key=_sort_text))
        return order, name_tokens(order)
    order = _STR_ORDERS.get(keys, ())
    if not order:
        if len(_STR_ORDERS) >= 4096:
            _STR_ORDERS.clear()
        order = _STR_ORDERS[keys] = tuple(sorted(keys))
    return order, order


def _sort_text(key: Any) -> str:
    # Not the decimal digits of an int: Python refuses to write very long ones.
    return f"{key_token(key)[0]} {key:x}" if type(key) is int else repr(key_token(key))


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
        extra = sorted(set(getattr(obj, "__dict__", ())) - known - {"__orig_class__"})  # which Generic leaves there
        names = field_names + tuple(extra)
        try:
            return names, names, [getattr(obj, name) for name in names]
        except Exception as error:  # whatever a property or descriptor of theirs raises
            raise Refused(f"a {type_name(type(obj))} without one of its fields ({error})") from None

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
        raise Refused(f"a {type_name(type(obj))} whose attributes and items differ: {sorted(stray)}")
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
