"""Hypothesis strategies for kwargs trees: any tree, pairs of trees that are equal or nearly so, and trees to refuse."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from hypothesis import strategies as st

from graphreplay.testing.recipes import (
    Build,
    Recipe,
    container_recipes,
    dict_recipe,
    fixed,
    keys,
    shared_recipes,
    str_keys,
    tensor_recipes,
    value_recipes,
)
from graphreplay.testing.samples import NEAR, OPAQUE, VALUES, FrozenPair, Output, Pair, Point

Tree: TypeAlias = dict[str, Any]


def _recipes() -> st.SearchStrategy[Recipe]:
    leaves = st.one_of(tensor_recipes(), shared_recipes(), value_recipes())
    return st.recursive(leaves, container_recipes, max_leaves=8)


def _kwargs_recipes() -> st.SearchStrategy[Recipe]:
    return st.dictionaries(str_keys(), _recipes(), max_size=5).map(dict_recipe)


def _builds(shuffle: bool = False) -> st.SearchStrategy[Build]:
    return st.integers(0, 2**32).map(lambda seed: Build(random.Random(seed), shuffle))


def kwargs_trees() -> st.SearchStrategy[Tree]:
    """Keyword arguments with tensors, values and containers of every supported kind, nested and sharing storage."""
    return st.builds(lambda recipe, build: recipe(build), _kwargs_recipes(), _builds())


def restaged_pairs() -> st.SearchStrategy[tuple[Tree, Tree]]:
    """Two trees of the same structure, dict order and sharing of storage, with other tensor values."""
    return st.builds(lambda recipe, a, b: (recipe(a), recipe(b)), _kwargs_recipes(), _builds(), _builds())


def equal_pairs() -> st.SearchStrategy[tuple[Tree, Tree]]:
    """Two trees of the same structure with other tensor values, the dicts of the second one shuffled."""
    return st.builds(lambda recipe, a, b: (recipe(a), recipe(b)), _kwargs_recipes(), _builds(), _builds(shuffle=True))


@dataclass(frozen=True)
class Hole:
    """A tree with one place left open. ``plug(recipe)`` is the recipe of a tree with that place filled."""

    plug: Callable[[Recipe], Recipe]
    path: str
    """The open place as a Python expression over ``kwargs``."""
    drops_none: bool = False
    """The open place is in a mapping that leaves out what is None."""


def holes(max_depth: int = 5) -> st.SearchStrategy[Hole]:
    """Trees with one place left open at any depth, in a container of any kind."""
    return st.builds(_join, str_keys(), st.lists(_steps(), max_size=max_depth), _kwargs_recipes())


def _join(name: str, steps: list[Hole], others: Recipe) -> Hole:
    def plug(recipe: Recipe) -> Recipe:
        for step in reversed(steps):
            recipe = step.plug(recipe)
        return lambda build: {**others(build), name: recipe(build)}

    path = f"kwargs[{name!r}]" + "".join(step.path for step in steps)
    return Hole(plug, path, bool(steps) and steps[-1].drops_none)


def _steps() -> st.SearchStrategy[Hole]:
    """One container around the open place, and the accessor of that place."""
    leaf = st.one_of(tensor_recipes(), value_recipes())

    def in_dict(make: Callable[[Any], Any], key: Any, others: dict[Any, Recipe]) -> Hole:
        def plug(recipe: Recipe) -> Recipe:
            return lambda build: make({**dict_recipe(others)(build), key: recipe(build)})

        return Hole(plug, f"[{_source(key)}]")

    def in_sequence(make: Callable[[Any], Any], before: list[Recipe], after: list[Recipe]) -> Hole:
        return Hole(lambda recipe: fixed(make, [*before, recipe, *after]), f"[{len(before)}]")

    def in_record(kind: tuple[Callable[..., Any], str, str], second: bool, other: Recipe) -> Hole:
        make, *accessors = kind

        def plug(recipe: Recipe) -> Recipe:
            return fixed(lambda parts: make(*parts), [other, recipe] if second else [recipe, other])

        return Hole(plug, accessors[second], make is Output)

    records = ((Point, ".x", ".y"), (Pair, ".left", ".right"), (FrozenPair, ".left", ".right"))
    mapping = (Output, '["first"]', '["second"]')
    siblings = st.lists(leaf, max_size=2)
    return st.one_of(
        st.builds(in_dict, st.sampled_from((dict, OrderedDict)), keys(), st.dictionaries(keys(), leaf, max_size=2)),
        st.builds(in_sequence, st.sampled_from((list, tuple)), siblings, siblings),
        st.builds(in_record, st.sampled_from((*records, mapping)), st.booleans(), leaf),
    )


def _source(key: Any) -> str:
    """A key as Python source, in the plainest way."""
    if type(key) is tuple:
        return "(" + "".join(_source(part) + "," for part in key) + ")"
    if isinstance(key, Enum):
        return f"{type(key).__name__}({key.value!r})"
    return 'float("inf")' if key == float("inf") else repr(key)


def opaque_trees() -> st.SearchStrategy[tuple[Tree, str, Any]]:
    """A tree, the path to the one object in it that may hide a tensor or has no stable value, and that object."""

    def plant(hole: Hole, make: Callable[[], Any], build: Build) -> tuple[Tree, str, Any]:
        opaque = make()
        return hole.plug(lambda _: opaque)(build), hole.path, opaque

    return st.builds(plant, holes(), st.sampled_from(list(OPAQUE.values())), _builds())


def near_miss_pairs() -> st.SearchStrategy[tuple[Tree, Tree, str]]:
    """A tree, a copy in which exactly one place differs, and the path of that place.

    What differs: a tensor's shape, strides or dtype; a value, its type or the sign of its zero; a container's type; one
    name, its type or its order.
    """

    def build(hole: Hole, change: tuple[Recipe, Recipe], seed: int) -> tuple[Tree, Tree, str] | None:
        if hole.drops_none and any(recipe(Build(random.Random(seed))) is None for recipe in change):
            return None  # the names of the mapping would differ, and not the place itself
        was, now = (hole.plug(recipe)(Build(random.Random(seed))) for recipe in change)
        return was, now, hole.path

    makers = st.lists(st.sampled_from(VALUES), min_size=2, max_size=2, unique=True)
    changed_value = makers.map(lambda two: (_constant(two[0]), _constant(two[1])))
    near = st.sampled_from(NEAR).map(lambda two: (_constant(two[0]), _constant(two[1])))
    changed_tensor = st.tuples(tensor_recipes(), tensor_recipes()).filter(
        lambda two: _layout_of(two[0]) != _layout_of(two[1])
    )
    pairs = st.builds(build, holes(), st.one_of(near, changed_value, changed_tensor), st.integers(0, 2**32))
    return pairs.filter(lambda pair: pair is not None).map(lambda pair: pair or ({}, {}, ""))


def _constant(make: Callable[[], Any]) -> Recipe:
    return lambda build: make()


def _layout_of(recipe: Recipe) -> tuple[Any, ...]:
    tensor = recipe(Build(random.Random(0)))
    return tensor.shape, tensor.stride(), tensor.dtype
