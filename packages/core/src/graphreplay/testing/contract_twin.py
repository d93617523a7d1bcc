"""What every contract test stands on: a module beside its eager twin, and a strict comparison."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from graphreplay.forward import GraphedForward
from graphreplay.testing.zoo import Specimen, rows

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def assert_same(actual: Any, expected: Any, where: str = "output") -> None:
    """Values (bit for bit on the CPU, within the dtype's tolerance elsewhere), shapes, strides, dtypes, devices,
    container types and the order of names."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{where}: {actual!r} is no tensor"
        assert actual.stride() == expected.stride(), f"{where}: strides {actual.stride()}, not {expected.stride()}"
        tolerance: dict[str, Any] = {"rtol": 0.0, "atol": 0.0} if expected.device.type == "cpu" else {}
        torch.testing.assert_close(
            actual.detach(), expected.detach(), equal_nan=True, msg=lambda text: f"{where}: {text}", **tolerance
        )
        return
    assert type(actual) is type(expected), f"{where}: {type(actual)}, not {type(expected)}"
    if isinstance(expected, dict):
        assert list(actual) == list(expected), f"{where}: names {list(actual)}, not {list(expected)}"
        pairs = [(f"[{name!r}]", actual[name], expected[name]) for name in expected]
    elif is_dataclass(expected):
        names = [field.name for field in fields(expected)]
        pairs = [(f".{name}", getattr(actual, name), getattr(expected, name)) for name in names]
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{where}: {len(actual)} items, not {len(expected)}"
        pairs = [(f"[{i}]", a, e) for i, (a, e) in enumerate(zip(actual, expected, strict=True))]
    else:
        assert actual == expected, f"{where}: {actual!r}, not {expected!r}"
        return
    for name, a, e in pairs:
        assert_same(a, e, where + name)


def in_child(body: Callable[[], object]) -> int:
    """The exit code of a forked child that runs ``body``: 0 if it did without an error."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def generator_states(device: str) -> list[Tensor]:
    """The states of the default generators that a forward on the device may draw from."""
    states = [torch.get_rng_state()]
    if torch.device(device).type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(torch.device(device)))
    return states


@contextmanager
def generators_kept(device: str) -> Iterator[None]:
    """Puts the default generators back as they were."""
    kind = torch.device(device).type
    with torch.random.fork_rng([] if kind == "cpu" else [device], device_type="cuda" if kind == "cpu" else kind):
        yield


class Twin:
    """A graphed module, and a deep copy of the module that is run plainly beside it.

    Each call checks the result, the kwargs as the forward left them, every weight and buffer, and on the CPU the state
    of the random generators, against the plain run.
    """

    def __init__(self, graphed: GraphedForward, plain: Callable[..., Any], device: str) -> None:
        self.graphed = graphed
        self.plain = plain
        self.device = device

    def __call__(self, **kwargs: Any) -> Any:
        return self.call(kwargs)

    def call(self, kwargs: dict[str, Any], **options: Any) -> Any:
        """One call with these forward kwargs and call options; returns the graphed result."""
        expected_kwargs = copy.deepcopy(kwargs)  # keeps who shares storage with whom
        with generators_kept(self.device):
            expected = self.plain(**expected_kwargs)
            drawn = generator_states(self.device)
        actual = self.graphed.options(**options)(**kwargs)
        assert_same(actual, expected)
        assert_same(kwargs, expected_kwargs, "kwargs after the call")
        self.check_state()
        if self.device == "cpu":
            assert_same(generator_states(self.device), drawn, "generator state after the call")
        return actual

    def check_state(self) -> None:
        """Compares weights and buffers of both modules."""
        if isinstance(self.plain, nn.Module):
            assert isinstance(self.graphed.module, nn.Module)
            assert_same(dict(self.graphed.module.state_dict()), dict(self.plain.state_dict()), "state")

    def change(self, edit: Callable[[Any], Any]) -> None:
        """Does the same thing to both modules."""
        edit(self.graphed.module)
        edit(self.plain)

    def counts(self) -> tuple[int, int, int]:
        """Captures, replays and eager calls so far."""
        stats = self.graphed.stats()
        return stats["captures"], stats["replays"], stats["eager_calls"]

    def eager_reason(self) -> str:
        """The one reason for which calls ran eagerly."""
        (reason,) = self.graphed.stats()["eager_reasons"]
        assert isinstance(reason, str)
        return reason


class ContractBase:
    """What a backend's test module fills in, and how the tests build what they test."""

    cls: ClassVar[type[GraphedForward]]
    device: ClassVar[str]

    def x(self, count: int = 3, seed: int = 0) -> Tensor:
        """``count`` rows of numbers on the device; the seed tells one from another."""
        return rows(count, seed).to(self.device)

    def wrap(self, module: Any, **options: Any) -> Any:
        """A graphed forward, with the module moved to the device. Any, since tests call hooks and private parts too."""
        if isinstance(module, nn.Module):
            module.to(self.device)
        return self.cls(module, device=self.device, **options)

    def twin(self, module: Any, **options: Any) -> Twin:
        """A graphed module with its eager twin."""
        graphed = self.wrap(module, **options)
        return Twin(graphed, copy.deepcopy(module), self.device)

    def equals_eager(self, specimen: Specimen, mode: str, **options: Any) -> None:
        """Asserts that calls of two shapes in turn are as eager's, and that each shape is captured once."""
        on_cpu = torch.device(self.device).type == "cpu"
        twin = self.twin(specimen.make(), **options)
        # On a device, a graph need not draw the numbers that eager draws: those have tests of their own.
        call = twin if on_cpu or not specimen.random else twin.graphed
        with MODES[mode]():
            for seed, count in enumerate((3, 3, 5, 5, 3, 3)):
                call(x=self.x(count, seed))
        if on_cpu or not specimen.host_constant:
            assert twin.counts() == (2, 4, 0), twin.graphed.stats()
            assert twin.graphed.stats()["misses"] == 2
        else:
            assert twin.counts() in ((0, 0, 5), (2, 4, 0)), twin.graphed.stats()
