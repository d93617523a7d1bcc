"""Notices forwards that set the state of a random generator, which a replay would not do.

torch.Generator is a type of C, whose methods cannot be watched. What they do shows all the same: operators move a
generator on, and one that is not where the last operator left it was set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from graphreplay.errors import CaptureError
from graphreplay.opmode import OpMode, per_op

_SEED = 0x67726170687265  # nobody's own, so that a forward that seeds is noticed

_SETS = "the forward seeds a random generator or sets its state, which a replay would not do; do so before the call"
_MAKES = "the forward draws from a random generator that it makes anew in each call, which a replay would not; keep one"


class DefaultGenerators:
    """Those that operators draw from when they are given none.

    Other threads may draw from them meanwhile. So one counts as set where it has another seed, or is back where it was
    before, since drawing never leads back.
    """

    def __init__(self, device: torch.device) -> None:
        self._generators = default_generators(device)
        self._left: list[int] = []  # where the last operator left each one
        self._seen: set[int] = set()
        self._found = False

    def begin(self) -> None:
        """The forward is about to run. Moves them all; the capture puts them back."""
        for generator in self._generators:
            generator.manual_seed(_SEED)
            self._seen.add(position_of(generator))
            # Away from there: a forward may seed with the seed that it finds.
            torch.rand((), generator=generator, device=generator.device)
        self.note()
        self._start = self._left

    def look(self) -> None:
        """An operator is about to run that may draw."""
        now = list(map(position_of, self._generators))
        back = any(a != b and a in self._seen for a, b in zip(now, self._left, strict=True))
        self._found = self._found or back or any(generator.initial_seed() != _SEED for generator in self._generators)
        self._seen.update(now)

    def note(self) -> None:
        """An operator has run that may have drawn."""
        self._left = list(map(position_of, self._generators))
        self._seen.update(self._left)

    def end(self) -> bool:
        """The forward has run. Returns whether it drew from one.

        Raises:
            CaptureError: it has set one.
        """
        self.look()
        if self._found:
            raise CaptureError(_SETS)
        return self._start != list(map(position_of, self._generators))


class OwnGenerators:
    """Those that the forward gives to its operators: each has to be where the operator before left it, or before the
    first one, where the run before did.

    Where the run before left a generator that only the forward can find is known from a second run on.

    Args:
        device: where the forward computes.
        held: those that it is known to hold, where the run before left them.
        save: told of each one that the forward draws from, with the state to put it back to; twice where that turns out
            to be another.
    """

    def __init__(
        self,
        device: torch.device,
        held: Iterable[torch.Generator],
        save: Callable[[torch.Generator, Tensor], None],
    ) -> None:
        self._device = device
        self._save = save
        self._defaults = frozenset(map(generator_id, default_generators(device)))
        self._held = {generator_id(generator): (generator, generator.get_state()) for generator in held}
        self._left = {key: _digest_of(state) for key, (_, state) in self._held.items()}
        self._drawn: dict[int, torch.Generator] = {}
        self._second = False
        self._found: str | None = None

    def look(self, generators: Sequence[torch.Generator]) -> None:
        """An operator is about to draw from these."""
        for generator in generators:
            key = generator_id(generator)
            if key not in self._drawn and key not in self._defaults:
                self._drawn[key] = generator
                self._meet(key, generator)
            self._compare(key)

    def note(self, generators: Sequence[torch.Generator]) -> None:
        """An operator has drawn from these."""
        for generator in generators:
            self._left[generator_id(generator)] = position_of(generator)

    def end(self) -> None:
        """The forward has run.

        Raises:
            CaptureError: it has set one, or draws from others than a graph can.
        """
        for key in self._drawn:
            self._compare(key)
        for key, (generator, state) in self._held.items():
            # One moved by what gives no generator to its operators, such as a kernel that holds it.
            if key not in self._drawn and key not in self._defaults and position_of(generator) != self._left[key]:
                self._save(generator, state)
        if self._found is not None:
            raise CaptureError(self._found)

    @contextmanager
    def unwatched_run(self) -> Iterator[None]:
        """Surrounds another run of the same forward."""
        before = self._positions()
        yield
        self._came_back(before)

    def second_run(self) -> AbstractContextManager[None]:
        """Surrounds another run of the same forward, whose operators it looks at. Asked for before any capture, which
        may forbid to ask where a generator is.

        Raises:
            CaptureError: see ``end``.
        """
        self._second = True
        before = self._positions()
        self._left.update(before)
        return self._second_run(before) if self._drawn else nullcontext()

    @contextmanager
    def _second_run(self, before: dict[int, int]) -> Iterator[None]:
        with _Looking(self):
            yield
        self._came_back(before)
        self.end()

    def _positions(self) -> dict[int, int]:
        return {key: position_of(generator) for key, generator in self._drawn.items()}

    def _came_back(self, before: dict[int, int]) -> None:
        """Another run has ended. Where one ends in the same place each time, so did the run before the first one,
        wherever the first one set it to."""
        for key, position in before.items():
            generator = self._drawn[key]
            if key not in self._held and position_of(generator) == position:
                self._save(generator, generator.get_state())

    def _meet(self, key: int, generator: torch.Generator) -> None:
        if self._second:
            self._find(_MAKES)
        device = generator.device
        if device.type != self._device.type or device.index not in (None, self._device.index):
            self._find(
                f"the forward draws from a random generator on {device}, whose numbers a replay would repeat; draw on "
                f"{self._device}"
            )
        _, state = self._held.get(key) or (generator, generator.get_state())
        self._left.setdefault(key, _digest_of(state))
        self._save(generator, state)

    def _compare(self, key: int) -> None:
        generator = self._drawn.get(key)
        if generator is not None and position_of(generator) != self._left[key]:
            self._find(_SETS)

    def _find(self, what: str) -> None:
        self._found = self._found or what


class _Looking(OpMode):
    """Looks at the generators of operators, and at nothing else."""

    def __init__(self, own: OwnGenerators) -> None:
        super().__init__()
        self._own = own

    def on_op(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        generators = generators_among(op, args, kwargs)
        self._own.look(generators)
        result = op(*args, **kwargs)
        self._own.note(generators)
        return result


def may_draw(op: OpOverload, generators: Sequence[torch.Generator]) -> bool:
    """Whether an operator with these may draw random numbers; those of others may do anything."""
    return bool(generators) or _draws(op)


@per_op
def _draws(op: OpOverload) -> bool:
    return op.namespace != "aten" or torch.Tag.nondeterministic_seeded in op.tags


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Those that a forward on the device draws from when it names none."""
    if device.type == "cpu":
        return [torch.default_generator]
    of_device: Sequence[torch.Generator] = torch.get_device_module(device).default_generators
    return [torch.default_generator, of_device[device.index]]


def generator_id(generator: torch.Generator) -> int:
    """The address of torch's own object: the same generator may come to an operator as another Python object. Whoever
    holds one of them keeps the address from being given out again."""
    address: int = generator._cdata  # type: ignore[attr-defined]
    return address


def generators_among(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
    """Those that an operator is given; some take theirs by position."""
    if not takes_generators(op):
        return []
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]


@per_op
def takes_generators(op: OpOverload) -> bool:
    return any("Generator" in str(argument.type) for argument in op._schema.arguments)


def position_of(generator: torch.Generator) -> int:
    """Where a generator is: another number after each draw, and the same one in the same state."""
    return _digest_of(generator.get_state())


def _digest_of(state: Tensor) -> int:
    """Tells one state from others. The bytes are read without an operator, which dispatch modes would see."""
    return hash(ctypes.string_at(state.data_ptr(), state.nbytes))
