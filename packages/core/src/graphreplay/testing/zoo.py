"""Small forwards, each with one hazard for whoever captures it; every one takes ``x``, rows of WIDTH numbers.

GRAPHED are captured and replayed. SYNCING make the host wait for the device and STATEFUL keep Python state, so both end
up eager; the text beside each must appear in the reason. Entries are made anew by ``make()``.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8


def rows(count: int, seed: int = 0) -> Tensor:
    """A float tensor of ``count`` rows, on the CPU, that the seed determines."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Specimen:
    """One forward of the zoo.

    Attributes:
        make: builds the forward, the same each time.
        reason: for forwards that end up eager, text that the reason holds.
        random: draws random numbers, so that only the CPU repeats eager's bit for bit.
        host_constant: copies a constant of its code from the host, which a device refuses to capture and the CPU does
            not notice.
    """

    name: str
    make: Callable[[], Callable[..., Any]]
    reason: str = ""
    random: bool = False
    host_constant: bool = False

    def __str__(self) -> str:
        return self.name


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[], device_type="cuda"):
            torch.manual_seed(0)
            return make()

    return build


# --------------------------------------------------------------------------- modules that can be captured


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Two heads of scaled dot-product attention behind one projection, with views all along."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(0, 1) for part in self.qkv(x).chunk(3, dim=-1))
        return functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)


class Convolution(nn.Module):
    """A one-dimensional convolution over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.t()[None])[0]  # type: ignore[no-any-return]


class Recurrence(nn.Module):
    """A Python loop over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> list[Tensor]:
        state = x.new_zeros(1, WIDTH)
        return [state := self.cell(row[None], state) for row in x]


class TrainingNorm(nn.Module):
    """Batch norm in training mode, whose running statistics change without any sign."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


class Counter(nn.Module):
    """Counts its calls in a buffer and returns the count with the result."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        return x * self.calls, self.calls


class KeyValueCache(nn.Module):
    """Writes its first row into a ring of rows, at a position kept on the device."""

    ring: Tensor
    position: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(4, WIDTH))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.ring.index_copy_(0, self.position, x[:1])
        self.position.add_(1).remainder_(4)
        return x @ self.ring.t()


class ReturnsWeight(nn.Module):
    """Returns its weight, a view of it, and its buffer."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("offset", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x @ self.weight, self.weight, self.weight.t(), self.offset


class LazyWeight(nn.Module):
    """Makes its weight and a buffer at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = None
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = nn.Parameter(torch.full((x.shape[-1],), 2.0, device=x.device))
            self.scale = torch.full((1,), 0.5, device=x.device)
        return x * self.weight * self.scale


