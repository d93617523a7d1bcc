"""What tensors and dicts are like, asked in calls of C."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

dict_version: Callable[[dict[Any, Any]], int] = torch._C._dynamo.guards.dict_version
"""A number that no dict has twice, nor two dicts in common: each change to one gives it another, of its order excepted.
From Python 3.12 on torch watches such a dict for good, so ask for dicts of modules only."""


def require_versions() -> None:
    """Raises ImportError where attributes change without their dict having another version, so that a module could
    change unnoticed: in Python 3.13.0 (CPython issue 125608, mended in 3.13.1)."""

    class Sample:
        attribute = 0

    sample = Sample()
    versions = []
    for sample.attribute in range(2):
        versions.append(dict_version(sample.__dict__))
    sample.other = 1  # type: ignore[attr-defined]
    versions.append(dict_version(sample.__dict__))
    if len(set(versions)) < len(versions):
        raise ImportError(
            f"graphreplay cannot tell under Python {platform.python_version()} when the attributes of a module change; "
            "take Python 3.13.1 or later, or 3.11 or 3.12"
        )


require_versions()


def looks_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A check, in one call, whether as many tensors look like these: their classes, dtypes, devices, layouts, shapes,
    strides, ``requires_grad``, lazy bits, whether they were made under inference mode, and that no two are one object.
    It also says no where autocast is on and was off (or the other way round), and in a trace or functorch transform,
    if it was made outside; about inference mode it says no for some tensors only.

    That is the check of guards in torch.compile: the keys by which operators find their kernels have to be the same.
    """
    # Not a public name, but one of long standing; a test tries each of the properties above on the torch at hand.
    guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Callable[..., bool] = guards.check
    return check


LooksOf: TypeAlias = Callable[[Sequence[Tensor]], Callable[..., bool]]
"""Makes checks of what tensors look like, as ``looks_of``; ``requires_grad`` may be left out."""


class SightOf(Protocol):
    """Makes checks whether tensors, dicts and objects are as they were, as ``sight_of``; ``requires_grad`` and modes of
    the thread may be left out."""

    def __call__(
        self,
        tensors: Sequence[Tensor],
        dicts: Sequence[dict[Any, Any]],
        empty: Sequence[dict[Any, Any]],
        objects: Sequence[Any],
    ) -> Callable[[], bool]: ...


def sight_of(
    tensors: Sequence[Tensor],
    dicts: Sequence[dict[Any, Any]],
    empty: Sequence[dict[Any, Any]],
    objects: Sequence[Any],
) -> Callable[[], bool]:
    """A check, made of calls of C alone, whether all of these are as they are now. It also says no where modes of the
    thread are others, as ``looks_of`` does.

    Args:
        tensors: no object twice. In-place updates do not count.
        dicts: of modules, as ``dict_version`` wants them.
        empty: dicts of modules that hold nothing, and are to go on so.
        objects: whose classes count.
    """
    look_alike, addresses = looks_of(tensors), list(map(Tensor.data_ptr, tensors))
    versions, classes = list(map(dict_version, dicts)), list(map(type, objects))
    return lambda: (
        look_alike(*tensors)
        and list(map(Tensor.data_ptr, tensors)) == addresses
        and list(map(dict_version, dicts)) == versions
        and list(map(type, objects)) == classes
        and not any(empty)
    )


_PLACE: tuple[Callable[[Tensor], Any], ...] = (
    Tensor.data_ptr,
    Tensor.stride,
    attrgetter("shape"),
    attrgetter("dtype"),
    attrgetter("requires_grad"),
    Tensor.is_conj,
    Tensor.is_neg,
)
"""Where a tensor lies and how it is seen, each read by one C call."""

_REQUIRES_GRAD = 4


def places_of(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Where tensors lie and how they are seen: a list for each property, which is equal to another one exactly if no
    tensor was moved or made to look otherwise in between."""
    return [list(map(read, tensors)) for read in _PLACE]


def move_back(tensor: Tensor, was: Tensor, place: Sequence[Sequence[Any]]) -> None:
    """Has a tensor be what it was, an alias of it then, at the place that it had by ``places_of([tensor])``."""
    tensor.data = was
    (requires_grad,) = place[_REQUIRES_GRAD]
    if tensor.requires_grad is not requires_grad and tensor.is_leaf:
        tensor.requires_grad_(requires_grad)
