"""Recognizes calls that have the key of an earlier one, in a fraction of the time that building a key takes.

A plan is made of one call and its key. It walks the tree of a later call in flat loops that run in C, and says yes only
where the key would be equal; where it says no, the key is built and decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import copysign
from operator import is_, itemgetter
from typing import Any

from torch import Tensor

from graphreplay import looks
from graphreplay.ambient import Ambient, State
from graphreplay.request import Key
from graphreplay.values import ONLY_STR, PLAIN_TYPES

MAX_PLANS = 4
"""How many of the latest plans a call is compared with: a comparison that fails costs about a tenth of a key."""


class Plan:
    """Recognizes calls with one key, by the process's state, kwargs and variant.

    Raises:
        ValueError: it cannot be told so simply.
    """

    def __init__(
        self,
        key: Key,
        ambient: Ambient,
        state: State,
        kwargs: dict[str, Any],
        variant: Any,
        leaves: Sequence[Tensor],
        looks_of: looks.LooksOf = looks.looks_of,
    ) -> None:
        if any(state[:2]):
            raise ValueError("modes that are active")
        self.key = key
        self.state = state
        self.grad_mode: bool = state[2]
        self._autocast = ambient.autocast()
        self._ambient = ambient
        self._names = tuple(kwargs)
        if not set(map(type, kwargs)) <= ONLY_STR:
            raise ValueError("a name that is no plain string")
        values: list[Any] = [*kwargs.values(), variant]
        self._containers: list[tuple[int, Any, Any]] = []
        """Where a container is among the values, its type, and its names or its length. Its children come last then."""
        constants: list[int] = []
        places = {id(leaf): -1 for leaf in leaves}
        if key.sharing or not leaves:
            raise ValueError("tensors that share storage, or none")
        if not all(map(Tensor.data_ptr, leaves)):  # calls would be recognized, and their keys built all the same
            raise ValueError("a tensor without elements")
        for position, value in enumerate(values):  # which grow meanwhile
            cls = type(value)
            if cls is dict and set(map(type, value)) <= ONLY_STR:
                self._containers.append((position, cls, tuple(value)))
                values += value.values()
            elif cls is list or cls is tuple:
                self._containers.append((position, cls, len(value)))
                values += value
            elif cls in PLAIN_TYPES or cls is float:
                constants.append(position)
            elif places.get(id(value)) == -1:
                places[id(value)] = position
            else:
                raise ValueError(f"a {cls.__name__}")
        self._is_flat = len(values) == len(leaves) + 1 and all(map(is_, values, (*leaves, None)))
        """Whether the kwargs are the leaves, in their order, and nothing else, without a variant."""
        self._pick_leaves = _picker([places[id(leaf)] for leaf in leaves])
        self._pick_constants = _picker(constants)
        self._constants = self._pick_constants(values)
        self._types = tuple(map(type, self._constants))
        self._zeros = [(p, copysign(1.0, x)) for p, x in enumerate(self._constants) if type(x) is float and x == 0.0]
        """Where zeros are among the constants, and their signs, which == does not see."""
        # Where gradients are on, it matters which of them require some.
        self._look_alike = (looks.looks_of if self.grad_mode else looks_of)(leaves)

    def match(self, state: State, kwargs: dict[str, Any], variant: Any) -> Sequence[Tensor] | None:
        """The leaves of a call in their order, if it has the key, or None if it may not have it.

        The caller still looks at whether they have memory, share some, or require gradients with the weights.
        """
        names = self._names
        if (
            state != self.state
            or len(kwargs) != len(names)
            # Mostly they are the very same strings, of the line that calls.
            or not (all(map(is_, kwargs, names)) or _same_names(kwargs, names))
            or (self._autocast is not None and self._ambient.autocast() != self._autocast)
        ):
            return None
        if self._is_flat:
            flat = list(kwargs.values())
            return flat if variant is None and self._look_alike(*flat) else None
        values: list[Any] = [*kwargs.values(), variant]
        for position, cls, held in self._containers:
            node = values[position]
            if type(node) is not cls:
                return None
            if cls is not dict:
                if len(node) != held:
                    return None
                values += node
            elif not _same_names(node, held):
                return None
            else:
                values += node.values()
        if self._types:
            constants = self._pick_constants(values)
            if not all(map(is_, constants, self._constants)) and (
                tuple(map(type, constants)) != self._types or constants != self._constants
            ):
                return None
            for position, sign in self._zeros:
                if copysign(1.0, constants[position]) != sign:
                    return None
        leaves = self._pick_leaves(values)
        return leaves if self._look_alike(*leaves) else None


def _same_names(node: dict[Any, Any], names: tuple[str, ...]) -> bool:
    """Whether these are the names of a dict, in this order, each a plain string: one of an enum equals its value."""
    return tuple(node) == names and set(map(type, node)) <= ONLY_STR


def _picker(positions: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """What takes the items at these positions out of a list, in one call of C: a slice where they lie side by side."""
    start = positions[0] if positions else 0
    if list(positions) == list(range(start, start + len(positions))):
        return itemgetter(slice(start, start + len(positions)))
    return itemgetter(*positions)  # two or more, or it would return the item itself
