"""Contract: random numbers, from wherever the forward draws them.

| kind | outcome | test |
| --- | --- | --- |
| random numbers | fresh, and repeated by the seed | test_random_numbers_are_fresh, test_random_numbers_repeat_* |
| the state of torch's generators | passes through captures | test_random_state_* |
| a default generator by name | the same | test_default_generator_by_name |
| one that the forward sets, even for a while | disabled, as eager | test_default_generator_that_the_forward_* |
| a generator of the module's own | stepped as by eager | test_own_generator_is_stepped_as_by_eager |
| one that the forward sets | disabled, as eager | test_own_generator_that_the_forward_sets_* |
| one that it sets for one value of a kwarg | disabled once it does, as eager | test_own_generator_set_for_one_value_* |
| one that it makes in each call | disabled, as eager | test_own_generator_made_by_the_forward_* |
| one on the host, for a device | disabled, as eager | test_own_generator_of_the_host |
| random numbers of the host | as eager | test_host_random_numbers |
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphreplay.testing.contract_twin import (
    MODES,
    ContractBase,
    Twin,
    assert_same,
    generator_states,
    generators_kept,
)


class Noisy(nn.Module):
    """Holds generators, which ``draw`` may draw from or set."""

    def __init__(self, device: str, draw: Callable[[Noisy, Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.one, self.other = (torch.Generator(device).manual_seed(seed) for seed in (5, 6))
        self.start = self.one.get_state()
        self.draw = draw

    def forward(self, x: Tensor, seed: Any = None) -> Tensor:
        return self.draw(self, x, seed)

    def states(self) -> list[Tensor]:
        return [self.one.get_state(), self.other.get_state()]


def _rand(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(x.shape, device=x.device, generator=generator)


def _after(_: object, result: Tensor) -> Tensor:
    return result


def _then_set(noisy: Noisy, state: Tensor, result: Tensor) -> Tensor:
    noisy.one.set_state(state)
    return result


def _twice_from_one_state(noisy: Noisy, x: Tensor, _: object) -> Tensor:
    state = noisy.one.get_state()
    return _then_set(noisy, state, _rand(x, noisy.one)) * 2 + _rand(x, noisy.one)


def _seed_for_a_while(noisy: Noisy, x: Tensor, _: object) -> Tensor:
    state = noisy.one.get_state()
    return x + _after(noisy.one.manual_seed(0), _then_set(noisy, state, _rand(x, noisy.one)))


SETS_OWN: dict[str, Callable[[Noisy, Tensor, Any], Tensor]] = {
    "seeds": lambda noisy, x, _: x + _rand(x, noisy.one.manual_seed(0)),
    "seeds with its seed": lambda noisy, x, _: x + _rand(x, noisy.one.manual_seed(noisy.one.initial_seed())),
    "seeds for a while": _seed_for_a_while,
    "seeds the second": lambda noisy, x, _: x + _rand(x, noisy.one) * _rand(x, noisy.other.manual_seed(0)),
    "sets a state": lambda noisy, x, _: x + _after(noisy.one.set_state(noisy.start), _rand(x, noisy.one)),
    "sets that of another": lambda noisy, x, _: (
        x + _after(noisy.one.set_state(noisy.other.get_state()), _rand(x, noisy.one))
    ),
    "puts back": lambda noisy, x, _: _then_set(noisy, noisy.one.get_state(), x + _rand(x, noisy.one)),
    "puts back between": _twice_from_one_state,
    "in place": lambda noisy, x, _: x + torch.empty_like(x).normal_(generator=noisy.one.manual_seed(0)),
}
"""Ways to set a generator that the module holds."""

MAKES_OWN: dict[str, Callable[[Noisy, Tensor, Any], Tensor]] = {
    "seeded": lambda _, x, __: x + _rand(x, torch.Generator(x.device).manual_seed(0)),
    "as it comes": lambda _, x, __: x + _rand(x, torch.Generator(x.device)),
    "a clone": lambda noisy, x, _: x + _rand(x, noisy.one.clone_state()),
}
"""Ways to make one in each call."""


def _draw_and_put_back(x: Tensor) -> Tensor:
    with generators_kept(str(x.device)):
        return torch.rand_like(x)


def _seed_and_put_back(x: Tensor) -> Tensor:
    with generators_kept(str(x.device)):
        torch.manual_seed(0)
        return torch.rand_like(x)


def _seed_again(x: Tensor) -> Tensor:
    torch.manual_seed(torch.initial_seed())
    return torch.rand_like(x)


SETS_DEFAULT: dict[str, Callable[[Tensor], Tensor]] = {
    "seeds": lambda x: _after(torch.manual_seed(0), torch.rand_like(x)),
    "seeds with its seed": _seed_again,
    "seeds for a while": _seed_and_put_back,
    "puts back": _draw_and_put_back,
    "puts back between": lambda x: _draw_and_put_back(x) * 2 + torch.rand_like(x),
}
"""Ways to set torch's default generator."""

