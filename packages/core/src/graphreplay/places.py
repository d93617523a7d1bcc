"""Tensors from outside that a forward moves to other memory, which a replay would not do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import Tensor

from graphreplay.attributes import StatefulForwardError
from graphreplay.looks import move_back, places_of
from graphreplay.tree import TENSOR_TYPES


class Places:
    """Where the outside tensors of a forward are, as far as they are known before it uses them. It holds none of them.

    Args:
        known: those that are to be put back from the first.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        self._met: dict[int, tuple[ref[Tensor], Tensor, list[list[Any]]]] = {}
        """By the object's id; where that has gone, another one may have it."""
        for tensor in known:
            self.note(tensor)

    def note(self, tensor: Tensor) -> None:
        """The forward is about to use a tensor. One that was noted before may have moved since."""
        met = self._met.get(id(tensor))
        if type(tensor) in TENSOR_TYPES and (met is None or met[0]() is not tensor):
            self._met[id(tensor)] = ref(tensor), tensor.detach(), places_of([tensor])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Puts the tensors back after a run of the forward, and refuses one that moved some.

        Raises:
            StatefulForwardError: the body ran and moved a tensor.
        """
        moved: list[Tensor] = []
        try:
            yield
        finally:
            for tensor_of, was, place in self._met.values():
                tensor = tensor_of()
                if tensor is not None and places_of([tensor]) != place:
                    move_back(tensor, was, place)
                    moved.append(tensor)
        if moved:
            raise StatefulForwardError(
                f"the forward moves a tensor of shape {tuple(moved[0].shape)} from outside its module to other memory, "
                "or changes how it is seen, which a replay would not do; update it in place"
            )
