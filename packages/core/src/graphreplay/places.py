"""Tensors from outside that a forward moves to other memory, which a replay would not do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from graphreplay.attributes import StatefulForwardError
from graphreplay.looks import places_of
from graphreplay.tree import TENSOR_TYPES


class Places:
    """Where the outside tensors of a forward were when it came by them first.

    Args:
        kept: ids of storages whose tensors are looked after elsewhere, as weights are.
    """

    def __init__(self, kept: Set[int]) -> None:
        self._kept = kept
        self._met: dict[int, tuple[Tensor, list[list[Any]]]] = {}

    def note(self, storage: int, tensor: Tensor) -> None:
        """The forward is about to use a tensor over this storage. The tensor itself is not held."""
        if storage not in self._kept and type(tensor) in TENSOR_TYPES:
            self._met[storage] = tensor.detach(), places_of([tensor])

    @contextmanager
    def kept(self, outside: Mapping[int, Tensor]) -> Iterator[None]:
        """Puts these tensors, by storage, back after a run of the forward, and refuses one that moved some.

        Raises:
            StatefulForwardError: the body ran and moved a tensor.
        """
        moved: list[Tensor] = []
        try:
            yield
        finally:
            for storage, (was, place) in self._met.items():
                tensor = outside.get(storage)
                if tensor is not None and places_of([tensor]) != place:
                    tensor.data = was
                    moved.append(tensor)
        if moved:
            raise StatefulForwardError(
                f"the forward moves a tensor of shape {tuple(moved[0].shape)} from outside its module to other memory, "
                "or changes how it is seen, which a replay would not do; update it in place"
            )
