"""Contract: replays that are compared with eager.

| kind | outcome | test |
| --- | --- | --- |
| verify="off", "first", "always" | none, one a graph, every replay compared | test_how_many_replays_are_compared |
| an output, buffer or written input that is not as eager | eager's result, disabled, what differed | test_*_is_found |
| random numbers, buffers | compared under one seed; one step a call | test_a_right_replay_leaves_no_trace |
| state that neither kwargs nor module show | found | test_hidden_state_is_found |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphreplay.entry import Graph, Launch
from graphreplay.errors import ConfigurationError
from graphreplay.storage import CopyPlan
from graphreplay.testing import zoo
from graphreplay.testing.contract_twin import ContractBase, assert_same, generator_states


class _Corrupted:
    """A graph after whose replays something is done to what it left."""

    def __init__(self, graph: Graph, spoil: Callable[[Sequence[Tensor]], object]) -> None:
        self._graph, self._spoil = graph, spoil
        self.nbytes, self.reset = graph.nbytes, graph.reset

    def staging(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Launch:
        static_inputs, static_outputs = inputs, outputs
        run, handing_out = self._graph.staging(inputs, ()), CopyPlan(outputs)

        def launch(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            run(inputs, ())
            self._spoil(static_inputs)
            handing_out.copy(outputs, static_outputs)

        return launch


class Accumulates(nn.Module):
    """Counts its calls in a buffer and in its kwarg."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(2))

    def forward(self, *, x: Tensor) -> Tensor:
        self.steps += 1
        x.add_(1)
        return x * 2


