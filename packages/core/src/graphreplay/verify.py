"""Comparing a replay with an eager run of the same call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from graphreplay.attributes import AttributeSnapshot, attributes_kept
from graphreplay.capture import describe, quiet_capture
from graphreplay.entry import Entry
from graphreplay.errors import CaptureError
from graphreplay.generators import default_generators
from graphreplay.hostrandom import HostRandom
from graphreplay.request import Request
from graphreplay.snapshot import Snapshot
from graphreplay.state import GraphStore
from graphreplay.static import clone_static
from graphreplay.storage import CopyPlan
from graphreplay.tree import tensors, walk
from graphreplay.values import leaf_token
from graphreplay.weights import ModuleWatch

ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
"""How far apart, as a part of the tensor's largest magnitude, two results on a device may be for the rounding of its
dtype: a library may add in another order inside a capture. The parts are torch.testing's relative tolerances (10 times
that for float32, whose sums are longest); results on the CPU have to be equal."""


class EagerTwin:
    """A call's eager result, computed on copies of its kwargs. What the forward wrote is put back, and random
    generators are as before, so that the replay starts where this did.

    Raises:
        CaptureError: there is no room for the copies, or the forward changes Python state.
        Failure: another thread captures.
        StateLostError: what the forward wrote could not be put back.
        Exception: whatever the forward itself raises.
    """

    def __init__(self, store: GraphStore, entry: Entry, request: Request, watch: ModuleWatch) -> None:
        self._entry = entry
        self._inputs = request.leaves
        with _Copying():
            kwargs = clone_static(request.kwargs)
            before = Snapshot(*entry.changes)
        given = [leaf for leaf in tensors(kwargs) if leaf.device == store.device]
        self._written = [given[position] for position in entry.written]
        host_random, attributes = HostRandom(store.device), AttributeSnapshot(watch.modules)
        try:
            with quiet_capture(store.device), watch.kept(()), attributes_kept(attributes), host_random.watched():
                self.outputs = store.module(**kwargs)
                with _Copying():
                    self._after = Snapshot(*entry.changes)
                    for generator in default_generators(store.device):
                        self._after.add_generator(generator)
        finally:
            host_random.put_back()
            before.restore()

    def difference(self, outputs: Any) -> str | None:
        """What is not as eager, after the replay gave these outputs; or None."""
        try:
            return self._difference(outputs)
        except Exception as error:
            return f"the two cannot be compared: {describe(error)}"

    def _difference(self, outputs: Any) -> str | None:
        entry, inputs = self._entry, self._inputs
        for position, wanted in zip(entry.written, self._written, strict=True):
            found = _tensors_differ(inputs[position], wanted)
            if found is not None:
                return f"input {position}, which the forward writes: {found}"
        for now, wanted in self._after.pairs():
            found = _tensors_differ(now, wanted)
            if found is not None:
                return f"a tensor of shape {tuple(now.shape)} that the forward writes: {found}"
        return next(_differences(outputs, self.outputs), None)

    def take_over(self) -> Any:
        """Leaves everything as the eager run did, and returns its outputs."""
        self._after.restore()
        CopyPlan(self._written).copy([self._inputs[position] for position in self._entry.written], self._written)
        return self.outputs


class _Copying:
    """Turns an error in its body into a CaptureError. A class, since the frames of a generator would keep the error,
    and with it the graph, alive until the next collection."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            raise CaptureError(f"there is no copy to compare with: {describe(error)}") from error


def _differences(got: Any, wanted: Any) -> Iterator[str]:
    for one, other in zip_longest(walk(got, "output"), walk(wanted, "output")):
        if one is None or other is None or one[0] != other[0]:
            places = [None if leaf is None else leaf[0] for leaf in (one, other)]
            yield f"a replay has {places[0]} where eager has {places[1]}"
            return
        (path, leaf), (_, wanted_leaf) = one, other
        if isinstance(leaf, Tensor) and isinstance(wanted_leaf, Tensor):
            found = _tensors_differ(leaf, wanted_leaf)
            if found is not None:
                yield f"{path}: {found}"
        elif isinstance(leaf, Tensor) or isinstance(wanted_leaf, Tensor) or leaf_token(leaf) != leaf_token(wanted_leaf):
            yield f"{path}: {leaf!r} and not {wanted_leaf!r}"


def _tensors_differ(got: Tensor, wanted: Tensor) -> str | None:
    if (got.shape, got.dtype, got.device) != (wanted.shape, wanted.dtype, wanted.device):
        kinds = [f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}" for tensor in (got, wanted)]
        return f"{kinds[0]} and not {kinds[1]}"
    with torch.inference_mode():
        wide = torch.complex128 if wanted.is_complex() else torch.float64 if wanted.is_floating_point() else None
        one, other = (got, wanted) if wide is None else (got.to(wide), wanted.to(wide))
        apart = (one != other) & ~(one.isnan() & other.isnan())
        part = ROUNDING.get(wanted.dtype.to_real() if wanted.is_complex() else wanted.dtype, 0.0)
        if part and wanted.device.type != "cpu" and wanted.numel():
            finite = other.abs().nan_to_num(0.0, 0.0, 0.0)
            apart &= ~((one - other).abs() <= part * finite.max())
        count = int(apart.sum())
        if not count:
            return None
        place = tuple(apart.nonzero()[0].tolist())
        what = f"{got[place].item()} and not {wanted[place].item()} at {place}" if place else f"{got} and not {wanted}"
        return f"{count} of {wanted.numel()} values differ, {what}"
