"""Contract: calls that no graph may serve, and the reasons that they are given.

| kind | outcome | test |
| --- | --- | --- |
| own parameter or buffer as a kwarg | eager | test_own_weight_* |
| object, cycle, subclass, odd tensor, freed tensor | eager with the path | test_unsupported_leaf_runs_eagerly |
| an input that was freed behind recognized calls | eager with the path | test_tensor_that_was_freed_* |
| clone_static of such | error with the path | test_clone_static_refuses_by_path |
| kwargs that the forward itself changes | as eager | test_forward_that_edits_its_kwargs |
| host scalar that changes at every call | bounded captures, then eager, leaf named | test_changing_host_scalar_* |
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import graphreplay
from graphreplay.testing import zoo
from graphreplay.testing.contract_twin import ContractBase, assert_same


class _Subclass(Tensor):
    pass


def _cycle(x: Tensor) -> list[Any]:
    tree: list[Any] = [x]
    tree.append(tree)
    return tree


class _Unset:
    """A field whose value cannot be asked for."""

    def __get__(self, record: Any, cls: Any = None) -> int:
        if record is None:
            return 3  # the field's default
        raise KeyError("not there yet")

    def __set__(self, record: Any, value: Any) -> None:
        pass


@dataclass
class _Late:
    hidden: Tensor
    length: Any = _Unset()


def _freed(x: Tensor) -> Tensor:
    """As sharding and offloading leave a tensor."""
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    return freed


UNSUPPORTED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "object": (lambda x: object(), 'kwargs["extra"]'),
    "inside": (lambda x: {"a": [x, threading.Lock()]}, 'kwargs["extra"]["a"][1]'),
    "function": (lambda x: (0, print), 'kwargs["extra"][1]'),
    "set": (lambda x: [{1, 2}], 'kwargs["extra"][0]'),
    "iterator": (lambda x: iter([x]), 'kwargs["extra"]'),
    "generator": (lambda x: {"g": torch.Generator()}, 'kwargs["extra"]["g"]'),
    "subclass": (lambda x: (x.as_subclass(_Subclass),), 'kwargs["extra"][0]'),
    "sparse": (lambda x: [x.to_sparse()], 'kwargs["extra"][0]'),
    "nested": (lambda x: [torch.nested.nested_tensor([x, x + 1], layout=torch.jagged)], 'kwargs["extra"][0]'),
    "quantized": (lambda x: [torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)], 'kwargs["extra"][0]'),
    "meta": (lambda x: [x.to("meta")], 'kwargs["extra"][0]'),
    "freed": (lambda x: {"a": _freed(x)}, 'kwargs["extra"]["a"]'),
    "late": (lambda x: [_Late(x)], 'kwargs["extra"][0]'),
    "cycle": (_cycle, 'kwargs["extra"][1][1]'),
}


def _has_values(tensor: Tensor) -> bool:
    odd = tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided
    return not odd and tensor.untyped_storage().nbytes() > 0


def _total(*, x: Tensor, extra: Any) -> Tensor:
    """Sums the plain tensors that it finds, one level deep."""
    found = (
        [extra] if not isinstance(extra, dict | list | tuple) else extra.values() if isinstance(extra, dict) else extra
    )
    total = x * 2
    for item in found:
        if type(item) is Tensor and _has_values(item):
            total = total * 3 + item.sum()
    return total


def _pops(*, d: dict[str, Tensor]) -> Tensor:
    popped: Tensor = d.pop("a", d["b"])
    return popped - d["b"] * 2


def _appends(*, d: dict[str, Any]) -> Tensor:
    d.setdefault("seen", []).append(d["a"] * 2)
    total: Tensor = torch.stack(d["seen"]).sum(0) + d["b"]
    return total


def _replaces(*, d: dict[str, Tensor]) -> Tensor:
    d["a"] = d["a"] * 2
    return d["a"] + d["b"]


def _transposes(*, d: dict[str, Tensor]) -> Tensor:
    d["a"].t_()
    return d["a"].sum(0) + d["b"].sum()


class RefusalContract(ContractBase):
    """From a call to a reason."""

    @pytest.mark.parametrize("of", [lambda m: m.down.bias, lambda m: m.down.weight[0], lambda m: m.calls])
    def test_own_weight_as_a_kwarg_runs_eagerly(self, of: Callable[[Any], Tensor]) -> None:
        class Updates(zoo.MLP):
            calls: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
                self.down.bias.add_(1)
                self.calls.add_(1)
                return super().forward(x) + (0 if other is None else other.sum())

        twin = self.twin(Updates())
        with torch.no_grad():
            for seed in range(3):
                x = self.x(seed=seed)
                expected = twin.plain(x=x, other=of(twin.plain))
                assert_same(twin.graphed(x=x, other=of(twin.graphed.module)), expected)
                twin.check_state()
                twin(x=x)
        assert twin.counts() == (1, 2, 3)
        assert "parameter or buffer of the module" in twin.eager_reason()

    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
    @pytest.mark.parametrize("kind", UNSUPPORTED)
    def test_unsupported_leaf_runs_eagerly(self, kind: str) -> None:
        make, path = UNSUPPORTED[kind]
        graphed = self.wrap(_total)
        with torch.no_grad():
            for seed in range(3):
                extra = make(self.x())
                expected = _total(x=self.x(seed=seed), extra=extra)
                assert_same(graphed(x=self.x(seed=seed), extra=extra), expected)
                graphed(x=self.x(seed=seed), extra=None)
        stats = graphed.stats()
        # Some have a key, and are found out at their first capture.
        assert (stats["captures"], stats["replays"], stats["eager_calls"] + stats["misses"]) == (1, 2, 4)
        (reason,) = stats["eager_reasons"]
        assert path in reason
        assert graphed.enabled

    @pytest.mark.parametrize("gaps", [False, True])
    @pytest.mark.parametrize("offset", [0, 64])
    def test_tensor_that_was_freed_behind_recognized_calls(self, offset: int, gaps: bool) -> None:
        """As of shards that are let go between calls; a view then points to where it begins in nothing."""
        step = 2 if gaps else 1

        def shard(seed: int) -> Tensor:
            return self.x(offset + 64, seed=seed)[offset : offset + 16 * step : step]

        graphed = self.wrap(_total)
        with torch.no_grad():
            for seed in range(4):
                assert_same(graphed(x=self.x(), extra=shard(seed)), _total(x=self.x(), extra=shard(seed)))
            assert graphed.stats()["replays"] == 3
            freed = shard(0)
            freed.untyped_storage().resize_(0)
            assert_same(graphed(x=self.x(), extra=freed), _total(x=self.x(), extra=freed))
            assert_same(graphed(x=self.x(), extra=shard(5)), _total(x=self.x(), extra=shard(5)))
        assert graphed.stats()["replays"] == 4
        (reason,) = graphed.stats()["eager_reasons"]
        assert 'kwargs["extra"]: a tensor whose storage was resized to nothing' in reason

    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
    @pytest.mark.parametrize("kind", UNSUPPORTED)
    def test_clone_static_refuses_by_path(self, kind: str) -> None:
        make, path = UNSUPPORTED[kind]
        with pytest.raises(graphreplay.UnsupportedLeafError) as caught:
            graphreplay.clone_static({"x": self.x(), "extra": make(self.x())})
        assert caught.value.path.startswith(path)

    @pytest.mark.parametrize("forward", [_pops, _appends, _replaces, _transposes])
    @pytest.mark.parametrize("rows", [3, zoo.WIDTH])
    def test_forward_that_edits_its_kwargs(self, forward: Callable[..., Any], rows: int) -> None:
        twin = self.twin(forward)
        with torch.no_grad():
            for seed in range(4):
                twin(d={"a": self.x(rows, seed), "b": self.x(rows, seed + 10)})
        assert twin.counts() == (0, 0, 3)
        assert "changes the structure of what it was given" in twin.eager_reason()
        assert twin.graphed.enabled

    def test_changing_host_scalar_runs_eagerly_after_16_captures(self, caplog: pytest.LogCaptureFixture) -> None:
        twin = self.twin(lambda *, x, when: x * when["t"])
        with torch.no_grad():
            for step in range(24):
                twin(x=self.x(seed=step), when={"t": step * 0.5})
            assert twin.counts() == (16, 0, 8)
            twin(x=self.x(5), when={"t": 0.25})
            twin(x=self.x(5, 1), when={"t": 0.25})
        assert 'kwargs["when"]["t"]' in twin.eager_reason()
        assert any('kwargs["when"]["t"]' in record.getMessage() for record in caplog.records)
        assert twin.graphed.enabled

    def test_changing_host_scalar_that_comes_back_is_no_churn(self) -> None:
        twin = self.twin(lambda *, x, t: x * t, max_entries=32)
        with torch.no_grad():
            for step in range(20):
                twin(x=self.x(seed=step), t=step)
                twin(x=self.x(seed=step + 1), t=step)
        assert twin.counts() == (20, 20, 0)
