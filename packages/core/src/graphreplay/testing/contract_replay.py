"""Contract: what a replay gives back, and what it leaves alone.

| kind | outcome | test |
| --- | --- | --- |
| an earlier output held across later calls | unchanged | test_outputs_are_the_callers_own |
| outputs that share storage | share it still, and with nothing else | test_shared_outputs_* |
| module that mutates its buffers | one call is one step | test_buffers_step_once_a_call |
| a closure's tensor | read as it is now | test_closure_tensor_* |
| calls from several threads | as eager | test_threads |
| a wrapper that is dropped | frees its graphs at once | test_dropped_* |
| eviction | survivors still right, memory comes back | test_eviction_* |
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphreplay.testing import zoo
from graphreplay.testing.contract_twin import ContractBase, assert_same

HOLDABLE = [
    specimen
    for specimen in zoo.GRAPHED
    if not specimen.random
    and not specimen.host_constant
    and specimen.name not in ("empty", "no_tensor_out", "output_trees")
]
"""Forwards with tensors among their outputs, the same at each call."""


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class ReplayContract(ContractBase):
    """Results of replays and the life of graphs."""

    @pytest.mark.parametrize("specimen", HOLDABLE, ids=str)
    def test_outputs_are_the_callers_own(self, specimen: zoo.Specimen) -> None:
        graphed = self.wrap(specimen.make())
        with torch.no_grad():
            graphed(x=self.x())
            held = _flat(graphed(x=self.x(seed=1)))
            before = [leaf.clone(memory_format=torch.contiguous_format) for leaf in held]
            for leaf in _flat(graphed(x=self.x(seed=2))):
                torch.as_strided(leaf, (leaf.untyped_storage().nbytes() // leaf.element_size(),), (1,), 0).zero_()
            again = _flat(graphed(x=self.x(seed=1)))
        assert held
        assert_same([leaf.contiguous() for leaf in held], before)
        if specimen.name not in ("Counter", "KeyValueCache"):
            assert_same([leaf.contiguous() for leaf in again], before)
        assert graphed.stats()["replays"] == 3, graphed.stats()

    def test_shared_outputs_share_with_one_another_only(self) -> None:
        buffer = self.x(seed=7)
        graphed = self.wrap(lambda *, x: (y := x * 2, y[1:], y.t(), x, x[0], buffer, y + 1))
        x = self.x()
        with torch.no_grad():
            graphed(x=x)
            first, second = graphed(x=x), graphed(x=x)
        for y, tail, transposed, same, row, constant, alone in (first, second):
            assert _storage(y) == _storage(tail) == _storage(transposed)
            assert _storage(same) == _storage(row)
            assert len({_storage(t) for t in (y, same, constant, alone, x, buffer)}) == 6
            y.zero_()
            assert_same(tail, torch.zeros_like(x[1:]), "a view")
        assert {_storage(t) for t in first}.isdisjoint({_storage(t) for t in second})

    def test_buffers_step_once_a_call(self) -> None:
        twin = self.twin(zoo.Counter(), warmup_iters=4)
        with torch.no_grad():
            for call in range(1, 6):
                result, calls = twin(x=self.x(seed=call))
                assert calls.item() == call
                assert_same(result, self.x(seed=call) * call)
            assert twin.graphed.prepare(x=self.x(5))
            assert twin.graphed.module.calls.item() == 5  # type: ignore[attr-defined]
            twin(x=self.x(5))
        assert twin.counts() == (2, 5, 0)

    def test_buffer_of_a_closure_steps_once_a_call(self) -> None:
        total = torch.zeros(zoo.WIDTH, device=self.device)
        graphed = self.wrap(lambda *, x: total.add_(x.sum(0)) * 1)
        expected = torch.zeros_like(total)
        with torch.no_grad():
            for seed in range(4):
                expected += self.x(seed=seed).sum(0)
                assert_same(graphed(x=self.x(seed=seed)), expected)
                assert_same(total, expected)
        assert graphed.stats()["replays"] == 3

    def test_closure_tensor_is_read_as_it_is_now(self) -> None:
        factor = torch.ones((), device=self.device)
        graphed = self.wrap(lambda *, x: x * factor)
        with torch.no_grad():
            for value in (2.0, 3.0, 4.0):
                factor.fill_(value)
                assert_same(graphed(x=self.x()), self.x() * value)
            factor.data = torch.full_like(factor, 9.0)
            assert_same(graphed(x=self.x()), self.x() * 9)
            assert_same(graphed(x=self.x(seed=1)), self.x(seed=1) * 9)
        assert (graphed.captures, graphed.stats()["replays"]) == (2, 3)

    def test_closure_tensor_passed_as_a_kwarg(self) -> None:
        total = self.x(seed=9)

        def forward(*, x: Tensor) -> Tensor:
            total.add_(1)
            return x * 2

        graphed = self.wrap(forward)
        with torch.no_grad():
            graphed(x=self.x())
            graphed(x=self.x())
            for _ in range(3):
                expected = (total + 1) * 2
                assert_same(graphed(x=total), expected)
        stats = graphed.stats()
        assert (stats["captures"], stats["replays"], stats["eager_calls"]) == (1, 1, 3)
        (reason,) = stats["eager_reasons"]
        assert 'kwargs["x"] shares memory' in reason

    def test_memory_of_a_closure_lives_as_long_as_its_graph(self) -> None:
        parts = [self.x(seed=3)]
        graphed = self.wrap(lambda *, x: x + sum(parts))
        with torch.no_grad():
            graphed(x=self.x(), variant=1)
            parts[0] = self.x(seed=4)
            graphed(x=self.x(), variant=2)
            filler = [torch.full_like(self.x(), float("nan")) for _ in range(50)]
            assert_same(graphed(x=self.x(), variant=1), self.x() + self.x(seed=3))
            assert_same(graphed(x=self.x(), variant=2), self.x() + self.x(seed=4))
        assert len(filler) == 50
        assert graphed.stats()["replays"] == 2

    def test_threads(self) -> None:
        twin = self.twin(zoo.Attention())
        inputs = {(count, seed): self.x(count, seed) for count in (2, 3, 5) for seed in range(4)}
        with torch.no_grad():
            expected = {at: twin.plain(x=x) for at, x in inputs.items()}
        results: list[Any] = []
        start = threading.Barrier(4)

        def work(number: int) -> None:
            start.wait()
            with torch.no_grad():
                for call in range(50):
                    at = ((2, 3, 5)[(call + number) % 3], (call + number) % 4)
                    results.append((at, twin.graphed(x=inputs[at])))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 200
        for at, result in results:
            assert_same(result, expected[at], f"rows and seed {at}")
        stats = twin.graphed.stats()
        assert (stats["captures"], stats["replays"], stats["eager_calls"]) == (3, 197, 0)

    @pytest.mark.parametrize("clone_outputs", [True, False])
    @pytest.mark.parametrize("outputs", ["plain", "strided", "shared", "written"])
    def test_dropped_graphs_free_their_memory(self, outputs: str, clone_outputs: bool) -> None:
        """Without the collector: static tensors go with the graph that is evicted, or whose wrapper is dropped."""

        def forward(*, x: Tensor) -> Any:
            y = x * 2
            if outputs == "written":
                x.add_(1)
            return {"plain": y, "strided": y[:, ::2], "shared": (y, y[:1]), "written": y}[outputs]

        graphed = self.wrap(forward, max_entries=1, clone_outputs=clone_outputs)
        entries: list[weakref.ref[Any]] = []
        gc.disable()
        try:
            with torch.no_grad():
                for count in (2, 3, 4):
                    for _ in range(3):
                        assert_same(graphed(x=self.x(count)), forward(x=self.x(count)))
                    entries.append(weakref.ref(graphed._cache.newest))
            assert [entry() is None for entry in entries] == [True, True, False]
            del graphed
            assert entries[-1]() is None
        finally:
            gc.enable()

    def test_dropped_wrapper_frees_its_graphs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graphs: list[weakref.ref[Any]] = []
        capture = self.cls._capture_graph

        def noted(hooks: Any, forward: Callable[[], Any]) -> Any:
            graph, outputs = capture(hooks, forward)
            graphs.append(weakref.ref(graph))
            return graph, outputs

        monkeypatch.setattr(self.cls, "_capture_graph", noted)
        gc.disable()
        try:
            module = zoo.MLP()
            graphed = self.wrap(module)
            alive = weakref.ref(graphed)
            with torch.no_grad():
                for count in (2, 3):
                    graphed(x=self.x(count))
                    graphed(x=self.x(count))
            assert [graph() is None for graph in graphs] == [False, False]
            del graphed
            assert alive() is None
            assert [graph() is None for graph in graphs] == [True, True]
            # After a failed capture the wrapper, its graphs and what the forward saw must be free as well.
            graphed = self.wrap(zoo.fails_in_call(4))
            alive = weakref.ref(graphed)
            with torch.no_grad():
                graphed(x=self.x())
            del graphed
            assert alive() is None
        finally:
            gc.enable()

    def test_eviction_leaves_survivors_right(self) -> None:
        twin = self.twin(zoo.MLP(), max_entries=2)
        with torch.no_grad():
            for seed, count in enumerate((1, 2, 3, 2, 3, 1, 3, 1)):
                twin(x=self.x(count, seed))
        assert twin.counts() == (4, 4, 0)
        stats = twin.graphed.stats()
        assert (stats["graphs"], stats["evictions"], stats["misses"]) == (2, 2, 4)

    def test_eviction_gives_bytes_back(self) -> None:
        graphed = self.wrap(zoo.MLP())
        with torch.no_grad():
            graphed(x=self.x(3))
            one = graphed.stats()["bytes"]
            graphed(x=self.x(4))
            assert graphed.stats()["bytes"] >= one > 0
            assert graphed.evict(x=self.x(4))
            assert graphed.stats()["bytes"] == one
            assert not graphed.evict(x=self.x(4))
        graphed.reset()
        assert graphed.stats()["bytes"] == 0


def _flat(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree
    return [leaf for value in values for leaf in _flat(value)]
