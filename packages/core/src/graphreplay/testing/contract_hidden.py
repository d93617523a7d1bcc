"""Contract: what a forward does, reads or holds that a graph cannot see or repeat.

| kind | outcome | test |
| --- | --- | --- |
| operator with a body (torch.cond, flex_attention) | disabled by name, no mode left behind | test_higher_order_* |
| weights of modules that cannot be found from the forward | eager, with what to wrap | test_weights_out_of_sight_* |
| `.data =` inside the forward | disabled by name, as eager | test_forward_that_moves_* |
| gradients turned on inside the forward | eager, gradients flow | test_gradients_turned_on_* |
| plain tensor attribute bound anew | noticed, recaptured | test_tensor_attribute_* |
| dataclasses without tensors | new objects at each replay | test_records_* |
| containers that change what they are built with | eager with the path | test_container_that_changes_* |
| containers that Generic marks | graphed | test_generic_dataclass_is_graphed |
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from graphreplay.testing import zoo
from graphreplay.testing.contract_twin import ContractBase, Twin, assert_same

T = TypeVar("T")


def _attends(*, x: Tensor) -> Any:
    heads = x[None, None]
    return flex_attention(heads, heads, heads)


def _branches(*, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


HIGHER_ORDER: dict[str, Callable[..., Any]] = {"flex_attention": _attends, "cond": _branches}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Dropout(0.99))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class _Pipeline:
    """A callable that is no module."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, *, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class _Unregistered(nn.Module):
    """Holds its layers in a plain list."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.layers = [net]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)  # type: ignore[no-any-return]


def _behind_a_helper(net: nn.Module) -> Callable[..., Any]:
    pipeline = _Pipeline(net)

    def helper(x: Tensor) -> Tensor:
        return pipeline(x=x)

    return lambda *, x: helper(x)


OUT_OF_SIGHT: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "object": _Pipeline,
    "method": lambda net: _Pipeline(net).__call__,
    "helper": _behind_a_helper,
    "list": _Unregistered,
}


class _MovesBuffer(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(zoo.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = self.mean.data * 0.5 + x.sum(0)
        return self.mean * 1


def _moves_kwarg(*, x: Tensor) -> Tensor:
    x.data = x.data * 2
    return x.sum(0)


class _Energy(nn.Module):
    """Energies and forces, as interatomic potentials compute them; it leaves gradients to its results if asked."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.of_input = of_input
        self.net = nn.Linear(zoo.WIDTH, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            place = x.requires_grad_() if self.of_input else x.detach().requires_grad_()
            energy = self.net(place).square().sum()
            (gradient,) = torch.autograd.grad(energy, place, retain_graph=True)
        return energy, -gradient


@dataclass
class _Config:
    scale: int = 1


@dataclass
class _Box(Generic[T]):
    value: T


@dataclass
class _Doubles(OrderedDict):  # type: ignore[type-arg]
    logits: Tensor | None = None  # a default, so that it can be deep-copied

    def __post_init__(self) -> None:
        if self.logits is not None:
            self.logits = self["logits"] = self.logits * 2


class HiddenContract(ContractBase):
    """Forwards that hide something from a graph."""

    @pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
    @pytest.mark.parametrize("operator", HIGHER_ORDER)
    def test_higher_order_operator_disables_and_leaves_no_mode(self, operator: str) -> None:
        forward = HIGHER_ORDER[operator]
        graphed = self.wrap(forward)
        with torch.no_grad():
            for seed in range(3):
                x = self.x(seed=seed)
                assert_same(graphed(x=x), forward(x=x))
                assert torch._C._len_torch_dispatch_stack() == 0
                assert torch._C._len_torch_function_stack() == 0
        assert torch.ones(1, device=self.device).item() == 1.0
        stats = graphed.stats()
        assert (stats["captures"], stats["replays"], stats["eager_calls"]) == (0, 0, 2)
        assert operator in stats["disabled_reason"]

    @pytest.mark.parametrize("place", OUT_OF_SIGHT)
    def test_weights_out_of_sight_run_eagerly(self, place: str) -> None:
        net = _Net().to(self.device)
        plain = copy.deepcopy(net)
        twin = Twin(self.cls(OUT_OF_SIGHT[place](net), device=self.device), OUT_OF_SIGHT[place](plain), self.device)

        def assign(module: nn.Module) -> None:
            module.load_state_dict({name: value * 0 + 1 for name, value in module.state_dict().items()}, assign=True)

        edits: list[Callable[[nn.Module], Any]] = [lambda module: None, assign, lambda module: module.double().float()]
        with torch.no_grad():
            results = []
            for seed, edit in enumerate(edits):
                edit(net)
                edit(plain)
                results.append(twin(x=self.x(seed=seed)))
            net.train()
            assert twin.graphed(x=self.x(seed=2)).eq(0).any(), "dropout acts in training mode"
        torch.testing.assert_close(results[1], self.x(seed=1).sum(1, keepdim=True).add(1).expand(-1, zoo.WIDTH))
        assert twin.counts() == (0, 0, 3)
        assert "wrap the module itself" in twin.eager_reason()
        assert twin.graphed.enabled

    @pytest.mark.parametrize(("forward", "name"), [(_MovesBuffer, "mean"), (lambda: _moves_kwarg, "a kwarg")])
    def test_forward_that_moves_tensors_is_disabled(self, forward: Callable[[], Any], name: str) -> None:
        twin = self.twin(forward())
        with torch.no_grad():
            for seed in range(4):
                twin(x=self.x(seed=seed))
        assert twin.counts() == (0, 0, 3)
        assert f"the forward moves {name} to other memory" in twin.eager_reason()
        assert twin.graphed.disabled_reason == twin.eager_reason()

    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.parametrize("of_input", [False, True])
    def test_gradients_turned_on_inside_run_eagerly(self, of_input: bool, grad: bool) -> None:
        twin = self.twin(_Energy(of_input))
        with torch.set_grad_enabled(grad):
            for seed in range(3):
                energy, _ = twin(x=self.x(seed=seed))
                assert energy.requires_grad
        assert twin.counts() == (0, 0, 2)
        # A kwarg that turns out to require grad is a kwarg that was changed.
        assert ("a kwarg" if of_input else "gradients") in twin.eager_reason()

    def test_tensor_attribute_bound_anew_is_noticed(self) -> None:
        class Scaled(nn.Module):
            def __init__(self, device: str) -> None:
                super().__init__()
                self.scale = torch.ones(zoo.WIDTH, device=device)

            def forward(self, x: Tensor) -> Tensor:
                return x * self.scale

        twin = self.twin(Scaled(self.device))
        with torch.no_grad():
            twin(x=self.x())
            twin(x=self.x(seed=1))
            twin.change(lambda module: setattr(module, "scale", torch.full_like(module.scale, 3.0)))
            for seed in range(2, 5):
                twin(x=self.x(seed=seed))
            twin.change(lambda module: module.scale.fill_(5.0))
            twin(x=self.x(seed=5))
        assert twin.counts() == (2, 4, 0)
        assert any("attributes" in reason for reason in twin.graphed.stats()["miss_reasons"])

    def test_records_without_tensors_are_new_at_each_call(self) -> None:
        def forward(*, x: Tensor, config: _Config) -> dict[str, Any]:
            return {"y": x * config.scale, "config": config, "made": _Config(config.scale)}

        graphed = self.wrap(forward)
        first = _Config(3)
        with torch.no_grad():
            graphed(x=self.x(), config=first)
            first.scale = 5  # the caller goes on with an object of its own
            seen: list[Any] = []
            for seed in range(3):
                result = graphed(x=self.x(seed=seed), config=_Config(3))
                assert_same(result, {"y": self.x(seed=seed) * 3, "config": _Config(3), "made": _Config(3)})
                seen += [result["config"], result["made"]]
                result["config"].scale = result["made"].scale = 9
        assert len({id(config) for config in (first, *seen)}) == 7
        assert (graphed.captures, graphed.stats()["replays"]) == (1, 3)

    def test_container_that_changes_what_it_holds_runs_eagerly(self) -> None:
        outputs = self.twin(lambda *, x: [x, {"result": _Doubles(x)}])
        inputs = self.twin(lambda *, x, extra: x + extra["result"].logits)
        with torch.no_grad():
            for seed in range(3):
                outputs(x=self.x(seed=seed))
                inputs(x=self.x(seed=seed), extra={"result": _Doubles(self.x(seed=seed + 1))})
        assert outputs.counts() == inputs.counts() == (0, 0, 2)
        assert outputs.eager_reason().startswith('output[1]["result"]["logits"]: ')
        assert inputs.eager_reason().startswith('kwargs["extra"]["result"]["logits"]: ')
        assert outputs.graphed.enabled
        assert inputs.graphed.enabled

    def test_generic_dataclass_is_graphed(self) -> None:
        twin = self.twin(lambda *, box: _Box[Any](box.value * 2))
        with torch.no_grad():
            for seed in range(3):
                twin(box=_Box[Tensor](self.x(seed=seed)))
        assert twin.counts() == (1, 2, 0)
