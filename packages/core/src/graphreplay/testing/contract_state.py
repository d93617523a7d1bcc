"""Contract: gradients, and module state that no kwarg shows.

| kind | outcome | test |
| --- | --- | --- |
| grad mode with something that requires grad | eager | test_gradients_flow*, test_forward_mode_gradients |
| parameters or buffers moved or replaced | noticed, recaptured | test_changed_module_is_noticed |
| in-place updates of weights | keep replaying | test_weights_updated_in_place_keep_replaying |
| hooks, submodules, training flag | noticed, recaptured | test_changed_module_is_noticed |
| module inside a plain callable | the same | test_changed_module_behind_a_callable_is_noticed |
| requires_grad after capture | eager, gradients flow | test_requires_grad_set_after_capture |
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from graphreplay.testing import zoo
from graphreplay.testing.contract_twin import ContractBase, Twin, assert_same


class _Body(nn.Module):
    """A square weight, a buffer, a submodule, and dropout that acts in training mode only."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(zoo.WIDTH, zoo.WIDTH))
        self.register_buffer("scale", torch.full((zoo.WIDTH,), 2.0))
        self.inner = nn.Sequential(nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.BatchNorm1d(zoo.WIDTH))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.weight * self.scale) + x  # type: ignore[no-any-return]


def _swap_hook(module: _Body) -> None:
    for hook in list(module.inner._forward_hooks):
        del module.inner._forward_hooks[hook]
    module.inner.register_forward_hook(lambda _, args, output: output - 1)


def _resets_and_trains(module: _Body) -> None:
    cast(nn.Linear, module.inner[0]).reset_parameters()
    module.inner[1].train()


def _double(module: Any, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value + 1 for name, value in module.state_dict().items()}


def _fill(tensor: Tensor, value: float) -> Tensor:
    return torch.full_like(tensor, value)


IN_PLACE: dict[str, Callable[[_Body], Any]] = {
    "parameter": lambda m: m.weight.add_(1),
    "data": lambda m: m.weight.data.mul_(2),
    "buffer": lambda m: m.scale.fill_(3.0),
    "load_state_dict": lambda m: m.load_state_dict(_state(m)),
    "zero_grad": lambda m: m.zero_grad(),
}
CHANGES: dict[str, Callable[[_Body], Any]] = {
    "data": lambda m: setattr(m.weight, "data", _fill(m.weight, 0.5)),
    "data_transposed": lambda m: setattr(m.weight, "data", m.weight.data.t()),
    "transposed_in_place": lambda m: m.weight.t_(),
    "parameter": lambda m: setattr(m, "weight", nn.Parameter(_fill(m.weight, 0.5))),
    "buffer": lambda m: setattr(m, "scale", _fill(m.scale, 5.0)),
    "buffer_set": lambda m: m.scale.set_(_fill(m.scale, 5.0).untyped_storage()),
    "assign": lambda m: m.load_state_dict(_state(m), assign=True),
    "submodule": lambda m: setattr(m, "inner", nn.Identity()),
    "deep_submodule": lambda m: m.inner.append(nn.Tanh()),
    "child": lambda m: m.inner.__setitem__(0, nn.Identity()),
    "forward": lambda m: setattr(m, "forward", lambda x: x * 7),
    "hook": lambda m: m.inner.register_forward_hook(_double),
    "pre_hook": lambda m: m.register_forward_pre_hook(lambda _, args, kw: (args, {"x": kw["x"] * 2}), with_kwargs=True),
    "hook_swapped": _swap_hook,
    "hook_removed": lambda m: m.inner._forward_hooks.clear(),
    "training": lambda m: m.train(),
    "deep_training": lambda m: m.inner[1].train(),
    "eval_and_weights": _resets_and_trains,
    "half": lambda m: m.double().float(),
    "parametrized": lambda m: nn.utils.parametrizations.weight_norm(m.inner[0]),
}


