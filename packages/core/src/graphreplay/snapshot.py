"""What a forward is about to write, as it was before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from graphreplay.errors import CaptureError, StateLostError
from graphreplay.generators import generator_id
from graphreplay.storage import byte_view
from graphreplay.tree import TENSOR_TYPES


class Snapshot:
    """The bytes of storages, and the states of generators, at one moment, to be put back later."""

    def __init__(self, tensors: Iterable[Tensor] = (), generators: Iterable[torch.Generator] = ()) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        for tensor in tensors:
            self.add(tensor)
        for generator in generators:
            self.add_generator(generator)

    @property
    def tensors(self) -> list[Tensor]:
        """One tensor for each storage, the first that was added."""
        return list(self._tensors.values())

    @property
    def generators(self) -> list[torch.Generator]:
        return [generator for generator, _ in self._generators.values()]

    def add(self, tensor: Tensor) -> None:
        """Saves the tensor's whole storage, unless it is saved already.

        Raises:
            CaptureError: it is of a subclass, whose storage may be none.
        """
        if type(tensor) not in TENSOR_TYPES:
            raise CaptureError(f"the forward writes a {type(tensor).__name__}, a tensor subclass; use plain tensors")
        storage = tensor.untyped_storage()._cdata
        if storage not in self._saved:
            with torch.inference_mode(False), torch.no_grad():
                live = byte_view(tensor)
                self._saved[storage] = (live, live.clone())
            self._tensors[storage] = tensor

    def add_generator(self, generator: torch.Generator) -> None:
        """Saves the state of a generator, unless it is saved already."""
        if generator_id(generator) not in self._generators:
            self.set_generator(generator, generator.get_state())

    def set_generator(self, generator: torch.Generator, state: Tensor) -> None:
        """Saves this state for a generator, whatever is saved already."""
        self._generators[generator_id(generator)] = (generator, state)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All of each storage as it is now, and as it was, as numbers of the dtype of the tensor in it."""
        for storage, tensor in self._tensors.items():
            live, saved = self._saved[storage]
            whole = live.numel() // tensor.element_size() * tensor.element_size()
            yield live[:whole].view(tensor.dtype), saved[:whole].view(tensor.dtype)

    def restore(self) -> None:
        """Puts all of it back.

        Raises:
            StateLostError: the device refused.
        """
        try:
            self._put_back()
        except Exception as error:
            raise StateLostError(
                f"what the forward wrote in a trial run could not be put back: {type(error).__name__}: {error}; load "
                "the module's state anew"
            ) from error
        except BaseException:  # an interrupt, which must not leave half of it
            self._put_back()
            raise

    def _put_back(self) -> None:
        for generator, state in self._generators.values():
            generator.set_state(state)
        with torch.inference_mode(False), torch.no_grad():
            for live, saved in self._saved.values():
                if live.untyped_storage().nbytes() >= saved.nbytes:  # else the forward has freed it, by resizing
                    live.copy_(saved)
