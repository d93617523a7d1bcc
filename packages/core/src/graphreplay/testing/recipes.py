"""Recipes of kwargs trees, which the strategies draw.

A recipe builds its tree as often as needed: two builds have the same structure, with other tensor values and other
objects throughout.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from graphreplay.testing.samples import (
    VALUES,
    Color,
    FrozenPair,
    Level,
    Output,
    PackedLayout,
    Pair,
    Point,
    Word,
)

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
LAYOUTS = ("contiguous", "transposed", "sliced", "offset", "expanded", "channels_last", "parameter")
_BASE_BYTES = 96


@dataclass
class Build:
    """One run of a recipe: where its random numbers come from, and the storages that its tensors share."""

    rng: random.Random
    shuffle: bool = False
    bases: dict[int, Tensor] = field(default_factory=dict)


Recipe: TypeAlias = Callable[[Build], Any]


# -------------------------------------------------------------------------------------------- tensors


def random_values(shape: Sequence[int], dtype: torch.dtype, rng: random.Random) -> Tensor:
    """A contiguous tensor of random bits: infinities and NaNs of any payload are among them."""
    flat = torch.empty(tuple(shape), dtype=dtype).reshape(-1)
    data = torch.tensor(list(rng.randbytes(flat.numel() * flat.element_size())), dtype=torch.uint8)
    return ((data & 1).bool() if dtype is torch.bool else data.view(dtype)).reshape(tuple(shape))


def lay_out(shape: Sequence[int], dtype: torch.dtype, layout: str, rng: random.Random) -> Tensor:
    """A tensor of random values that lies in its storage in one of ``LAYOUTS``, where its shape allows that."""
    if layout == "transposed" and len(shape) > 1:
        return random_values(shape[::-1], dtype, rng).permute(*range(len(shape) - 1, -1, -1))
    if layout == "sliced" and shape:
        return random_values([*shape[:-1], 2 * shape[-1] + 1], dtype, rng)[..., 1::2]
    if layout == "offset" and shape:
        return random_values([shape[0] + 1, *shape[1:]], dtype, rng)[1:]
    if layout == "expanded" and shape:
        return random_values([1, *shape[1:]], dtype, rng).expand(tuple(shape))
    if layout == "channels_last" and len(shape) == 4:
        return random_values(shape, dtype, rng).to(memory_format=torch.channels_last)
    if layout == "parameter" and dtype.is_floating_point:
        return nn.Parameter(random_values(shape, dtype, rng))
    return random_values(shape, dtype, rng)


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to 4 dimensions; some have no element, and some dimensions have length 1."""
    return st.lists(st.integers(0, 3), max_size=4).map(tuple)


def tensor_recipes() -> st.SearchStrategy[Recipe]:
    def recipe(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Recipe:
        return lambda build: lay_out(shape, dtype, layout, build.rng)

    return st.builds(recipe, shapes(), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS))


def shared_recipes() -> st.SearchStrategy[Recipe]:
    """Views over one of two storages, which other tensors of the tree view too."""

    def recipe(slot: int, dtype: torch.dtype, start: int, size: int, step: int, whole: bool) -> Recipe:
        def build_view(build: Build) -> Tensor:
            if slot not in build.bases:
                # Bools among the dtypes: bytes of 0 and 1 are valid in all of them.
                build.bases[slot] = random_values([_BASE_BYTES], torch.bool, build.rng).view(torch.uint8)
            base = build.bases[slot].view(dtype)
            return base if whole else base[start : start + size : step]

        return build_view

    return st.builds(
        recipe,
        st.integers(0, 1),
        st.sampled_from(DTYPES),
        st.integers(0, 5),
        st.integers(0, 6),
        st.integers(1, 2),
        st.booleans(),
    )


# ------------------------------------------------------------------------------------- values and names


def value_recipes() -> st.SearchStrategy[Recipe]:
    known = st.sampled_from(VALUES).map(lambda make: lambda build: make())
    layout: Recipe = lambda build: PackedLayout(2)  # noqa: E731
    free = st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3))
    return st.one_of(known, free.map(lambda value: lambda build: value), st.just(layout))


def str_keys() -> st.SearchStrategy[str]:
    """Names, some of which need escaping in Python source."""
    return st.one_of(st.sampled_from("abcdef"), st.text(st.sampled_from("ab\"'\\\n\0[]{:é\ud800"), max_size=3))


def keys() -> st.SearchStrategy[Any]:
    """Keys of dicts, of every kind that has a stable value."""
    scalars = st.sampled_from(
        (
            0,
            1,
            True,
            None,
            1.5,
            -0.0,
            float("inf"),
            2j,
            b"a",
            Color.RED,
            Level.TWO,
            Word.A,
            torch.float16,
            np.int8(7),
            ...,
        )
    )
    scalars = st.one_of(str_keys(), scalars)
    return st.one_of(scalars, st.tuples(scalars), st.tuples(scalars, scalars))


# ----------------------------------------------------------------------------------------- containers


def dict_recipe(items: dict[Any, Recipe]) -> Recipe:
    def build_dict(build: Build) -> dict[Any, Any]:
        order = list(items)
        if build.shuffle:
            build.rng.shuffle(order)
        return {key: items[key](build) for key in order}

    return build_dict


def fixed(make: Callable[[Sequence[Any]], Any], parts: Sequence[Recipe]) -> Recipe:
    return lambda build: make([part(build) for part in parts])


_RECORDS: tuple[Callable[[Sequence[Any]], Any], ...] = (
    Point._make,
    lambda parts: Pair(*parts),
    lambda parts: FrozenPair(*parts),
    lambda parts: Output(*parts),
)


def container_recipes(inner: st.SearchStrategy[Recipe]) -> st.SearchStrategy[Recipe]:
    some = st.lists(inner, max_size=4)
    return st.one_of(
        st.dictionaries(keys(), inner, max_size=4).map(dict_recipe),
        st.dictionaries(keys(), inner, max_size=3).map(
            lambda items: lambda build: OrderedDict((key, part(build)) for key, part in items.items())
        ),
        st.builds(fixed, st.sampled_from((list, tuple)), some),
        st.builds(fixed, st.sampled_from(_RECORDS), st.lists(inner, min_size=2, max_size=2)),
    )