HOST_RANDOM: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": np.random.random,
    "torch": lambda: float(torch.rand(()).numpy()),
}


OWN_GENERATOR: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "by name": lambda x, generator: torch.rand(x.shape, device=x.device, generator=generator),
    "by position": lambda x, generator: torch.poisson(x.abs(), generator=generator),
}


class RandomContract(ContractBase):
    """Random numbers, fresh and as eager."""

    def test_random_numbers_are_fresh(self) -> None:
        graphed = self.wrap(lambda *, x: torch.rand_like(x))
        with torch.no_grad():
            drawn = [graphed(x=self.x()) for _ in range(6)]
        assert len({tuple(d.flatten().tolist()) for d in drawn}) == 6
        assert graphed.stats()["replays"] == 5

    def test_random_numbers_repeat_by_the_seed(self) -> None:
        graphed = self.wrap(lambda *, x: (torch.randn_like(x), torch.rand_like(x)))
        with torch.no_grad(), generators_kept(self.device):
            graphed(x=self.x())
            runs = []
            for _ in range(2):
                torch.manual_seed(11)
                runs.append([graphed(x=self.x()) for _ in range(3)])
        assert_same(runs[0], runs[1])
        assert graphed.stats()["replays"] == 6

    def test_random_state_passes_through_captures(self) -> None:
        graphed = self.wrap(lambda *, x: torch.rand_like(x))
        plain = []
        with torch.no_grad(), generators_kept(self.device):
            torch.manual_seed(3)
            torch.rand_like(self.x())
            plain = generator_states(self.device)
            torch.manual_seed(3)
            graphed(x=self.x())
            assert_same(generator_states(self.device), plain, "after the capture")
            torch.manual_seed(3)
            before = generator_states(self.device)
            graphed.prepare(x=self.x(5))
            assert_same(generator_states(self.device), before, "after preparing")

    @pytest.mark.parametrize("draw", OWN_GENERATOR)
    def test_own_generator_is_stepped_as_by_eager(self, draw: str) -> None:
        def forward(noisy: Noisy, x: Tensor, _: object) -> Tensor:
            return x + OWN_GENERATOR[draw](x, noisy.one)

        twin = Twin(self.wrap(Noisy(self.device, forward)), Noisy(self.device, forward), self.device)
        with torch.no_grad():
            for seed in range(4):
                twin(x=self.x(seed=seed))
        if self.device == "cpu":
            assert twin.counts() == (1, 3, 0)
        else:  # a device refuses to capture a generator that it does not know
            assert twin.counts() == (0, 0, 3)
            assert "enerator" in twin.eager_reason()

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("how", SETS_OWN)
    def test_own_generator_that_the_forward_sets_is_no_graphs(self, how: str, mode: str) -> None:
        noisy, plain = (Noisy(self.device, SETS_OWN[how]) for _ in range(2))
        twin = Twin(self.wrap(noisy), plain, self.device)
        with MODES[mode]():
            for seed in range(5):
                twin(x=self.x(seed=seed))
                assert_same(noisy.states(), plain.states(), "generators")
        assert twin.counts() == (0, 0, 4)
        assert "seeds a random generator or sets its state" in twin.eager_reason()

    @pytest.mark.parametrize("how", MAKES_OWN)
    def test_own_generator_made_by_the_forward_is_no_graphs(self, how: str) -> None:
        twin = Twin(self.wrap(Noisy(self.device, MAKES_OWN[how])), Noisy(self.device, MAKES_OWN[how]), self.device)
        with torch.no_grad():
            for seed in range(5):
                twin(x=self.x(seed=seed))
        assert twin.counts() == (0, 0, 4)
        assert "enerator" in twin.eager_reason()
        if self.device == "cpu":
            assert "makes anew" in twin.eager_reason()

    @pytest.mark.parametrize("warmup_iters", [1, 2])
    @pytest.mark.parametrize("hidden", [False, True])
    def test_own_generator_set_for_one_value_is_as_eager_for_others(self, hidden: bool, warmup_iters: int) -> None:
        """The capture that is given up must leave it where the eager forward did."""

        def forward(noisy: Noisy, x: Tensor, seed: int | None) -> Tensor:
            if seed is not None:
                noisy.one.manual_seed(seed)
            return x + _rand(x, noisy.one)

        def wrapped(noisy: Noisy) -> Any:
            reach = [noisy]  # which is no place where a generator is looked for
            return (lambda *, x, seed: forward(reach[0], x, seed)) if hidden else noisy

        noisy, plain = (Noisy(self.device, forward) for _ in range(2))
        twin = Twin(self.wrap(wrapped(noisy), warmup_iters=warmup_iters), wrapped(plain), self.device)
        with torch.no_grad():
            for call, seed in enumerate([None, None, 3, None, 3, 3, None]):
                twin(x=self.x(seed=call), seed=seed)
                assert_same(noisy.states(), plain.states(), "generators")
        assert not twin.graphed.enabled
        assert twin.counts() == ((1, 1, 4) if self.device == "cpu" else (0, 0, 6))

    def test_own_generator_of_the_host(self) -> None:
        """Its numbers reach a graph of a device as constants."""
        graphs = []
        for seed in (1, 1):
            generator = torch.Generator().manual_seed(seed)
            graphs.append(lambda *, x, generator=generator: x * torch.rand((), generator=generator))
        twin = Twin(self.wrap(lambda *, x: graphs[0](x=x)), lambda *, x: graphs[1](x=x), self.device)
        with torch.no_grad():
            for seed in range(5):
                twin(x=self.x(seed=seed))
        if self.device == "cpu":
            assert twin.counts() == (1, 4, 0)
        else:
            assert twin.counts() == (0, 0, 4)
            assert "draws from a random generator on cpu" in twin.eager_reason()

    @pytest.mark.parametrize("how", SETS_DEFAULT)
    def test_default_generator_that_the_forward_sets_is_no_graphs(self, how: str) -> None:
        def forward(*, x: Tensor) -> Tensor:
            return x + SETS_DEFAULT[how](x)

        graphed, results = self.wrap(forward), []
        with torch.no_grad(), generators_kept(self.device):
            for call in (graphed, forward):
                torch.manual_seed(4)
                results.append([call(x=self.x(seed=seed)) for seed in range(4)])
        assert_same(results[0], results[1])
        assert "seeds a random generator or sets its state" in graphed.disabled_reason
        assert graphed.stats()["replays"] == 0

    def test_default_generator_by_name(self) -> None:
        place = self.x().device  # a device has its generators from its first tensor on
        generator = torch.default_generator
        if place.type != "cpu":
            generator = torch.get_device_module(place).default_generators[place.index or 0]
        twin = self.twin(lambda *, x: x + _rand(x, generator))
        with torch.no_grad():
            assert twin.graphed.prepare(x=self.x())
            for seed in range(4 if self.device == "cpu" else 0):  # a device draws other numbers in a graph
                twin(x=self.x(seed=seed))
        assert twin.graphed.captures == 1

    @pytest.mark.parametrize("source", HOST_RANDOM)
    def test_host_random_numbers(self, source: str) -> None:
        def forward(*, x: Tensor) -> Tensor:
            return x * HOST_RANDOM[source]()

        graphed = self.wrap(forward)
        results = []
        with torch.no_grad(), generators_kept(self.device):
            for call in (graphed, forward):
                random.seed(1)
                np.random.seed(1)
                torch.manual_seed(1)
                results.append([call(x=self.x()) for _ in range(4)])
        assert_same(results[0], results[1])
        assert len({tuple(result.flatten().tolist()) for result in results[0]}) == 4
        stats = graphed.stats()
        assert (stats["captures"], stats["replays"], stats["eager_calls"]) == (0, 0, 3)
        (reason,) = stats["eager_reasons"]
        # On the CPU, reading the number is a synchronization already.
        assert ("it draws from" in reason) is (source != "torch" or self.device != "cpu")
        assert graphed.enabled is ("it draws from" in reason)
