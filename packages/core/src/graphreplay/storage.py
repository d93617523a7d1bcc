"""Which tensors share storage, and copies that keep it so.

Two tensors over one storage are one tensor with two names: a static copy that made them two would no longer show the
writes of one through the other. So a list of tensors is copied by its storages: a tensor alone in its storage is
copied by itself, and tensors that share one (or that overlap themselves, as expanded ones do) are copied as one region
of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_ALIGNMENT = 16
"""A copied region keeps its offset modulo this many bytes, so that every dtype in it stays aligned."""


def storage_ids(tensors: Sequence[Tensor]) -> list[int]:
    """One number a tensor, equal for two living tensors exactly if they share storage."""
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor has elements and no memory, as after ``untyped_storage().resize_(0)``. Its ``data_ptr()`` need
    not be 0 then, but where it begins in its storage."""
    return bool(tensor.numel() and not tensor.untyped_storage().nbytes())


def any_freed(tensors: Sequence[Tensor]) -> bool:
    """As ``is_freed`` of any, and quick for tensors that begin where their storages do."""
    suspect = not all(map(Tensor.data_ptr, tensors)) or any(map(Tensor.storage_offset, tensors))
    return suspect and any(map(is_freed, tensors))


def sharing_pattern(tensors: Sequence[Tensor], ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Who shares storage with whom, as part of a key; empty if no two tensors do.

    Returns:
        For each tensor that shares: its position, the position of the first one in that storage, its distance from
        that one in bytes, and the position where the very same tensor object came first.
    """
    first: dict[int, int] = {}
    first_object: dict[int, int] = {}
    pattern = []
    for position, storage in enumerate(ids):
        start = first.setdefault(storage, position)
        same = first_object.setdefault(id(tensors[position]), position)
        if start != position:
            distance = _byte_offset(tensors[position]) - _byte_offset(tensors[start])
            pattern.append((position, start, distance, same))
    return tuple(pattern)


def overlap_across_storages(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors in different storages lie in the same memory, as two imports of one foreign buffer do."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + extent(tensor), storage)
        for tensor, storage in zip(tensors, storage_ids(tensors), strict=True)
        if tensor.numel()
    )
    return any(a[1] > b[0] and a[2] != b[2] for a, b in pairwise(spans))


class _Region:
    """A stretch of bytes in one storage that holds several tensors, or one that overlaps itself."""

    def __init__(self, positions: list[int], tensors: Sequence[Tensor]) -> None:
        self.positions = positions
        offsets = [_byte_offset(tensors[p]) for p in positions]
        start = min(offsets)
        self.offsets = [offset - start for offset in offsets]
        sizes = [extent(tensors[p]) for p in positions]
        ends = [offset + size for offset, size in zip(self.offsets, sizes, strict=True) if size]
        self.nbytes = max(ends, default=0)  # tensors without elements may begin beyond the end of their storage
        self.lazy = [_lazy_bits(tensors[p]) for p in positions]
        self.padding = start % _ALIGNMENT

    def allocate(self, like: Sequence[Tensor], into: list[Tensor]) -> None:
        size = self.padding + self.nbytes
        storage = torch.empty(size, dtype=torch.uint8, device=like[self.positions[0]].device).untyped_storage()
        for position, offset in zip(self.positions, self.offsets, strict=True):
            model = like[position]
            start = (self.padding + offset) // model.element_size()
            view = torch.empty(0, dtype=model.dtype, device=model.device)
            view.set_(storage, start, model.shape, model.stride())
            view = torch._conj(view) if model.is_conj() else view
            into[position] = torch._neg_view(view) if model.is_neg() else view

    def bytes_of(self, tensors: Sequence[Tensor]) -> Tensor:
        tensor = tensors[self.positions[0]]
        start = _byte_offset(tensor) - self.offsets[0]
        return byte_view(tensor, start, self.nbytes)


class CopyPlan:
    """How to copy a list of tensors onto another of the same shapes, strides, dtypes and sharing.

    Built once from one such list; then every method takes lists of the same layout.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        by_storage: dict[int, list[int]] = {}
        first: dict[int, int] = {}
        self._again: list[tuple[int, int]] = []
        """Positions of tensor objects that came before, and where: a forward can tell one object from two."""
        for position, (tensor, storage) in enumerate(zip(like, storage_ids(like), strict=True)):
            if first.setdefault(id(tensor), position) == position:
                by_storage.setdefault(storage, []).append(position)
            else:
                self._again.append((position, first[id(tensor)]))
        self._regions: list[_Region] = []
        self._dense: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        self._count = len(like)
        self._sparse: list[int] = []
        for positions in by_storage.values():
            tensor = like[positions[0]]
            gaps, overlaps = layout(tensor)
            if overlaps or len(positions) > 1:
                self._regions.append(_Region(positions, like))
            elif gaps or any(_lazy_bits(tensor)):
                self._sparse.append(positions[0])
            else:
                self._dense.setdefault((tensor.dtype, tensor.device), []).append(positions[0])
        self.nbytes = sum(extent(like[p]) for group in self._dense.values() for p in group)
        self.nbytes += sum(extent(like[p]) for p in self._sparse) + sum(r.nbytes for r in self._regions)

        self.dense = sorted(p for group in self._dense.values() for p in group)
        """Positions of tensors alone in their storage, without gaps and lazy bits: their bytes are their values."""
        self.is_simple = len(self.dense) == self._count and all(tensor.numel() for tensor in like)
        """Whether that is all of them, none empty: then ``torch.empty_like`` gives tensors of the same layout."""

    @property
    def has_regions(self) -> bool:
        """Whether some tensors share storage or overlap themselves."""
        return bool(self._regions)

    def uncopyable(self, source: Sequence[Tensor]) -> int | None:
        """The position of a tensor that must be copied by its bytes, though it is lazily conjugated or negated where
        the plan's is not (or the other way round), so that its bytes mean other values; or None."""
        for region in self._regions:
            for position, lazy in zip(region.positions, region.lazy, strict=True):
                if _lazy_bits(source[position]) != lazy:
                    return position
        return None

    def allocate(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the same layout in storages of their own, values undefined."""
        if self.is_simple:
            return list(map(torch.empty_like, like))
        into = list(like)
        for region in self._regions:
            region.allocate(like, into)
        for position in (*self._sparse, *(p for group in self._dense.values() for p in group)):
            model = like[position]
            into[position] = torch.empty_strided(model.shape, model.stride(), dtype=model.dtype, device=model.device)
        for position, first in self._again:
            into[position] = into[first]
        return into

    def copy(self, into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        """Copies values; both lists are laid out like the one of the plan, and ``uncopyable(source)`` is None."""
        for positions in self._dense.values():
            if len(positions) == 1:
                into[positions[0]].copy_(source[positions[0]])
            else:
                # One launch a dtype: pairs of one dtype, device and dense layout take the fused kernel.
                torch._foreach_copy_([into[p] for p in positions], [source[p] for p in positions])
        self.copy_rest(into, source)

    def pick_dense(self, items: Sequence[T]) -> Sequence[T]:
        """Of one item for each tensor, those at the positions in ``dense``."""
        return items if len(self.dense) == self._count else [items[p] for p in self.dense]

    def copy_rest(self, into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        """As ``copy``, for the tensors that ``pick_dense`` leaves out."""
        for position in self._sparse:
            into[position].copy_(source[position])
        for region in self._regions:
            region.bytes_of(into).copy_(region.bytes_of(source))

    def clone(self, source: Sequence[Tensor]) -> list[Tensor]:
        """Fresh tensors with the values of ``source``."""
        into = self.allocate(source)
        self.copy(into, source)
        return into


def maker_of(like: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Makes tensors of these shapes, strides and dtypes, on their one device, values undefined.

    As ``torch.empty_like`` does for dense tensors, in half the time: by what compiled code allocates, which takes the
    current device of a type.
    """
    device = like[0].device if like else torch.device("cpu")
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    current: Callable[[], int | None] = getattr(torch._C, f"_{device.type}_getDevice", lambda: None)
    if quick is None:
        return lambda: list(map(torch.empty_like, like))
    makers = [partial(quick, tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in like]
    return lambda: [make() for make in makers] if current() == device.index else list(map(torch.empty_like, like))


def byte_view(tensor: Tensor, start: int = 0, nbytes: int | None = None) -> Tensor:
    """``nbytes`` bytes of the tensor's storage from byte ``start`` on (all of it by default), as uint8."""
    storage = tensor.untyped_storage()
    size = storage.nbytes() - start if nbytes is None else nbytes
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, start, (size,), (1,))


def _lazy_bits(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()


def _byte_offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def extent(tensor: Tensor) -> int:
    """Bytes from the tensor's first element to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * int(tensor.element_size())


def layout(tensor: Tensor) -> tuple[bool, bool]:
    """Whether a tensor leaves gaps between its elements, and whether elements (may) overlap."""
    if tensor.numel() == 0:
        return False, False
    reach = 1  # how far, in elements, the dimensions seen so far extend
    gaps = False
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride < reach:
            return gaps, True
        gaps = gaps or stride > reach
        reach += (size - 1) * stride
    return gaps, False
