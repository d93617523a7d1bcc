"""Types and objects that the strategies draw from, one of every kind that a kwargs tree may hold or must not."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum, Flag, IntEnum, StrEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    ONE = 1
    TWO = 2


class Word(StrEnum):
    A = "a"


class Part(Flag):
    LEFT = 1
    RIGHT = 2


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(eq=False)
class Pair:
    """A dataclass that may hold tensors."""

    left: Any
    right: Any


@dataclass(frozen=True, slots=True, eq=False)
class FrozenPair:
    left: Any
    right: Any


@dataclass(frozen=True)
class PackedLayout:
    """A dataclass without tensors."""

    rows: int
    lengths: tuple[int, ...] = (3, 4)


@dataclass(eq=False)
class Output(OrderedDict[str, Any]):
    """A mapping of those of its fields that are not None, as ModelOutput of transformers is."""

    first: Any = None
    second: Any = None

    def __post_init__(self) -> None:
        self.update({f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None})


NAMESPACE: dict[str, Any] = {
    "torch": torch,
    "np": np,
    **{cls.__name__: cls for cls in (Color, Level, Word, Part, Point, Pair, FrozenPair, PackedLayout, Output)},
}
"""What a leaf path that is evaluated as Python may name beside the tree itself."""

VALUES: tuple[Callable[[], Any], ...] = (
    *(
        lambda value=value: value
        for value in (0, 1, -1, 2**70, True, False, None, ..., "", "1", "a", "é\ud800", b"a", b"1")
    ),
    *(lambda text=text: float(text) for text in ("0", "-0.0", "1", "0.1", "inf", "-inf", "nan")),
    *(lambda text=text: complex(text) for text in ("1", "-0+1j", "0+1j", "1-0j", "nan+1j")),
    *(
        lambda value=value: value
        for value in (Color.RED, Color.BLUE, Level.ONE, Word.A, Part.LEFT, Part.LEFT | Part.RIGHT)
    ),
    *(lambda value=value: value for value in (torch.float16, torch.bfloat16, torch.strided, torch.channels_last)),
    lambda: torch.device("cpu"),
    lambda: torch.device("cuda"),
    lambda: torch.device("cuda", 1),
    lambda: torch.Size([]),
    lambda: torch.Size([1, 2]),
    lambda: slice(1),
    lambda: slice(0, 1),
    lambda: slice(1.0),
    lambda: range(3),
    lambda: range(1, 3),
    *(lambda cls=cls: cls(1) for cls in (np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.bool_)),
    lambda: np.float32(-0.0),
    lambda: np.float32(0.0),
    lambda: np.float32("nan"),
    lambda: np.complex64("nan"),
    lambda: np.str_("a"),
    lambda: np.bytes_(b"a"),
    lambda: np.datetime64("2026-01-01", "D"),
    lambda: np.datetime64("2026-01-01", "s"),
    lambda: np.datetime64("NaT", "D"),
    lambda: np.array((1, 2), [("a", "i4"), ("b", "i4")])[()],
    lambda: np.array((1, 2), [("c", "i4"), ("b", "i4")])[()],
)
"""Makers of values. No two make equal values, and one maker's values are equal to each other."""


NEAR: tuple[tuple[Callable[[], Any], Callable[[], Any]], ...] = (
    (lambda: [1], lambda: (1,)),
    (list, lambda: ()),
    (list, lambda: None),
    (lambda: (1,), lambda: torch.Size([1])),
    (lambda: (1, 2), lambda: Point(1, 2)),
    (lambda: [1], lambda: [1, 2]),
    (lambda: [1], lambda: 1),
    (dict, lambda: OrderedDict()),
    (lambda: {"a": 1}, lambda: OrderedDict(a=1)),
    (lambda: {"a": 1}, lambda: {"b": 1}),
    (lambda: {"a": 1}, lambda: {"a": 1, "b": 1}),
    (lambda: {"a": 1}, lambda: {Word.A: 1}),
    (lambda: {"a": 1}, lambda: {b"a": 1}),
    (lambda: {"1": 1}, lambda: {1: 1}),
    (lambda: {1: 1}, lambda: {True: 1}),
    (lambda: {1: 1}, lambda: {1.0: 1}),
    (lambda: {1: 1}, lambda: {Level.ONE: 1}),
    (lambda: {(1,): 1}, lambda: {(True,): 1}),
    (lambda: {0.0: 1}, lambda: {-0.0: 1}),
    (lambda: OrderedDict(a=1, b=1), lambda: OrderedDict(b=1, a=1)),
    (lambda: Pair(1, 2), lambda: FrozenPair(1, 2)),
    (lambda: Output(torch.ones(1)), lambda: Output(torch.ones(1), torch.ones(1))),
    (lambda: Output(torch.ones(1)), lambda: {"first": torch.ones(1)}),
    (lambda: torch.ones(1), lambda: None),
    (lambda: torch.ones(1), lambda: [torch.ones(1)]),
    (lambda: torch.ones(()), lambda: 1.0),
)
"""Makers of two objects that differ in one thing: the type of a container, or one of its names."""


class TensorSubclass(Tensor):
    pass


class ListSubclass(list[Any]):
    pass


class TaggedPoint(Point):
    """A named tuple with a ``__dict__``, where anything may be put."""


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass(eq=False)
class AttributesOnly(OrderedDict[str, Any]):
    """A mapping dataclass whose fields are not among its items."""

    tensor: Any = None
    more: list[Any] = field(default_factory=list)


def _overwritten() -> Output:
    output = Output(torch.ones(2))
    output.first = torch.zeros(2)
    return output


def _closure() -> Callable[[], Tensor]:
    tensor = torch.ones(2)
    return lambda: tensor


def _nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype, and say so
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


OPAQUE: dict[str, Callable[[], Any]] = {
    "object": lambda: Holder(torch.ones(2)),
    "bare object": object,
    "closure": _closure,
    "partial": lambda: partial(torch.add, torch.ones(2)),
    "class": lambda: Holder,
    "generator": lambda: (tensor for tensor in [torch.ones(2)]),
    "iterator": lambda: iter([torch.ones(2)]),
    "set": lambda: {1},
    "frozenset of tensors": lambda: frozenset([torch.ones(2)]),
    "deque": lambda: deque([1]),
    "defaultdict": lambda: defaultdict(int, a=1),
    "Counter": lambda: Counter(a=1),
    "UserDict": lambda: UserDict(a=1),
    "list subclass": lambda: ListSubclass([1]),
    "named tuple with a dict": lambda: TaggedPoint(1, 2),
    "slice of a tensor": lambda: slice(torch.tensor(1)),
    "lock": threading.Lock,
    "weak reference": lambda: weakref.ref(Color),
    "bytearray": lambda: bytearray(2),
    "memoryview": lambda: memoryview(b"ab"),
    "array": lambda: np.ones(2),
    "module": lambda: nn.Linear(1, 1),
    "torch generator": torch.Generator,
    "tensor subclass": lambda: torch.ones(2).as_subclass(TensorSubclass),
    "sparse coo": lambda: torch.eye(2).to_sparse_coo(),
    "nested": _nested,
    "dict with an object as key": lambda: {object(): 1},
    "dict with a NaN as key": lambda: {float("nan"): 1},
    "dict with a set as key": lambda: {(1, frozenset([1])): 1},
    "mapping dataclass without items": lambda: AttributesOnly(torch.ones(2)),
    "mapping dataclass with an overwritten field": _overwritten,
}
"""Makers of objects that may hide a tensor or have no stable value."""
