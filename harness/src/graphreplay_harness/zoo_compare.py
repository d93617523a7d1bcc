"""Comparing what two forwards return, whatever containers it is in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from graphreplay.verify import ROUNDING


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in the tree that holds nothing else, with its path; the type of each container comes first.

    Objects are looked into too, such as the distribution that an autoencoder's encoder returns.
    """
    if isinstance(tree, Mapping):
        inner = {f"[{key!r}]": value for key, value in tree.items()}
    elif isinstance(tree, list | tuple):
        inner = {f"[{position}]": value for position, value in enumerate(tree)}
    elif isinstance(tree, Tensor | type) or not hasattr(tree, "__dict__"):
        yield path, tree
        return
    else:
        inner = {f".{name}": value for name, value in vars(tree).items()}
    yield path, type(tree)
    for step, value in inner.items():
        yield from leaves(value, path + step)


def differences(got: Any, wanted: Any, device: torch.device) -> Iterator[str]:
    """Where and how one tree is not as the other: at all on a CPU, beyond the rounding of its dtype on a GPU."""
    for one, other in zip_longest(leaves(got), leaves(wanted)):
        if one is None or other is None or one[0] != other[0]:
            yield f"{'' if one is None else one[0]} is where eager has {'nothing' if other is None else other[0]}"
            return
        (path, leaf), (_, wanted_leaf) = one, other
        if isinstance(leaf, Tensor) and isinstance(wanted_leaf, Tensor):
            what = _difference(leaf, wanted_leaf, device)
            if what:
                yield f"{path} {what}"
        elif isinstance(leaf, Tensor) or isinstance(wanted_leaf, Tensor) or leaf != wanted_leaf:
            yield f"{path} is {leaf!r} and not {wanted_leaf!r}"


def not_finite(tree: Any) -> Iterator[str]:
    """The paths of floating-point tensors that hold infinities, or what is no number."""
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor) and not leaf.isfinite().all():
            yield path


def _difference(got: Tensor, wanted: Tensor, device: torch.device) -> str:
    for name in ("shape", "dtype", "device"):
        one, other = getattr(got, name), getattr(wanted, name)
        if one != other:
            return f"has {name} {one} and not {other}"
    if torch.equal(_bits(got), _bits(wanted)):
        return ""
    apart = (got.double() - wanted.double()).abs().max().item()
    allowed = 0.0
    if device.type != "cpu":
        allowed = ROUNDING.get(wanted.dtype, 0.0) * wanted.double().abs().max().item()
    # On a CPU also where only the sign of a zero is another.
    return "" if apart <= allowed and device.type != "cpu" else f"is off by up to {apart:.3g}; {allowed:.3g} is allowed"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