class StateContract(ContractBase):
    """What a graph depends on beside its kwargs."""

    def test_gradients_flow(self) -> None:
        twin = self.twin(zoo.MLP())
        for seed in range(3):
            x, y = (self.x(seed=seed).requires_grad_() for _ in range(2))
            result, expected = twin.graphed(x=x), twin.plain(x=y)
            assert_same(result, expected)
            result.square().sum().backward()
            expected.square().sum().backward()
            assert_same(x.grad, y.grad, "gradient of x")
            assert_same(twin.graphed.module.up.weight.grad, twin.plain.up.weight.grad, "gradient of a weight")  # type: ignore[attr-defined]
        assert twin.counts() == (0, 0, 3)
        assert "no_grad" in twin.eager_reason()

    def test_gradients_flow_to_inputs_and_closures_only(self) -> None:
        weight = self.x(8, seed=5).requires_grad_()
        graphed = self.wrap(lambda *, x: x @ weight)
        for seed in range(3):
            weight.grad = None
            graphed(x=self.x(seed=seed)).sum().backward()
            assert_same(weight.grad, self.x(seed=seed).sum(0)[:, None].expand(-1, 8).contiguous(), "gradient")
        graphed = self.wrap(lambda *, x: x * 2)
        graphed(x=self.x())
        assert not graphed(x=self.x()).requires_grad
        x = self.x().requires_grad_()
        assert graphed(x=x).requires_grad
        assert (graphed.captures, graphed.stats()["replays"]) == (1, 1)

    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, at the first dual tensor
    def test_forward_mode_gradients(self) -> None:
        graphed = self.wrap(lambda *, x: x * x)
        for seed in range(3):
            x = self.x(seed=seed)
            with forward_ad.dual_level():
                tangent = forward_ad.unpack_dual(graphed(x=forward_ad.make_dual(x, torch.ones_like(x)))).tangent
                assert_same(tangent.clone(), x * 2, "tangent")
        stats = graphed.stats()
        assert (stats["captures"], stats["replays"], stats["eager_calls"]) == (0, 0, 3)
        (reason,) = stats["eager_reasons"]
        assert "forward-mode" in reason

    def test_requires_grad_set_after_capture(self) -> None:
        module = zoo.MLP().requires_grad_(False)
        graphed = self.wrap(module)
        graphed(x=self.x())
        assert not graphed(x=self.x()).requires_grad
        module.up.bias.requires_grad_()
        graphed(x=self.x()).sum().backward()
        assert module.up.bias.grad is not None
        assert (graphed.captures, graphed.stats()["replays"], graphed.stats()["eager_calls"]) == (1, 1, 1)

    @pytest.mark.parametrize("change", IN_PLACE)
    def test_weights_updated_in_place_keep_replaying(self, change: str) -> None:
        twin = self.twin(_Body())
        with torch.no_grad():
            twin(x=self.x())
            before = twin(x=self.x())
            twin.change(IN_PLACE[change])
            after = twin(x=self.x())
        assert torch.equal(before, after) == (change == "zero_grad")
        assert twin.counts() == (1, 2, 0)

    @pytest.mark.parametrize("forward", ["draws", "counts", "writes"])
    def test_a_stale_replay_leaves_no_step_behind(self, forward: str) -> None:
        class Steps(nn.Module):
            calls: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(zoo.WIDTH))
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Tensor) -> Tensor:
                if forward == "counts":
                    self.calls.add_(1)
                if forward == "writes":
                    x.mul_(self.weight)
                return nn.functional.dropout(x * self.weight, 0.5, training=forward == "draws")

        twin = self.twin(Steps())
        with torch.no_grad():
            for seed in range(3):
                twin(x=self.x(seed=seed))
            twin.change(lambda m: setattr(m.weight, "data", _fill(m.weight, 2.0)))
            for seed in range(3, 6):
                twin(x=self.x(seed=seed))
        assert twin.counts() == (2, 4, 0)

    @pytest.mark.parametrize("change", CHANGES)
    def test_changed_module_is_noticed(self, change: str) -> None:
        module = _Body()
        module.inner.register_forward_hook(_double)
        self._check_change(self.twin(module), CHANGES[change])

    @pytest.mark.parametrize("change", ["data", "parameter", "submodule", "hook", "training"])
    @pytest.mark.parametrize("wrapping", ["method", "partial", "closure"])
    def test_changed_module_behind_a_callable_is_noticed(self, wrapping: str, change: str) -> None:
        def wrapped(module: _Body) -> Callable[..., Any]:
            if wrapping == "method":
                return module.forward
            return functools.partial(module) if wrapping == "partial" else lambda *, x: module(x=x)

        module = _Body().to(self.device)
        plain = copy.deepcopy(module)
        twin = Twin(self.wrap(wrapped(module)), wrapped(plain), self.device)

        def edit_both(_: Any) -> None:
            for body in (module, plain):
                torch.manual_seed(0)
                CHANGES[change](body)
                body.to(self.device)

        with torch.no_grad():
            twin(x=self.x())
            twin(x=self.x(seed=1))
            edit_both(None)
            for seed in range(2, 5):
                twin(x=self.x(seed=seed))
        self._check_noticed(twin)

    def _check_change(self, twin: Twin, edit: Callable[[Any], Any]) -> None:
        def seeded(module: nn.Module) -> None:
            torch.manual_seed(0)
            edit(module)
            module.to(self.device)

        with torch.no_grad():
            twin(x=self.x())
            twin(x=self.x(seed=1))
            twin.change(seeded)
            for seed in range(2, 5):
                twin(x=self.x(seed=seed))
        self._check_noticed(twin)

    def _check_noticed(self, twin: Twin) -> None:
        assert twin.counts() == (2, 3, 0), twin.graphed.stats()
        assert twin.graphed.num_graphs == 1
        first, noticed = twin.graphed.stats()["miss_reasons"]
        assert first == "first capture"
        assert "weight" in noticed or "module" in noticed