class Keyword(nn.Module):
    """Gives a module of torch, whose parameter is called ``input``, the name ``x``."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


# ------------------------------------------------------------------------- functions that can be captured


def writes_input(*, x: Tensor) -> Tensor:
    x.mul_(2).add_(1)
    return x.sum(0)


def writes_slice_of_input(*, x: Tensor) -> Tensor:
    x[:, 0] = 5.0
    x[1:].neg_()
    return x.sum(0)


def returns_written_input(*, x: Tensor) -> Tensor:
    return x.add_(1)


def two_names_of_one_storage(*, x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, y[1:], y.t(), y


def strided_outputs(*, x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    return y.t(), (y * 2)[:, ::2], (y * 3)[:1].expand(4, -1), (y * 4).unfold(1, 4, 2), y.new_empty(0, 3)


def constants(*, x: Tensor) -> tuple[Tensor, ...]:
    return torch.ones(3, device=x.device), torch.arange(5, device=x.device), x.new_full((2,), 7.0)


def host_constant(*, x: Tensor) -> Tensor:
    scale = torch.tensor([1.0, 2.0], device=x.device)
    scale.add_(1)  # a constant that is written must start afresh at each call
    return x[:, :2] * scale


def view_in_place(*, x: Tensor) -> Tensor:
    y = (x * 2).t_()
    y.unsqueeze_(0).squeeze_(0)
    return y + 1


def pieces(*, x: Tensor) -> list[Any]:
    y = x.sin()
    return [y.chunk(2, dim=1), y.split([1, 3, 4], dim=1), y.unbind(1)[0]]


def autocast_inside(*, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return x @ x.t() + torch.mm(x, x.t())


def indexed_by_host_list(*, x: Tensor) -> Tensor:
    y = x.clone()
    y[[0, 1], [2, 3]] = 1.0
    return y


def scattered(*, x: Tensor) -> Tensor:
    order = x.argsort(dim=1)
    return torch.zeros_like(x).scatter_(1, order, x.cumsum(1)) + x.gather(1, order)


def selected(*, x: Tensor) -> Tensor:
    y = torch.where(x > 0, x, -1.0)
    return y.masked_fill(y > 1, 1.0).clamp_(max=0.5)


def fills_by_mask(*, x: Tensor) -> Tensor:
    y = x.clone()
    y.masked_fill_(y > 0, 3.0)
    return torch.where(y < 0, y, y * 2)


def out_variants(*, x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    torch.mul(x, 2, out=result)
    torch.add(result, x, out=result)
    return torch.cat([result, x], out=x.new_empty(2 * x.shape[0], x.shape[1]))


def foreach(*, x: Tensor) -> list[Tensor]:
    parts = list(torch._foreach_mul([x, x + 1], 2.0))
    torch._foreach_add_(parts, [x, x])
    return parts


def complex_numbers(*, x: Tensor) -> tuple[Tensor, ...]:
    z = torch.view_as_complex(x.unflatten(1, (-1, 2)).contiguous()) * 1j
    return z, torch.view_as_real(z), (z * 2).conj(), torch.fft.fft(x).abs()


def conjugate_views(*, x: Tensor) -> tuple[Tensor, ...]:
    z = torch.complex(x, x + 1)
    return z, z.conj(), z.conj().imag


def draws(*, x: Tensor) -> tuple[Tensor, ...]:
    return torch.rand_like(x) + x, torch.randn(3, device=x.device), x.new_empty(4).uniform_(), x.sigmoid().bernoulli()


def in_float64(*, x: Tensor) -> Tensor:
    return (x.double().softmax(-1).float().half() * 2).to(torch.bfloat16)


# ------------------------------------------------------------------------------------ trees of outputs


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass
class Record:
    hidden: Tensor
    length: int
    rest: Any = None


@dataclass
class ModelResult(OrderedDict):  # type: ignore[type-arg]
    """A dataclass that is a dict of its fields that are set, as in transformers."""

    logits: Tensor
    hidden: Tensor | None = None
    cache: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value


def output_trees(*, x: Tensor) -> dict[Any, Any]:
    return {
        "pair": Pair(x + 1, (None, x.shape)),
        "record": Record(x * 2, x.shape[0], [x.sum(), "text", 1.5]),
        "result": ModelResult(x * 3, cache=x - 1),
        "sorted": x.sort(dim=1),
        "ordered": OrderedDict(b=x.mean(), a=None),
        0: [],
    }


# ----------------------------------------------------------------------------------- Python state, not captured


class CountsInPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class KeepsHistory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []
        self.memo: dict[int, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(len(self.history))
        self.memo[len(self.history)] = 1
        return x * len(self.history)


class StoresActivation(nn.Module):
    last: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.last + 1


class RebindsBuffer(nn.Module):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.sum(0)
        return x + self.total


class InnerState(nn.Module):
    """The state is one module further in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = CountsInPython()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def _writes_rows_by_mask(*, x: Tensor) -> Tensor:
    y = x.clone()
    y[y[:, 0] > 0] = y.mean(0)
    return y


def _module(make: Callable[[], nn.Module], **flags: Any) -> Specimen:
    return Specimen(make.__name__, _seeded(make), **flags)


