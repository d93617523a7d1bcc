"""Contract: what happens at a capture.

| kind | outcome | test |
| --- | --- | --- |
| any forward that can be captured | eager first, then replays, as eager | test_graphed_forward_equals_eager |
| operator that synchronizes the host | disabled, result as eager | test_host_sync_disables_and_loses_nothing |
| weights made at the first call | graphed afterwards | test_lazy_* |
| the place of such an operator | file and line in the reason | test_host_sync_reason_names_the_line |
| Python state on the module | disabled, state as after eager calls | test_python_state_disables_and_ends_as_eager |
| failure in any phase | disabled, result as eager, nothing left behind | test_failure_*, test_interrupt_* |
| forward that raises eagerly | raises, disables nothing | test_eager_error_reaches_the_caller |
| failure, then another user of the device | undisturbed | test_other_wrapper_captures_after_a_failure |
| capture_context | entered for captures, left before replays, body's error wins | test_context_* |
| call inside an outer capture | plain forward, part of the outer graph | test_nested_* |
| another thread using the device during capture | neither side fails | test_other_thread_* |
| garbage collection, random numbers | as before | test_failure_*, test_collector_is_off_while_capturing |
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphreplay.testing import zoo
from graphreplay.testing.contract_twin import MODES, ContractBase, assert_same, generator_states

PHASES = ("_warmup_stream", "_sync_probe", "_capture_graph", "enter", "exit")


class Broken(RuntimeError):
    """The fault that tests inject."""


class CaptureContract(ContractBase):
    """From a miss to a graph, or to a reason."""

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("specimen", zoo.GRAPHED, ids=str)
    def test_graphed_forward_equals_eager(self, specimen: zoo.Specimen, mode: str) -> None:
        self.equals_eager(specimen, mode)

    def test_lazy_modules_of_torch_are_graphed_once_initialized(self) -> None:
        lazy = zoo.Keyword(nn.LazyLinear(4))
        graphed = self.wrap(lazy)
        with torch.no_grad():
            for seed in range(5):
                x = self.x(seed=seed)
                assert_same(graphed(x=x), lazy(x))
        assert graphed.captures == 1
        assert graphed.stats()["replays"] >= 3

    @pytest.mark.parametrize("specimen", zoo.SYNCING, ids=str)
    def test_host_sync_disables_and_loses_nothing(self, specimen: zoo.Specimen) -> None:
        twin = self.twin(specimen.make())
        with torch.no_grad():
            for seed in range(3):
                twin(x=self.x(seed=seed))
        assert twin.counts() == (0, 0, 2)
        assert specimen.reason in (twin.graphed.disabled_reason or "")
        assert twin.eager_reason() == twin.graphed.disabled_reason
        assert twin.graphed.stats()["misses"] == 1
        assert not twin.graphed.enabled

    @pytest.mark.parametrize("expression", ["x.sum().item()", "x.nonzero().sum()", "x.cpu().sum()"])
    def test_host_sync_reason_names_the_line(self, expression: str, tmp_path: Path) -> None:
        file = tmp_path / "their_model.py"
        source = f"def forward(*, x):\n    y = x + 1\n    return y * {expression}\n"
        names: dict[str, Any] = {}
        exec(compile(source, str(file), "exec"), names)
        graphed = self.wrap(names["forward"])
        with torch.no_grad():
            graphed(x=self.x())
        assert f"{file}:3 in forward" in (graphed.disabled_reason or "enabled")

    @pytest.mark.parametrize("specimen", zoo.STATEFUL, ids=str)
    def test_python_state_disables_and_ends_as_eager(self, specimen: zoo.Specimen) -> None:
        twin = self.twin(specimen.make())
        with torch.no_grad():
            for seed in range(3):
                twin(x=self.x(seed=seed))
                for module, expected in zip(twin.graphed.module.modules(), twin.plain.modules(), strict=True):  # type: ignore[attr-defined]
                    public = {name: v for name, v in vars(expected).items() if not name.startswith("_")}
                    assert_same({name: vars(module)[name] for name in public}, public, "attributes")
        assert twin.counts() == (0, 0, 2)
        assert specimen.reason in (twin.graphed.disabled_reason or "")

    @pytest.mark.parametrize("phase", PHASES)
    def test_failure_disables_and_leaves_nothing_behind(self, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any) -> Any:
            raise Broken("made to fail")

        @contextmanager
        def context() -> Iterator[None]:
            if phase == "enter":
                broken()
            yield
            if phase == "exit":
                broken()

        twin = self.twin(_Everything(), capture_context=context)
        if phase.startswith("_"):
            monkeypatch.setattr(twin.graphed, phase, broken)
        autocast_cache, collecting = torch.is_autocast_cache_enabled(), gc.isenabled()
        with torch.no_grad():
            for seed in range(3):
                twin(x=self.x(seed=seed))  # compares buffers, inputs and generators with eager's each time
        assert twin.counts() == (0, 0, 2)
        assert "made to fail" in (twin.graphed.disabled_reason or "")
        assert (torch.is_autocast_cache_enabled(), gc.isenabled()) == (autocast_cache, collecting)

    @pytest.mark.parametrize("run", [2, 3, 4])
    def test_failure_of_a_later_run_disables(self, run: int) -> None:
        # Run 1 is the call's own; 2 and 3 warm up, 4 is captured.
        graphed = self.wrap(zoo.fails_in_call(run), warmup_iters=2)
        with torch.no_grad():
            for seed in range(3):
                assert_same(graphed(x=self.x(seed=seed)), self.x(seed=seed) * 2)
        assert "this run fails" in (graphed.disabled_reason or "")
        assert graphed.stats()["eager_calls"] == 2

    def test_eager_error_reaches_the_caller(self) -> None:
        graphed = self.wrap(zoo.fails_in_call(1))
        with torch.no_grad():
            with pytest.raises(RuntimeError, match="this run fails"):
                graphed(x=self.x())
            assert graphed.enabled
            assert graphed.num_graphs == 0
            assert_same(graphed(x=self.x(seed=1)), self.x(seed=1) * 2)
            assert_same(graphed(x=self.x(seed=2)), self.x(seed=2) * 2)
        stats = graphed.stats()
        assert (stats["captures"], stats["replays"], stats["eager_calls"]) == (1, 1, 0)

    @pytest.mark.parametrize("run", [2, 4])
    def test_interrupt_reaches_the_caller_and_leaves_nothing_behind(self, run: int) -> None:
        counter = zoo.Counter().to(self.device)
        fails = zoo.fails_in_call(run, KeyboardInterrupt())
        graphed = self.wrap(lambda *, x: fails(x=counter(x)[0]), warmup_iters=2)
        before = generator_states(self.device)
        with torch.no_grad():
            with pytest.raises(KeyboardInterrupt):
                graphed(x=self.x())
            assert gc.isenabled()
            assert counter.calls.item() == 1
            assert_same(generator_states(self.device), before, "generators")
            graphed(x=self.x(seed=1))
            assert_same(graphed(x=self.x(seed=2)), self.x(seed=2) * 2 * 3)
        assert graphed.stats()["replays"] == 1

    def test_other_wrapper_captures_after_a_failure(self) -> None:
        failing = self.wrap(zoo.fails_in_call(3))
        syncing = self.wrap(lambda *, x: x * x.sum().item())
        twin = self.twin(_Everything())
        with torch.no_grad():
            failing(x=self.x())
            syncing(x=self.x())
            for seed in range(3):
                twin(x=self.x(seed=seed))
        assert not failing.enabled
        assert not syncing.enabled
        assert twin.counts() == (1, 2, 0)

    def test_collector_is_off_while_capturing(self) -> None:
        seen = []

        def forward(*, x: torch.Tensor) -> torch.Tensor:
            seen.append(gc.isenabled())
            return x + 1

        graphed = self.wrap(forward)
        with torch.no_grad():
            graphed(x=self.x())
        assert seen == [True, False, False], "the call's own, a warm-up, the capture"
        assert gc.isenabled()
        gc.disable()
        try:
            with torch.no_grad():
                graphed(x=self.x(5))
            assert not gc.isenabled(), "a collector that was off stays off"
        finally:
            gc.enable()

    def test_other_thread_works_while_capturing(self) -> None:
        other: list[Any] = []

        def compute() -> None:
            try:
                other.append((self.x(seed=1) @ self.x(seed=1).t()).sum().item())
            except BaseException as error:
                other.append(error)

        def forward(*, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()
            return x + 1

        twin = self.twin(forward)
        with torch.no_grad():
            for seed in range(2):
                twin(x=self.x(seed=seed))
        assert len(set(other)) == 1, other
        assert isinstance(other[0], float)
        assert twin.counts() == (1, 1, 0), twin.graphed.stats()

    def test_context_surrounds_captures_and_nothing_else(self) -> None:
        events: list[str] = []

        @contextmanager
        def context() -> Iterator[None]:
            events.append("enter")
            yield
            events.append("leave")

        def forward(*, x: torch.Tensor) -> torch.Tensor:
            events.append("run")
            return x + 1

        graphed = self.wrap(forward, capture_context=context, warmup_iters=1)
        with torch.no_grad():
            graphed(x=self.x())
            assert events == ["run", "enter", "run", "run", "leave"]
            events.clear()
            graphed(x=self.x())
        assert events == []

    def test_context_state_is_captured_and_restored(self) -> None:
        module = _Switchable().to(self.device)

        @contextmanager
        def exact() -> Iterator[None]:
            module.memo = False
            try:
                yield
            finally:
                module.memo = True

        graphed = self.wrap(module, capture_context=exact)
        with torch.no_grad():
            for seed in range(3):
                assert_same(graphed(x=self.x(seed=seed)), self.x(seed=seed) * 2)
        assert module.memo
        assert graphed.stats()["replays"] == 2

    def test_context_error_of_the_body_wins(self) -> None:
        @contextmanager
        def context() -> Iterator[None]:
            try:
                yield
            finally:
                raise Broken("leaving fails too")

        graphed = self.wrap(zoo.fails_in_call(2), capture_context=context)
        with torch.no_grad():
            graphed(x=self.x())
        assert "this run fails" in (graphed.disabled_reason or "")

    def test_nested_wrapper_that_the_module_holds_is_no_state_of_it(self) -> None:
        class Holder(nn.Module):
            def __init__(self, inner: Any) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, *, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.inner(x=x) + 1
                return out

        inner = self.wrap(zoo.MLP())
        outer = self.wrap(Holder(inner))
        with torch.no_grad():
            for seed in range(4):
                assert_same(outer(x=self.x(seed=seed)), inner.module(self.x(seed=seed)) + 1)
        assert (outer.captures, outer.stats()["replays"], outer.disabled_reason) == (1, 3, None)

    def test_nested_call_becomes_part_of_the_outer_graph(self) -> None:
        inner = self.wrap(zoo.MLP(), capture_context=lambda: entered())
        depth = []

        @contextmanager
        def entered() -> Iterator[None]:
            depth.append("enter")
            yield
            depth.append("leave")

        outer = self.wrap(lambda *, x: inner(x=x) + 1, warmup_iters=2)
        with torch.no_grad():
            for seed in range(4):
                expected = inner.module(self.x(seed=seed)) + 1
                assert_same(outer(x=self.x(seed=seed)), expected)
                if seed == 0:
                    captured = inner.stats()
                    # Its own capture, in the outer call's eager forward, then the outer's two warm-ups and capture.
                    assert depth == ["enter", "leave"] * 4
        assert (outer.captures, outer.stats()["replays"]) == (1, 3)
        assert (captured["captures"], captured["replays"], captured["graphs"]) == (1, 0, 1)
        assert captured["eager_reasons"] == {"called inside another capture": 3}
        assert inner.stats() == captured, "replays of the outer graph do not come by the inner wrapper"

    def test_nested_weights_that_move_are_noticed(self) -> None:
        inner = self.wrap(zoo.MLP())
        outer = self.wrap(lambda *, x: inner(x=x) + 1)
        with torch.no_grad():
            outer(x=self.x())
            outer(x=self.x())
            inner.module.down.weight.data = torch.ones_like(inner.module.down.weight)
            assert_same(outer(x=self.x(seed=1)), inner.module(self.x(seed=1)) + 1)


class _Everything(nn.Module):
    """Counts in a buffer, keeps running statistics, and draws random numbers that do not reach the result."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = zoo.Counter()
        self.norm = zoo.TrainingNorm()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(torch.rand_like(x) * 0)
        result: tuple[torch.Tensor, torch.Tensor] = self.counter(self.norm(x))
        return result


class _Switchable(nn.Module):
    """With its memo on, it does what no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.memo = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if not self.memo or x.sum().isfinite().item() else x
