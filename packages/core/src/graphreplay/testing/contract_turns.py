"""Contract: what a forward changes and brings back in turns, or moves, without its module showing it afterwards.

| kind | outcome | test |
| --- | --- | --- |
| state that is back every second or third run | disabled, as eager | test_state_that_comes_back_* |
| a closure's tensor that the forward moves | disabled, as eager | test_closure_tensor_* |
| an output that no operator of the thread made | eager | test_output_of_another_thread |
| a tensor from outside, returned as it is | graphed | test_outside_tensor_returned_* |
| an attribute that the forward moves, unread or in turns | disabled, as eager | test_attributes_that_are_* |
| an interrupt, or lazy growth, beside such a move | raised; kept | test_interrupt_of_a_run_*, test_prepare_keeps_* |
| weights without memory between calls | eager by name | test_weights_without_memory |
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from graphreplay.testing.contract_twin import ContractBase, assert_same


class _Turns(nn.Module):
    """Has two of everything, which change places."""

    front: Tensor
    back: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("front", torch.zeros(8))
        self.register_buffer("back", torch.ones(8))
        self.weight = nn.Parameter(torch.eye(8)[:, torch.arange(7, -1, -1)] + torch.eye(8).roll(2, 0))
        self.other = nn.Parameter(torch.ones(8, 8))
        self.flag, self.count, self.order = False, 0, [1.0, 2.0]


def _buffers(module: _Turns, x: Tensor) -> Tensor:
    module.front, module.back = module.back, module.front
    module.front.copy_(x[0])
    return x + module.front - module.back


def _flag(module: _Turns, x: Tensor) -> Tensor:
    module.flag = not module.flag
    return x + module.flag


def _counter(module: _Turns, x: Tensor) -> Tensor:
    module.count = (module.count + 1) % 3
    return x + module.count


def _list(module: _Turns, x: Tensor) -> Tensor:
    module.order.reverse()
    return x * module.order[0]


def _mode(module: _Turns, x: Tensor) -> Tensor:
    module.train(not module.training)
    return x + module.training


def _turned_weight(module: _Turns, x: Tensor) -> Tensor:
    module.weight.data = module.weight.data.t()
    return x @ module.weight


def _swapped_data(module: _Turns, x: Tensor) -> Tensor:
    module.weight.data, module.other.data = module.other.data, module.weight.data
    return x @ module.weight


_Change: TypeAlias = Callable[[_Turns, Tensor], Tensor]

COMING_BACK: list[_Change] = [_buffers, _flag, _counter, _list, _mode, _turned_weight, _swapped_data]


def _bind(module: _Turns, change: Callable[[_Turns, Tensor], Tensor]) -> _Turns:
    """The module with this as its forward, of a class of its own, so that copies change themselves."""

    def forward(self: _Turns, *, x: Tensor) -> Tensor:
        return change(self, x)

    module.__class__ = type("Turns", (_Turns,), {"forward": forward})
    return module


class _Held(nn.Module):
    """Holds tensors as plain attributes."""

    a: Tensor
    b: Tensor
    c: Tensor

    def __init__(self, change: _HeldChange) -> None:
        super().__init__()
        self.change = change
        self.order = OrderedDict(first=1.0, second=2.0, third=3.0)

    def place(self, device: Any) -> None:
        both = torch.arange(16.0, device=device)
        self.a, self.b = both[:8], both[8:]
        self.c = torch.ones(8, device=device)

    def forward(self, *, x: Tensor) -> Tensor:
        return self.change(self, x)


def _traded_memory(module: _Held, x: Tensor) -> Tensor:
    y = x + module.a * 2 + module.b
    module.a.data, module.b.data = module.b.data, module.a.data
    return y


def _unread(module: _Held, x: Tensor) -> Tensor:
    module.a.data = x + 1
    return x * 2


def _read_where_it_was_moved_to(module: _Held, x: Tensor) -> Tensor:
    module.a.data = module.c if module.a.data_ptr() == module.b.data_ptr() else module.b
    return x + module.a


def _turned_order(module: _Held, x: Tensor) -> Tensor:
    first = next(iter(module.order))
    module.order.move_to_end(first)
    return x * module.order[first]


_HeldChange: TypeAlias = Callable[[_Held, Tensor], Tensor]

MOVING: list[_HeldChange] = [_traded_memory, _unread, _read_where_it_was_moved_to, _turned_order]

MOVES: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda a: setattr(a, "data", a + 1),
    "set_": lambda a: a.set_((a + 1).untyped_storage(), 0, a.shape, a.stride()),
    "another layout": lambda a: setattr(a, "data", a.t().contiguous().t() + 1),
}


class TurnsContract(ContractBase):
    """State that no look at the module finds once a few runs are over."""

    @pytest.mark.parametrize("warmup_iters", [1, 2, 3])
    @pytest.mark.parametrize("change", COMING_BACK, ids=lambda change: change.__name__.strip("_"))
    def test_state_that_comes_back_disables(self, change: _Change, warmup_iters: int) -> None:
        twin = self.twin(_bind(_Turns(), change), warmup_iters=warmup_iters)
        with torch.no_grad():
            for seed in range(6):
                twin(x=self.x(seed=seed))
                for name in ("flag", "count", "order", "training"):
                    assert getattr(twin.graphed.module, name) == getattr(twin.plain, name)
        assert twin.counts() == (0, 0, 5)
        assert "which a replay would not do" in twin.eager_reason()

    @pytest.mark.parametrize("how", MOVES)
    def test_closure_tensor_that_the_forward_moves(self, how: str) -> None:
        def make() -> Callable[..., Tensor]:
            held = torch.zeros(3, 8, device=self.device)

            def forward(*, x: Tensor) -> Tensor:
                y = x + held
                MOVES[how](held)
                return y

            return forward

        graphed, plain = self.wrap(make()), make()
        with torch.no_grad():
            for seed in range(5):
                assert_same(graphed(x=self.x(seed=seed)), plain(x=self.x(seed=seed)))
        assert graphed.stats()["replays"] == 0
        assert "moves a tensor of shape (3, 8) from outside its module" in (graphed.disabled_reason or "")

    @pytest.mark.parametrize("run", [1, 2, 3])
    def test_closure_tensor_moved_by_a_run_that_raises_is_put_back(self, run: int) -> None:
        """The call's own forward, which is the first run, moved it too, and that stays."""
        held = torch.zeros(3, 8, device=self.device)
        runs: list[int] = []

        def forward(*, x: Tensor) -> Tensor:
            y = x + held
            runs.append(len(runs))
            if len(runs) > 1:
                held.data = held + 100
            if len(runs) == 1 + run:
                raise ValueError("in this run")
            return y

        graphed = self.wrap(forward, warmup_iters=2)
        with torch.no_grad():
            assert_same(graphed(x=self.x()), self.x())
            assert_same(held, torch.zeros(3, 8, device=self.device))
        assert not graphed.enabled

    @pytest.mark.parametrize("change", MOVING, ids=lambda change: change.__name__[1:])
    def test_attributes_that_are_moved_disable(self, change: _HeldChange) -> None:
        module, plain = _Held(change).to(self.device), _Held(change).to(self.device)
        for held in (module, plain):
            held.place(self.device)
        graphed = self.wrap(module)
        with torch.no_grad():
            for seed in range(4):
                assert_same(graphed(x=self.x(seed=seed)), plain(x=self.x(seed=seed)))
                assert_same((module.a, module.b, list(module.order)), (plain.a, plain.b, list(plain.order)))
        assert graphed.stats()["replays"] == 0
        assert "which a replay would not do" in (graphed.disabled_reason or "")

    def test_interrupt_of_a_run_that_moves_is_raised(self) -> None:
        held, runs = torch.zeros(3, 8, device=self.device), [0]

        def forward(*, x: Tensor) -> Tensor:
            y = x + held
            runs[0] += 1
            if runs[0] == 2:
                held.data = held + 1
                raise KeyboardInterrupt
            return y

        graphed = self.wrap(forward)
        with torch.no_grad():
            with pytest.raises(KeyboardInterrupt):
                graphed(x=self.x())
            assert_same(held, torch.zeros(3, 8, device=self.device))

    def test_prepare_keeps_what_grows_lazily(self) -> None:
        class Grows(nn.Module):
            table = torch.zeros(0, device=self.device)

            def forward(self, *, x: Tensor) -> Tensor:
                if len(self.table) < len(x):
                    self.table.resize_(len(x)).fill_(3.0)
                return x + self.table[: len(x), None]

        graphed = self.wrap(Grows())
        with torch.no_grad():
            assert graphed.prepare(x=self.x())
            for seed in range(2):
                assert_same(graphed(x=self.x(seed=seed)), self.x(seed=seed) + 3)
        assert graphed.stats()["replays"] == 2

    def test_output_of_another_thread(self) -> None:
        def forward(*, x: Tensor) -> Tensor:
            made: list[Tensor] = []
            thread = threading.Thread(target=lambda: made.append(x * 2))
            thread.start()
            thread.join()
            return made[0]

        graphed = self.wrap(forward)
        with torch.no_grad():
            for seed in range(4):
                assert_same(graphed(x=self.x(seed=seed)), self.x(seed=seed) * 2)
        stats = graphed.stats()
        assert (stats["captures"], stats["replays"]) == (0, 0)
        assert "no torch operator of this thread made" in next(iter(stats["eager_reasons"]))

    @pytest.mark.parametrize("how", ["itself", "contiguous", "detach"])
    def test_outside_tensor_returned_is_graphed(self, how: str) -> None:
        constant = torch.ones(3, 8, device=self.device)

        def forward(*, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, constant if how == "itself" else getattr(constant, how)()

        graphed = self.wrap(forward)
        with torch.no_grad():
            for seed in range(3):
                constant.fill_(float(seed))
                assert_same(graphed(x=self.x(seed=seed)), (self.x(seed=seed) * 2, constant))
        assert graphed.stats()["replays"] == 2

    @pytest.mark.parametrize("offset", [0, 64])
    def test_weights_without_memory(self, offset: int) -> None:
        """As of modules that are sharded between calls: the forward makes them anew, and lets them go."""
        module = nn.Linear(8, 8).to(self.device).requires_grad_(False)
        module.weight.data = torch.randn(offset + 64, device=self.device)[offset:].view(8, 8)
        shard = module.weight.clone()
        size = module.weight.untyped_storage().nbytes()

        def forward(*, x: Tensor) -> Tensor:
            module.weight.untyped_storage().resize_(size)
            module.weight.copy_(shard)
            y = module(x)
            module.weight.untyped_storage().resize_(0)
            return y  # type: ignore[no-any-return]

        expected = nn.functional.linear(self.x(), shard, module.bias)
        module.weight.untyped_storage().resize_(0)
        graphed = self.wrap(forward)
        with torch.no_grad():
            for _ in range(3):
                assert_same(graphed(x=self.x()), expected)
        assert graphed.stats()["replays"] == 0
        assert "weight weight has no memory between calls" in next(iter(graphed.stats()["eager_reasons"]))