def _function(forward: Callable[..., Any], name: str = "", **flags: Any) -> Specimen:
    return Specimen(name or forward.__name__, lambda: forward, **flags)


GRAPHED = [
    *map(_module, (MLP, Attention, Convolution, Recurrence, TrainingNorm, Counter, KeyValueCache, ReturnsWeight)),
    _module(LazyWeight),
    Specimen("Dropout", lambda: Keyword(nn.Dropout(0.5)), random=True),
    *map(_function, (writes_input, writes_slice_of_input, returns_written_input, two_names_of_one_storage)),
    *map(_function, (strided_outputs, constants, view_in_place, pieces, autocast_inside, scattered, selected)),
    *map(_function, (fills_by_mask, out_variants, foreach, complex_numbers, conjugate_views, in_float64)),
    _function(output_trees),
    _function(draws, random=True),
    _function(host_constant, host_constant=True),
    _function(indexed_by_host_list, host_constant=True),
    _function(lambda *, x: x, "returns_input"),
    _function(lambda *, x: (x[1:], x.t(), x), "returns_views_of_input"),
    _function(lambda *, x: None, "empty"),
    _function(lambda *, x: {"a": None, "b": x.shape, "c": 3}, "no_tensor_out"),
    _function(lambda *, x: torch.einsum("ij,kj->ik", x, x), "einsum"),
]


_SYNCS: dict[str, Callable[..., Any]] = {
    "item": lambda *, x: x * x[0, 0].item(),
    "float": lambda *, x: x * float(x.sum()),
    "int": lambda *, x: x * int(x.argmax()),
    "bool": lambda *, x: x + 1 if x.sum() > 0 else x - 1,
    "index": lambda *, x: x[: x[0].argmax()],
    "scalar_position": lambda *, x: x[x[:, 0].argmax()],
    "range": lambda *, x: [x + i for i in range(x[0].argmax())],
    "tolist": lambda *, x: x * x[0].tolist()[0],
    "numpy": lambda *, x: x * float(x.cpu().numpy().sum()),
    "print": lambda *, x: x * len(f"{x[0, 0]}"),
    "nested_list": lambda *, x: x * torch.as_tensor([x[0, 0], 2.0]).sum().to(x.device),
    "nonzero": lambda *, x: x.nonzero(),
    "argwhere": lambda *, x: torch.argwhere(x > 0),
    "where_of_one": lambda *, x: torch.where(x > 0)[0],
    "masked_read": lambda *, x: x[x > 0],
    "masked_row_read": lambda *, x: x[:, x[0] > 0],
    "masked_select": lambda *, x: x.masked_select(x > 0),
    "masked_write": _writes_rows_by_mask,
    "unique": lambda *, x: x.round().unique(),
    "bincount": lambda *, x: torch.bincount(x.argsort(dim=1)[0]),
    "repeat_interleave": lambda *, x: x[0].repeat_interleave(x[0].argsort()),
    "equal": lambda *, x: x * torch.equal(x, x + 1),
    "allclose": lambda *, x: x * torch.allclose(x, x + 1),
}
SYNCING = [_function(forward, name, reason="makes the host wait") for name, forward in _SYNCS.items()]
STATEFUL = [
    _module(CountsInPython, reason="attribute calls"),
    _module(KeepsHistory, reason="attribute"),
    _module(StoresActivation, reason="attribute last"),
    _module(RebindsBuffer, reason="attribute _buffers"),
    _module(InnerState, reason="attribute inner.calls"),
]


def fails_in_call(number: int, error: BaseException | None = None) -> Callable[..., Any]:
    """A forward that raises in its n-th run, counted from 1; what it counts with is hidden from any watch."""
    numbers = itertools.count(1)

    def forward(*, x: Tensor) -> Tensor:
        if next(numbers) == number:
            raise error or RuntimeError("this run fails")
        return x * 2

    return forward