class VerifyContract(ContractBase):
    """``verify=``."""

    def corrupted(self, module: Any, spoil: Callable[[Sequence[Tensor], Any], object], **options: Any) -> Any:
        """A wrapper whose replays end with ``spoil(static inputs, static outputs)``."""
        cls = self.cls

        def _capture_graph(self: Any, forward: Callable[[], Any]) -> tuple[Any, Any]:
            graph, outputs = cls._capture_graph(self, forward)
            return _Corrupted(graph, lambda inputs: spoil(inputs, outputs)), outputs

        backend = type("Corrupted", (cls,), {"_capture_graph": _capture_graph})
        if isinstance(module, nn.Module):
            module.to(self.device)
        return backend(module, device=self.device, **options)

    @pytest.mark.parametrize(("verify", "compared"), [("off", 0), ("first", 2), ("always", 5)])
    def test_how_many_replays_are_compared(self, verify: str, compared: int) -> None:
        twin = self.twin(zoo.MLP(), verify=verify)
        with torch.no_grad():
            for step, count in enumerate([3, 3, 4, 3, 4, 4, 3]):
                twin(x=self.x(count, seed=step))
        assert twin.counts() == (2, 5, 0)
        assert twin.graphed.stats()["verified"] == compared

    @pytest.mark.parametrize("verify", ["first", "always"])
    def test_a_wrong_output_is_found(self, verify: str) -> None:
        def spoil(_inputs: Sequence[Tensor], outputs: dict[str, Tensor]) -> None:
            outputs["sum"][1, 2] += 1

        graphed = self.corrupted(lambda *, x: {"same": x * 1, "sum": x + 3}, spoil, verify=verify)
        x = self.x()
        with torch.no_grad():
            for _ in range(3):
                assert_same(graphed(x=x), {"same": x * 1, "sum": x + 3})
        assert graphed.num_graphs == 0
        assert 'output["sum"]: 1 of 24 values differ' in graphed.disabled_reason
        assert "at (1, 2)" in graphed.disabled_reason
        assert graphed.stats()["replays"] == 0, "the call was served by eager"

    def test_without_it_a_wrong_output_is_returned(self) -> None:
        graphed = self.corrupted(lambda *, x: x + 3, lambda _, outputs: outputs.add_(1))
        with torch.no_grad():
            graphed(x=self.x())
            assert_same(graphed(x=self.x()), self.x() + 3 + 1)

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (
                lambda module, inputs: module.steps.add_(1),
                "a tensor of shape (2,) that the forward writes: 2 of 2 values differ",
            ),
            (lambda module, inputs: inputs[0].mul_(2), "input 0, which the forward writes: 24 of 24 values differ"),
        ],
        ids=["buffer", "input"],
    )
    def test_a_wrong_write_is_found(self, spoil: Callable[[Accumulates, Sequence[Tensor]], object], said: str) -> None:
        module = Accumulates()
        graphed = self.corrupted(module, lambda inputs, _: spoil(module, inputs), verify="first")
        with torch.no_grad():
            for call in range(3):
                x = self.x(seed=call)
                assert_same(graphed(x=x), (self.x(seed=call) + 1) * 2)
                assert_same(x, self.x(seed=call) + 1)
                assert module.steps.tolist() == [call + 1] * 2
        assert said in graphed.disabled_reason

    def test_a_right_replay_leaves_no_trace(self) -> None:
        class Noisy(Accumulates):
            def forward(self, *, x: Tensor) -> Tensor:
                return super().forward(x=x) + torch.rand_like(x)

        twin = self.twin(Noisy(), verify="always")
        torch.manual_seed(3)
        with torch.no_grad():
            for step in range(4):
                twin(x=self.x(seed=step))
        assert twin.counts() == (1, 3, 0)
        assert twin.graphed.stats()["verified"] == 3

    def test_hidden_state_is_found(self) -> None:
        scale = [2.0]
        graphed = self.wrap(lambda *, x: x * scale[0], verify="always")
        with torch.no_grad():
            for _ in range(2):
                graphed(x=self.x())
            scale[0] = 3.0
            for _ in range(2):
                assert_same(graphed(x=self.x()), self.x() * 3)
        assert graphed.disabled_reason.startswith("a replay differs from eager: output: 24 of 24 values differ")
        stats = graphed.stats()
        assert (stats["verified"], stats["replays"], stats["eager_calls"]) == (2, 1, 2)
        assert stats["eager_reasons"] == {graphed.disabled_reason: 2}

    def test_other_constants_are_found(self) -> None:
        level = [1]
        graphed = self.wrap(lambda *, x: (x + 1, level[0]), verify="always")
        with torch.no_grad():
            graphed(x=self.x())
            level[0] = 2
            assert graphed(x=self.x())[1] == 2
        assert "output[1]: 1 and not 2" in graphed.disabled_reason

    def test_what_raises_in_eager_raises(self) -> None:
        armed: list[bool] = []

        def forward(*, x: Tensor) -> Tensor:
            if armed:
                raise ValueError("no")
            return x + 1

        graphed = self.wrap(forward, verify="always")
        with torch.no_grad():
            graphed(x=self.x())
            armed.append(True)
            with pytest.raises(ValueError, match="no"):
                graphed(x=self.x())
            armed.clear()
            assert_same(graphed(x=self.x()), self.x() + 1)
        assert graphed.enabled

    def test_a_module_that_has_changed_runs_once(self) -> None:
        twin = self.twin(Accumulates(), verify="always")
        with torch.no_grad():
            for step in range(4):
                if step == 2:
                    twin.change(lambda module: setattr(module, "steps", torch.ones(2, device=self.device)))
                twin(x=self.x(seed=step))
        assert twin.counts() == (2, 2, 0)

    def test_generators_end_as_by_the_call_that_counts(self) -> None:
        count = [4]
        graphed = self.wrap(lambda *, x: x + torch.rand(count[0], device=x.device)[-3:, None], verify="always")
        with torch.no_grad():
            graphed(x=self.x())
            count[0] = 400  # other numbers, and more of them
            torch.manual_seed(3)
            got = graphed(x=self.x())
            after = generator_states(self.device)
            torch.manual_seed(3)
            assert_same(got, graphed.module(x=self.x()))
            if self.device == "cpu":
                assert_same(after, generator_states(self.device))

    def test_what_cannot_be_compared_is_eagers(self) -> None:
        odd: list[bool] = []
        graphed = self.wrap(lambda *, x: x.to_sparse() if odd else x + 1, verify="always")
        with torch.no_grad():
            graphed(x=self.x())
            odd.append(True)
            assert graphed(x=self.x()).layout is torch.sparse_coo
        assert "cannot be compared" in graphed.disabled_reason

    @pytest.mark.parametrize("verify", ["sometimes", True, None])
    def test_other_values_are_refused(self, verify: Any) -> None:
        with pytest.raises(ConfigurationError, match="verify must be one of 'off', 'first', 'always'"):
            self.wrap(zoo.MLP(), verify=verify)
