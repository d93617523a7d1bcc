"""Contract: calls for less, where the caller knows more.

| kind | outcome | test |
| --- | --- | --- |
| check_module, clone_outputs that are no bool | error | test_flag_* |
| check_module=False, weights updated in place | shown | test_unchecked_updates_in_place_show |
| the same, moved or hooked | shown after reset() or a miss | test_unchecked_changes_*, test_a_miss_notices_* |
| the same with verify= | replays that are compared look at the module | test_verified_replays_* |
| the same, requires_grad after capture | eager, gradients flow | test_unchecked_gradients_* |
| clone_outputs=False | right at once, in memory that the next call overwrites | test_lent_*, test_verify_of_lent_* |
| the same, y = graphed(x=y) | right, also where the module changes in between | test_chained_*, test_chain_* |
| the same, writes or returns its inputs | outputs are the caller's own | test_outputs_that_chaining_would_spoil_* |
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphreplay
from graphreplay.testing import zoo
from graphreplay.testing.contract_twin import MODES, ContractBase, assert_same


class _Step(nn.Module):
    """A linear layer that keeps the shape of its input, with a buffer and a submodule."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(zoo.WIDTH, zoo.WIDTH)
        self.register_buffer("scale", torch.full((zoo.WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() * self.scale  # type: ignore[no-any-return]


def _double(module: Any, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _new(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, 0.25)


CHANGES: dict[str, Callable[[_Step], Any]] = {
    "data": lambda m: setattr(m.inner.weight, "data", _new(m.inner.weight)),
    "parameter": lambda m: setattr(m.inner, "weight", nn.Parameter(_new(m.inner.weight))),
    "buffer": lambda m: setattr(m, "scale", _new(m.scale)),
    "submodule": lambda m: setattr(m, "inner", nn.Identity()),
    "hook": lambda m: m.inner.register_forward_hook(_double),
    "forward": lambda m: setattr(m, "forward", lambda x: x * 7),
}
IN_PLACE: dict[str, Callable[[_Step], Any]] = {
    "parameter": lambda m: m.inner.weight.mul_(2),
    "data": lambda m: m.inner.bias.data.add_(1),
    "buffer": lambda m: m.scale.fill_(3.0),
    "load_state_dict": lambda m: m.load_state_dict({name: value * 3 for name, value in m.state_dict().items()}),
}

State = tuple[Tensor, ...]


def _swaps(*, a: Tensor, b: Tensor) -> State:
    return b, a


def _swaps_and_adds(*, a: Tensor, b: Tensor) -> State:
    return b, a * 0.5 + b


def _writes(*, a: Tensor, b: Tensor) -> State:
    a.mul_(2)
    return a + b, b - 1


def _writes_and_returns(*, a: Tensor, b: Tensor) -> State:
    a.add_(1)
    b.mul_(0.5)
    return a, b


def _returns_one(*, a: Tensor, b: Tensor) -> State:
    return a, a - b


def _rolls_views(*, a: Tensor, b: Tensor) -> State:
    whole = torch.stack([b, a + 1])
    return whole[0], whole[1]


def _turns(*, a: Tensor, b: Tensor) -> State:
    return a[:, : len(a)].t().contiguous().repeat(1, 3)[:, : a.shape[1]], b.clone()


CHAINS: dict[str, Callable[..., State]] = {
    "swaps": _swaps,
    "swaps and adds": _swaps_and_adds,
    "writes": _writes,
    "writes and returns": _writes_and_returns,
    "returns one": _returns_one,
    "views of one storage": _rolls_views,
    "strided": _turns,
}
KEEPS_OUTPUTS_APART = ("swaps", "writes", "writes and returns", "returns one")
"""Chains whose forward writes or returns its inputs."""


class OptionsContract(ContractBase):
    """``check_module=`` and ``clone_outputs=``."""

    @pytest.mark.parametrize("name", ["check_module", "clone_outputs"])
    @pytest.mark.parametrize("value", [None, 0, 1, "yes"])
    def test_flag_that_is_no_bool_is_refused(self, name: str, value: Any) -> None:
        with pytest.raises(graphreplay.ConfigurationError, match=f"{name} must be True or False, not {value!r}"):
            self.wrap(lambda *, x: x, **{name: value})

    # ----------------------------------------------------------------------------------- check_module

    @pytest.mark.parametrize("change", IN_PLACE)
    def test_unchecked_updates_in_place_show(self, change: str) -> None:
        twin = self.twin(_Step(), check_module=False)
        with torch.no_grad():
            before = twin(x=self.x())
            before = twin(x=self.x())
            twin.change(IN_PLACE[change])
            after = twin(x=self.x())
        assert not torch.equal(before, after)
        assert twin.counts() == (1, 2, 0)

    def test_unchecked_buffers_step_once_a_call(self) -> None:
        twin = self.twin(zoo.Counter(), check_module=False)
        with torch.no_grad():
            for call in range(1, 5):
                _, calls = twin(x=self.x(seed=call))
                assert calls.item() == call
        assert twin.counts() == (1, 3, 0)

    @pytest.mark.parametrize("change", CHANGES)
    def test_unchecked_changes_show_after_reset(self, change: str) -> None:
        module = _Step().to(self.device)
        was = copy.deepcopy(module)
        graphed = self.wrap(module, check_module=False, verify="off")
        with torch.no_grad():
            for seed in range(2):
                assert_same(graphed(x=self.x(seed=seed)), was(self.x(seed=seed)))
            CHANGES[change](module)
            # What the graph reads stays alive: nothing else comes to lie there.
            filler = [torch.full_like(was.inner.weight, float("nan")) for _ in range(50)]
            for seed in range(2, 4):
                assert_same(graphed(x=self.x(seed=seed)), was(self.x(seed=seed)), "as at capture")
                assert not torch.equal(module(self.x(seed=seed)), was(self.x(seed=seed)))
            assert (graphed.captures, graphed.stats()["replays"]) == (1, 3)
            graphed.reset()
            for seed in range(4, 6):
                assert_same(graphed(x=self.x(seed=seed)), module(self.x(seed=seed)), "after reset()")
        assert (graphed.captures, graphed.stats()["replays"], len(filler)) == (2, 4, 50)

    @pytest.mark.parametrize("change", CHANGES)
    def test_a_miss_notices_unchecked_changes(self, change: str) -> None:
        module = _Step().to(self.device)
        graphed = self.wrap(module, check_module=False, verify="off")
        with torch.no_grad():
            for seed in range(2):
                graphed(x=self.x(seed=seed))
            CHANGES[change](module)
            for count, seed in ((5, 2), (5, 3), (3, 4), (3, 5)):  # the graph of 3 rows has gone with the change
                assert_same(graphed(x=self.x(count, seed)), module(self.x(count, seed)), f"{count} rows")
        stats = graphed.stats()
        assert (stats["captures"], stats["replays"], stats["graphs"], stats["eager_calls"]) == (3, 3, 2, 0)
        assert any("weight" in reason or "module" in reason for reason in stats["miss_reasons"]), stats

    def test_unchecked_prepare_notices(self) -> None:
        module = _Step().to(self.device)
        graphed = self.wrap(module, check_module=False, verify="off")
        with torch.no_grad():
            for seed in range(2):
                graphed(x=self.x(seed=seed))
            CHANGES["data"](module)
            assert graphed.prepare(x=self.x())
            assert_same(graphed(x=self.x()), module(self.x()))
        assert (graphed.captures, graphed.stats()["replays"]) == (2, 2)

    @pytest.mark.parametrize("verify", ["first", "always"])
    def test_verified_replays_look_at_the_module(self, verify: str) -> None:
        module = _Step().to(self.device)
        graphed = self.wrap(module, check_module=False, verify=verify)
        with torch.no_grad():
            graphed(x=self.x())
            CHANGES["data"](module)  # before the first replay
            for seed in range(1, 4):
                assert_same(graphed(x=self.x(seed=seed)), module(self.x(seed=seed)))
        stats = graphed.stats()
        assert (stats["captures"], stats["replays"], stats["enabled"]) == (2, 2, True)

    def test_unchecked_gradients_flow_all_the_same(self) -> None:
        module = _Step().requires_grad_(False)
        graphed = self.wrap(module, check_module=False)
        for _ in range(2):
            assert not graphed(x=self.x()).requires_grad
        module.inner.bias.requires_grad_()
        graphed(x=self.x()).sum().backward()
        assert module.inner.bias.grad is not None
        assert (graphed.captures, graphed.stats()["replays"], graphed.stats()["eager_calls"]) == (1, 1, 1)

    # ---------------------------------------------------------------------------------- clone_outputs

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("specimen", zoo.GRAPHED, ids=str)
    def test_lent_outputs_equal_eager(self, specimen: zoo.Specimen, mode: str) -> None:
        self.equals_eager(specimen, mode, clone_outputs=False)

    def test_lent_outputs_are_the_same_memory_at_each_call(self) -> None:
        module = _Step().to(self.device)
        graphed = self.wrap(module, clone_outputs=False)
        with torch.no_grad():
            eager = graphed(x=self.x())
            first = graphed(x=self.x(seed=1))
            assert_same(first, module(self.x(seed=1)))
            second = graphed(x=self.x(seed=2))
            assert second.data_ptr() == first.data_ptr() != eager.data_ptr()
            assert_same(second, module(self.x(seed=2)))
            assert_same(first, second, "the output before, which the call has overwritten")
            assert_same(eager, module(self.x()), "the output of the eager call")
        assert (graphed.captures, graphed.stats()["replays"]) == (1, 2)

    def test_lent_outputs_share_storage_as_eager_ones(self) -> None:
        graphed = self.wrap(lambda *, x: (y := x * 2, y[1:], y.t(), x + 1), clone_outputs=False)
        with torch.no_grad():
            graphed(x=self.x())
            found = [graphed(x=self.x(seed=seed)) for seed in range(2)]
        for outputs in found:
            y, tail, turned, alone = (tensor.untyped_storage().data_ptr() for tensor in outputs)
            assert y == tail == turned != alone
        for one, other in zip(*found, strict=True):
            assert one.data_ptr() == other.data_ptr()

    def test_lent_outputs_come_in_containers_of_the_callers_own(self) -> None:
        graphed = self.wrap(lambda *, x: {"b": [x * 2, (x - 1,)], "a": x + 1, "n": 3}, clone_outputs=False)
        with torch.no_grad():
            for seed in range(4):
                outputs = graphed(x=self.x(seed=seed))
                x = self.x(seed=seed)
                assert_same(outputs, {"b": [x * 2, (x - 1,)], "a": x + 1, "n": 3})
                outputs["b"].clear()
                del outputs["n"]

    def test_lent_random_outputs_are_fresh_and_repeat(self) -> None:
        graphed = self.wrap(lambda *, x: nn.functional.dropout(x + 9, 0.5), clone_outputs=False)
        with torch.no_grad():
            graphed(x=self.x(50))
            drawn = []
            for seed in (1, None, 1, None):
                if seed is not None:
                    torch.manual_seed(seed)
                drawn.append(graphed(x=self.x(50)).clone())
        assert not torch.equal(drawn[0], drawn[1])
        assert_same(drawn[2], drawn[0])
        assert_same(drawn[3], drawn[1])
        assert graphed.stats()["replays"] == 4

    def test_lent_outputs_of_a_shape_outlive_captures_of_others(self) -> None:
        module = _Step().to(self.device)
        graphed = self.wrap(module, clone_outputs=False, max_entries=2)
        with torch.no_grad():
            for round_ in range(2):
                for count in (2, 3, 4, 3, 2):
                    x = self.x(count, round_)
                    assert_same(graphed(x=x), module(x), f"{count} rows")
        assert graphed.stats()["evictions"] > 0

    @pytest.mark.parametrize("verify", ["first", "always"])
    def test_verify_of_lent_outputs_that_are_passed_in_again(self, verify: str) -> None:
        module = _Step().to(self.device)
        graphed = self.wrap(module, clone_outputs=False, verify=verify)
        with torch.no_grad():
            y = expected = self.x()
            for step in range(5):
                y, expected = graphed(x=y), module(expected)
                assert_same(y, expected, f"step {step}")
        stats = graphed.stats()
        assert (stats["replays"], stats["enabled"]) == (4, True)
        assert stats["verified"] == (1 if verify == "first" else 4)

    @pytest.mark.parametrize("name", CHAINS)
    def test_chained_calls_equal_eager(self, name: str) -> None:
        forward = CHAINS[name]
        graphed = self.wrap(forward, clone_outputs=False)
        with torch.no_grad():
            state: State = (self.x(seed=1), self.x(seed=2))
            expected: State = (self.x(seed=1), self.x(seed=2))
            for step in range(7):
                state = graphed(a=state[0], b=state[1])
                expected = forward(a=expected[0], b=expected[1])
                assert_same(state, expected, f"step {step}")
        assert graphed.enabled
        assert graphed.stats()["replays"] > 3, graphed.stats()

    @pytest.mark.parametrize("name", KEEPS_OUTPUTS_APART)
    def test_outputs_that_chaining_would_spoil_are_the_callers_own(self, name: str) -> None:
        graphed = self.wrap(CHAINS[name], clone_outputs=False)
        with torch.no_grad():
            graphed(a=self.x(), b=self.x(seed=1))
            held = graphed(a=self.x(seed=2), b=self.x(seed=3))
            expected = CHAINS[name](a=self.x(seed=2), b=self.x(seed=3))
            for seed in range(3):
                graphed(a=self.x(seed=seed), b=self.x(seed=seed + 9))
        assert_same(held, expected)

    @pytest.mark.parametrize("change", ["data", "submodule", "hook"])
    def test_chain_notices_a_changed_module_before_its_input_is_gone(self, change: str) -> None:
        twin = self.twin(_Step(), clone_outputs=False)
        with torch.no_grad():
            y = expected = self.x()
            for step in range(7):
                if step == 3:
                    twin.change(CHANGES[change])
                y, expected = twin.graphed(x=y), twin.plain(expected)
                assert_same(y, expected, f"step {step}")
        assert twin.counts() == (2, 5, 0)

    def test_chain_through_wrappers_of_one_pool_notices_too(self) -> None:
        pool = graphreplay.GraphPool()
        modules = [_Step().to(self.device) for _ in range(2)]
        second = self.wrap(modules[1], pool=pool)  # captured first, so that what the other lends may lie in its memory
        first = self.wrap(modules[0], pool=pool, clone_outputs=False)
        with torch.no_grad():
            for seed in range(2):
                second(x=self.x(seed=seed))
            y = expected = self.x()
            for step in range(6):
                if step == 3:
                    CHANGES["data"](modules[1])
                y = second(x=first(x=y))
                expected = modules[1](modules[0](expected))
                assert_same(y, expected, f"step {step}")
        assert second.captures == 2

    def test_chain_whose_last_replay_fails_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An eager call cannot make up for it: the replay may have overwritten what it would read."""
        graphed = self.wrap(_Step(), clone_outputs=False, verify="off")
        with torch.no_grad():
            y = self.x()
            for _ in range(3):
                y = graphed(x=y)
            (entry,) = [graphed._cache.get(key) for key in graphed._cache]

            def fail(*_: object) -> None:
                raise RuntimeError("for a test")

            monkeypatch.setattr(entry, "launch", fail)
            with pytest.raises(RuntimeError, match="for a test"):
                graphed(x=y)
        assert "replay failed" in (graphed.disabled_reason or "")

    def test_lent_and_unchecked_together(self) -> None:
        twin = self.twin(_Step(), clone_outputs=False, check_module=False)
        with torch.no_grad():
            y = expected = self.x()
            for step in range(6):
                twin.change(IN_PLACE["buffer"] if step == 2 else lambda m: None)
                y, expected = twin.graphed(x=y), twin.plain(expected)
                assert_same(y, expected, f"step {step}")
        assert twin.counts() == (1, 5, 0)
