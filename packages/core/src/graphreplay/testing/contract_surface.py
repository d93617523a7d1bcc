"""Contract: construction, options and bounds.

| kind | outcome | test |
| --- | --- | --- |
| bad constructor argument, no such device | error of the right class | test_constructor_*, test_device_* |
| positional argument | error | test_positional_* |
| many shapes, few slots | bounded, the leaf named | test_lru_*, test_max_bytes_*, test_thrash_* |
| pins | kept, unpinned, reset | test_pins_*, test_pin_on_a_hit |
| prepare | a graph without a call | test_prepare_* |
| forward kwargs named like options | options(); else refused where the forward names them | test_options_* |
| a shared pool | wrappers stay right | test_shared_pool_* |
| a group of more than one rank | eager with a reason | test_group_* |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import graphreplay
from graphreplay.testing import zoo
from graphreplay.testing.contract_twin import ContractBase, assert_same


def _triple(*, pin: Tensor, variant: Tensor, keep_alive: Tensor) -> Tensor:
    return pin + variant * 2 + keep_alive * 3


def _with_defaults(*, x: Tensor, pin: int = 1, variant: int = 1, keep_alive: int = 1) -> Tensor:
    return x * pin * variant * keep_alive


@contextmanager
def _group_of_one(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class SurfaceContract(ContractBase):
    """What a caller of a graphed forward can do with it."""

    @pytest.mark.parametrize(
        "options",
        [
            {"max_entries": 0},
            {"max_entries": -1},
            {"max_entries": "8"},
            {"max_entries": 2.5},
            {"max_entries": float("nan")},
            {"max_entries": True},
            {"max_bytes": 0},
            {"max_bytes": 1e9},
            {"warmup_iters": 0},
            {"warmup_iters": 1.5},
            {"pool": "shared"},
            {"capture_context": 3},
            {"capture_context": nullcontext()},
            {"enabled": "no"},
            {"nvtx": 1},
        ],
        ids=lambda options: f"{next(iter(options))}={type(next(iter(options.values()))).__name__}",
    )
    def test_constructor_refuses(self, options: dict[str, Any]) -> None:
        with pytest.raises(graphreplay.ConfigurationError, match=next(iter(options))):
            self.wrap(lambda *, x: x, **options)

    def test_constructor_refuses_what_cannot_be_called(self) -> None:
        with pytest.raises(graphreplay.ConfigurationError, match="callable"):
            self.cls(3, device=self.device)  # type: ignore[arg-type]
        assert issubclass(graphreplay.ConfigurationError, ValueError)

    def test_device_unknown_or_not_there(self) -> None:
        with pytest.raises(graphreplay.UnknownDeviceError, match="nonsense"):
            self.cls(len, device="nonsense")
        kind = torch.device(self.device).type
        with pytest.raises(graphreplay.BackendUnavailableError, match=f"{kind}:99"):
            self.cls(len, device=f"{kind}:99")

    def test_device_index_is_filled_in(self) -> None:
        kind = torch.device(self.device).type
        for device in (kind, f"{kind}:0", torch.device(kind), torch.device(kind, 0)):
            graphed = self.cls(lambda *, x: x + 1, device=device)
            x = torch.ones(3, device=device)
            graphed(x=x)
            graphed(x=x)
            assert graphed.stats()["replays"] == 1

    def test_device_of_another_kind_is_no_graph(self) -> None:
        graphed = self.cls(lambda *, x: x + 1, device="meta")
        assert not graphed.enabled
        assert "meta" in (graphed.disabled_reason or "")
        assert graphed(x=torch.ones(2, device="meta")).is_meta

    def test_backend_is_found_by_its_device(self) -> None:
        assert graphreplay.get_graphed_forward_cls(self.device) is self.cls

    def test_positional_arguments_are_refused(self) -> None:
        graphed = self.wrap(zoo.MLP())
        with pytest.raises(graphreplay.PositionalArgumentError, match=r"graphed\(x=x\)"):
            graphed(self.x())

    def test_enabled_false_and_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        off = [self.wrap(lambda *, x: x + 1, enabled=False)]
        monkeypatch.setenv("GRAPHREPLAY_DISABLE", "1")
        off.append(self.wrap(lambda *, x: x + 1))
        for value in ("", "0"):
            monkeypatch.setenv("GRAPHREPLAY_DISABLE", value)
            assert self.wrap(lambda *, x: x + 1).enabled
        for graphed, reason in zip(off, ("enabled=False", "GRAPHREPLAY_DISABLE"), strict=True):
            for seed in range(2):
                assert_same(graphed(x=self.x(seed=seed)), self.x(seed=seed) + 1)
            assert not graphed.prepare(x=self.x())
            stats = graphed.stats()
            assert (stats["captures"], stats["eager_calls"], stats["enabled"]) == (0, 2, False)
            assert reason in stats["disabled_reason"]

    def test_lru_keeps_the_most_recently_used(self) -> None:
        graphed = self.wrap(lambda *, x: x + 1, max_entries=2)
        for count in (1, 2, 1, 3):  # 2 is the least recently used when 3 comes
            graphed(x=self.x(count))
        assert [graphed.evict(x=self.x(count)) for count in (1, 2, 3)] == [True, False, True]
        assert graphed.stats()["evictions"] == 1

    def test_max_bytes_bounds_the_graphs(self) -> None:
        probe = self.wrap(lambda *, x: x + 1)
        sizes: list[int] = []
        for count in (1000, 1000000):
            probe(x=torch.ones(count, device=self.device))
            sizes.append(probe.stats()["bytes"] - sum(sizes))
        graphed = self.wrap(lambda *, x: x + 1, max_bytes=max(sizes) - 1)
        for _ in range(3):
            for count in (1000, 1000000):
                x = torch.ones(count, device=self.device)
                assert_same(graphed(x=x), x + 1)
        stats = graphed.stats()
        assert stats["bytes"] < max(sizes)
        assert (stats["graphs"], stats["captures"], stats["replays"], stats["eager_calls"]) == (1, 2, 2, 2)
        (reason,) = stats["eager_reasons"]
        assert f"max_bytes={max(sizes) - 1}" in reason

    def test_thrash_is_bounded_and_named(self, caplog: pytest.LogCaptureFixture) -> None:
        graphed = self.wrap(lambda *, x, mask: x + mask, max_entries=2)
        for _ in range(3):
            for count in range(1, 13):
                assert_same(graphed(x=self.x(count), mask=self.x(1)), self.x(count) + self.x(1))
                assert graphed.num_graphs <= 2
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert any('kwargs["x"]' in text for text in warnings), warnings

    def test_pins_are_kept(self) -> None:
        graphed = self.wrap(lambda *, x: x + 1, max_entries=1)
        graphed(x=self.x(1), pin=True)
        with pytest.warns(graphreplay.GraphReplayWarning, match="unpin"):
            graphed(x=self.x(2), pin=True)
        for count in (3, 4):
            graphed(x=self.x(count))
        stats = graphed.stats()
        assert (stats["pinned"], stats["graphs"], stats["captures"]) == (2, 3, 4)
        for count in (1, 2):
            assert_same(graphed(x=self.x(count)), self.x(count) + 1)
        assert graphed.stats()["replays"] == 2
        assert graphed.unpin(x=self.x(1))
        assert not graphed.unpin(x=self.x(9))
        assert graphed.evict(x=self.x(2)), "pinned graphs can be evicted by hand"
        assert (graphed.stats()["pinned"], graphed.num_graphs) == (0, 0)

    def test_pin_on_a_hit(self) -> None:
        graphed = self.wrap(lambda *, x: x + 1, max_entries=1)
        graphed(x=self.x(1))
        graphed(x=self.x(1), pin=True)
        graphed(x=self.x(1))
        assert graphed.stats()["pinned"] == 1
        assert graphed.captures == 1

    @pytest.mark.parametrize("pin", [False, True])
    def test_prepare_makes_a_graph_without_a_call(self, pin: bool) -> None:
        twin = self.twin(zoo.KeyValueCache())
        x = self.x()
        kept = x.clone()
        with torch.no_grad():
            assert twin.graphed.prepare(x=x, pin=pin) is True
            assert_same(x, kept, "inputs")
            twin.check_state()
            assert twin.graphed.prepare(x=x) is True
            assert twin.graphed.stats()["pinned"] == int(pin)
            for seed in range(3):
                twin(x=self.x(seed=seed))
        assert twin.counts() == (1, 3, 0)

    def test_prepare_of_many_values_keeps_them_all(self) -> None:
        twin = self.twin(lambda *, x, t: x * t, max_entries=32)
        with torch.no_grad():
            assert [twin.graphed.prepare(x=self.x(), t=step) for step in range(20)] == [True] * 20
            for step in range(20):
                twin(x=self.x(seed=step), t=step)
        assert twin.counts() == (20, 20, 0)

    def test_prepare_on_a_disabled_wrapper(self) -> None:
        ran: list[Tensor] = []
        graphed = self.wrap(lambda *, x: ran.append(x))
        graphed.disable("for a test")
        assert graphed.prepare(x=self.x(), pin=True) is False
        assert not ran
        stats = graphed.stats()
        assert stats["miss_reasons"] == {"not prepared: for a test": 1}
        assert (stats["eager_calls"], stats["pinned"]) == (0, 0)

    def test_module_is_the_very_one(self) -> None:
        for module in (zoo.MLP(), zoo.writes_input, zoo.MLP().forward):
            assert self.wrap(module).module is module

    def test_evict_and_unpin_under_another_mode_find_nothing(self) -> None:
        graphed = self.wrap(lambda *, x: x + 1)
        with torch.no_grad():
            graphed(x=self.x(), pin=True)
        for mode in (torch.enable_grad, torch.inference_mode):
            with mode():
                assert graphed.unpin(x=self.x()) is False
                assert graphed.evict(x=self.x()) is False
        assert (graphed.num_graphs, graphed.stats()["pinned"]) == (1, 1)
        with torch.no_grad():
            assert graphed.unpin(x=self.x()) is True
            assert graphed.evict(x=self.x()) is True
        assert graphed.num_graphs == 0

    def test_prepare_leaves_inputs_that_the_forward_writes(self) -> None:
        graphed = self.wrap(zoo.writes_input)
        x = self.x()
        assert graphed.prepare(x=x)
        assert_same(x, self.x(), "inputs")
        graphed(x=x)
        assert_same(x, self.x() * 2 + 1, "inputs")

    def test_prepare_says_why_not(self) -> None:
        graphed = self.wrap(lambda *, x, extra=None: x * x.sum().item())
        assert graphed.prepare(x=self.x(), extra=object()) is False
        assert graphed.enabled
        assert graphed.prepare(x=self.x()) is False
        assert not graphed.enabled
        stats = graphed.stats()
        assert any('kwargs["extra"]' in reason for reason in stats["miss_reasons"])
        assert "makes the host wait" in stats["disabled_reason"]

    def test_prepare_before_the_first_call_of_a_lazy_module(self) -> None:
        twin = self.twin(zoo.LazyWeight())
        with torch.no_grad():
            twin.graphed.prepare(x=self.x())
            for seed in range(3):
                assert_same(twin.graphed(x=self.x(seed=seed)), self.x(seed=seed))
        assert twin.graphed.enabled

    def test_options_free_the_names(self) -> None:
        graphed = self.wrap(_triple)
        for seed in range(3):
            x = self.x(seed=seed)
            bound = graphed.options(pin=True, variant="v")
            assert_same(bound(pin=x, variant=x + 1, keep_alive=x + 2), x + (x + 1) * 2 + (x + 2) * 3)
        stats = graphed.stats()
        assert (stats["captures"], stats["replays"], stats["pinned"]) == (1, 2, 1)
        assert bound.unpin(pin=x, variant=x, keep_alive=x.clone()) is False, "other tensors share storage"
        assert bound.unpin(pin=x, variant=x + 1, keep_alive=x + 2)
        assert bound.evict(pin=x, variant=x + 1, keep_alive=x + 2)
        assert bound.prepare(pin=x, variant=x + 1, keep_alive=x + 2)

    @pytest.mark.parametrize("method", ["__call__", "prepare", "unpin", "evict"])
    @pytest.mark.parametrize("name", ["variant", "keep_alive", "pin"])
    def test_options_that_may_be_the_forwards_own_are_refused(self, name: str, method: str) -> None:
        """Though the forward has a default for it, and would run without."""
        graphed = self.wrap(_with_defaults)
        with pytest.raises(graphreplay.ConfigurationError, match=rf"graphed\.options\(\)\({name}=…\)"):
            getattr(graphed, method)(x=self.x(), **{name: 2})
        assert_same(graphed.options()(x=self.x(), **{name: 2}), self.x() * 2)
        assert_same(graphed(x=self.x()), self.x())

    @pytest.mark.parametrize("options", [{"pin": 1}, {"pin": [1]}, {"keep_alive": [1]}])
    def test_options_of_another_type_are_refused(self, options: dict[str, Any]) -> None:
        graphed = self.wrap(lambda *, x, **_: x + 1)
        (name,) = options
        where = rf"^{name} must be .*graphed\.options\(\)\({name}=…\)$"
        with pytest.raises(graphreplay.ConfigurationError, match=where):
            graphed(x=self.x(), **options)
        assert_same(graphed.options()(x=self.x(), **options), self.x() + 1)

    def test_shared_pool_keeps_wrappers_right(self) -> None:
        pool = graphreplay.GraphPool()
        first, second = self.twin(zoo.MLP(), pool=pool), self.twin(zoo.Attention(), pool=pool)
        with torch.no_grad():
            held = []
            for seed in range(4):
                for twin in (first, second):
                    x = self.x(2 + seed % 2, seed)
                    held.append((twin(x=x), twin.plain(x=x)))
            first.graphed.close()
            second(x=self.x(2, 9))
        assert first.counts() == (2, 2, 0)
        assert second.counts() == (2, 3, 0)
        for actual, expected in held:
            assert_same(actual, expected)

    def test_shared_pool_belongs_to_one_device(self) -> None:
        pool = graphreplay.GraphPool()
        self.wrap(lambda *, x: x, pool=pool)
        with pytest.raises(graphreplay.ConfigurationError, match="pool"):
            self.cls(lambda *, x: x, device="meta", pool=pool)

    def test_group_of_one_rank_is_graphed(self, tmp_path: Path) -> None:
        with _group_of_one(tmp_path) as group:
            graphed = self.wrap(lambda *, x: x + 1, group=group)
            for seed in range(2):
                assert_same(graphed(x=self.x(seed=seed)), self.x(seed=seed) + 1)
            assert graphed.stats()["replays"] == 1
            graphed.close()

    def test_group_without_torch_distributed_is_refused(self) -> None:
        with pytest.raises(graphreplay.ConfigurationError, match=r"torch\.distributed is not initialized"):
            self.wrap(lambda *, x: x + 1, group=object())

    @pytest.mark.parametrize("deadline", [0, -1.0, float("inf"), float("nan"), "30", None, True])
    def test_bad_deadline_is_refused(self, deadline: Any) -> None:
        with pytest.raises(graphreplay.ConfigurationError, match="deadline must be a number of seconds above 0"):
            self.wrap(lambda *, x: x + 1, deadline=deadline)

    def test_repr_tells_the_state(self) -> None:
        graphed = self.wrap(lambda *, x: x + 1, name="teacher")
        graphed(x=self.x())
        assert "teacher" in repr(graphed)
        assert "1 graph" in repr(graphed)
        graphed.close()
        assert "closed" in repr(graphed)
