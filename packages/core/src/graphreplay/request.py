"""What a call brings: its forward kwargs, its options, and the key that both make."""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphreplay.ambient import Ambient, State
from graphreplay.errors import ConfigurationError, UnsupportedLeafError
from graphreplay.signature import Signature, explain, flatten
from graphreplay.storage import any_freed, sharing_pattern, storage_ids
from graphreplay.tree import path_of, tensors

if TYPE_CHECKING:
    from graphreplay.state import GraphStore
    from graphreplay.weights import ModuleWatch


OPTION_NAMES = ("variant", "keep_alive", "pin")
"""Kwargs of a call that are the wrapper's own."""


def kwargs_named_as_options(forward: Any) -> frozenset[str]:
    """Those of the names above that the forward has parameters for."""
    try:
        parameters = inspect.signature(getattr(forward, "forward", forward)).parameters
    except (TypeError, ValueError):  # some built-ins tell nothing about themselves
        return frozenset()
    return frozenset(name for name in OPTION_NAMES if name in parameters)


def order_shows_below(forward: Any) -> int:
    """From which depth of the kwargs on a forward can see the insertion order of dicts: one that names its parameters
    cannot see the order of the kwargs themselves, one that takes ``**kwargs`` can."""
    try:
        parameters = inspect.signature(getattr(forward, "forward", forward)).parameters.values()
    except (TypeError, ValueError):  # some built-ins tell nothing about themselves
        return 0
    return 0 if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters) else 1


def variant_key(variant: Any) -> Signature:
    """The key of a variant.

    Raises:
        UnsupportedLeafError: it holds something without a stable value, or a tensor, which has a key without values.
    """
    try:
        signature, leaves = flatten(variant, "variant")
    except UnsupportedLeafError as error:  # whose advice is for kwargs
        what, _, _ = error.problem.partition(";")
        raise UnsupportedLeafError(error.path, f"{what}; a variant is made of numbers, strings and the like") from None
    if leaves:
        where = path_of(leaves[0], variant, "variant")
        raise UnsupportedLeafError(where, "a tensor, whose values are no part of a key; pass numbers or strings")
    return signature


@dataclass(frozen=True, slots=True)
class CallOptions:
    """See ``GraphedForward.__call__``."""

    variant: Any = None
    keep_alive: tuple[Any, ...] = ()
    pin: bool = False

    @classmethod
    def taken_from(cls, kwargs: dict[str, Any], forwards_own: Set[str]) -> CallOptions:
        """Those among the kwargs, which they leave.

        Raises:
            ConfigurationError: the forward itself has a kwarg of this name, so that either may be meant.
        """
        names = [name for name in OPTION_NAMES if name in kwargs]
        for name in names:
            if name in forwards_own:
                raise ConfigurationError(
                    f"{name}= may be meant for the forward, which has a kwarg of this name, or for the wrapper; write "
                    f"graphed.options()({name}=…) for the forward's, and graphed.options({name}=…)(…) for the wrapper's"
                )
        return cls(**{name: kwargs.pop(name) for name in names})

    def __post_init__(self) -> None:
        hint = "; if it is a kwarg of the forward's own, write graphed.options()"
        if type(self.keep_alive) is not tuple:
            what = type(self.keep_alive).__name__
            raise ConfigurationError(f"keep_alive must be a tuple of objects, not a {what}{hint}(keep_alive=…)")
        if type(self.pin) is not bool:
            raise ConfigurationError(f"pin must be True or False, not of type {type(self.pin).__name__}{hint}(pin=…)")


NO_OPTIONS = CallOptions()
"""Of most calls."""


class Key:
    """What a graph is looked up by. It knows its hash, since a tuple would hash every shape and name at each lookup."""

    __slots__ = ("_hash", "_parts", "ambient", "sharing", "signature", "variant")

    def __init__(
        self,
        signature: Signature,
        ambient: tuple[Any, ...],
        sharing: tuple[tuple[int, ...], ...],
        variant: Signature | None,
    ) -> None:
        self.signature = signature
        """Of the kwargs, with the order of dicts where the forward can see it."""
        self.ambient = ambient
        self.sharing = sharing
        self.variant = variant
        self._parts = (signature, ambient, sharing, variant)
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._parts == other._parts

    def news_since(self, last: Key, ambient: Ambient) -> str:
        """What is new in this key since another one."""
        different = explain(last.signature, self.signature)
        if different is not None:
            return different
        if self.ambient != last.ambient:
            return ambient.difference(last.ambient, self.ambient)
        if self.sharing != last.sharing:
            return "other kwargs share storage"
        if self.variant != last.variant:
            return "another variant"
        return "its graph was evicted or dropped"


@dataclass(slots=True)
class Request:
    """One call that a graph may serve."""

    kwargs: dict[str, Any]
    options: CallOptions
    leaves: Sequence[Tensor]
    """The tensors that are staged, in the order of the tree."""
    key: Key
    """Equal for two calls exactly if one graph can serve both."""
    state: State
    """Of the process, at the call."""
    ahead: bool = False
    """From ``prepare``: asked for on purpose, so that it is no sign of churn."""


def share_nothing(leaves: Sequence[Tensor], watch: ModuleWatch) -> bool:
    """Whether each leaf is alone in its storage."""
    ids = set(storage_ids(leaves))
    return len(ids) == len(leaves) and watch.storage_ids.isdisjoint(ids)


def keyed(
    store: GraphStore,
    kwargs: dict[str, Any],
    options: CallOptions,
    watch: ModuleWatch,
    ahead: bool,
) -> Request | str:
    """The request of a call, with its key built anew, or why no graph may serve it."""
    variant = None if options.variant is None else variant_key(options.variant)
    state = store._ambient.read()
    try:
        signature, leaves = store._flatten(kwargs)
        ids = storage_ids(leaves)
        if any_freed(leaves):
            tensors(kwargs)  # refuses it by its path
        for leaf in leaves:
            if leaf.device != store.device:
                where = path_of(leaf, kwargs)
                return f"{where} is on {leaf.device}, and the graphs are on {store.device}; move it there"
        if not watch.storage_ids.isdisjoint(ids):
            leaf = next(leaf for leaf, storage in zip(leaves, ids, strict=True) if storage in watch.storage_ids)
            return f"{path_of(leaf, kwargs)} shares memory with a parameter or buffer of the module; pass a clone"
    except UnsupportedLeafError as error:
        return str(error)
    if torch.is_grad_enabled() and (watch.requires_grad() or any(leaf.requires_grad for leaf in leaves)):
        return "grad mode is on and a kwarg or weight requires grad, which a graph would lose; use torch.no_grad()"
    sharing = sharing_pattern(leaves, ids) if len(set(ids)) != len(ids) else ()
    key = Key(signature, store._ambient.key(state), sharing, variant)
    return Request(kwargs, options, leaves, key, state, ahead)
