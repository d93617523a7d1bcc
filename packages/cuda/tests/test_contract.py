"""The contract, kept by the CUDA backend, and the rows of it that only a device has.

| kind | outcome | test |
| --- | --- | --- |
| CPU tensors among device tensors | 0-dim keyed by value, others eager with a reason | test_host_* |
| CPU tensor inside the module | never frozen | test_host_tensor_of_the_module_* |
| replay under another current stream | ordered after the inputs | test_another_stream_* |
| call inside a capture of torch.cuda.graph | plain forward inside capture_context | test_inside_a_raw_capture |
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from graphreplay.testing import zoo
from graphreplay.testing.contract import BackendContract
from graphreplay.testing.contract_twin import ContractBase, assert_same
from graphreplay_cuda import CUDAGraphedForward

pytestmark = pytest.mark.cuda


class TestCUDA(BackendContract):
    cls = CUDAGraphedForward
    device = "cuda"


class TestDevice(ContractBase):
    cls = CUDAGraphedForward
    device = "cuda"

    def test_host_scalars_are_keyed_by_value(self):
        twin = self.twin(lambda *, x, t: x * t)
        with torch.no_grad():
            for seed in range(2):
                for value in (0.5, 2.0, 2):
                    twin(x=self.x(seed=seed), t=torch.tensor(value))
        assert twin.counts() == (3, 3, 0)

    def test_host_scalar_that_changes_each_call_is_bounded(self):
        twin = self.twin(lambda *, x, t: x * t)
        with torch.no_grad():
            for step in range(24):
                twin(x=self.x(seed=step), t=torch.tensor(float(step)))
        assert twin.counts() == (16, 0, 8)
        assert 'kwargs["t"]' in twin.eager_reason()

    def test_host_tensors_run_eagerly(self):
        twin = self.twin(lambda *, x, rows: x[rows])
        with torch.no_grad():
            for rows in ([0, 1], [2, 0], [1, 1]):
                twin(x=self.x(), rows=torch.tensor(rows))
        assert twin.counts() == (0, 0, 3)
        assert 'kwargs["rows"]' in twin.eager_reason()

    @pytest.mark.parametrize("shape", [(), (1,), (3, 1)])
    def test_host_tensor_of_the_module_is_never_frozen(self, shape):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = torch.full(shape, 2.0)

            def forward(self, x):
                return x * self.scale.to(x.device)

        module = Scaled()
        graphed = self.wrap(module)
        with torch.no_grad():
            for value in (2.0, 3.0, 4.0):
                module.scale.fill_(value)
                assert_same(graphed(x=self.x()), self.x() * value)
        assert graphed.captures == 0

    def test_another_stream_sees_inputs_and_outputs_in_order(self):
        twin = self.twin(zoo.MLP())
        with torch.no_grad():
            twin(x=self.x())
            streams = [torch.cuda.Stream() for _ in range(3)]
            for call in range(12):
                stream = streams[call % 3]
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    late = torch.randn(2048, 2048, device="cuda")
                    late = (late @ late @ late)[:3, :8] * 0 + self.x(seed=call)
                    twin(x=late)
                torch.cuda.current_stream().wait_stream(stream)
        assert twin.counts() == (1, 12, 0)

    def test_inside_a_raw_capture(self):
        entered = []

        @contextmanager
        def context() -> Iterator[None]:
            entered.append(True)
            yield

        graphed = self.wrap(zoo.MLP(), capture_context=context)
        static = self.x()
        with torch.no_grad():
            graphed(x=static)
            entered.clear()
            before = graphed.stats()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = graphed(x=static)
            assert entered == [True]
            static.copy_(self.x(seed=4))
            graph.replay()
            assert_same(result.clone(), graphed.module(self.x(seed=4)))
        after = graphed.stats()
        assert (after["captures"], after["replays"], after["graphs"]) == (
            before["captures"],
            before["replays"],
            before["graphs"],
        )
        assert after["eager_reasons"] == {"called inside another capture": 1}

    def test_device_memory_comes_back(self):
        graphed = self.wrap(lambda *, x: (x @ x).relu() @ x)
        with torch.no_grad():
            graphed(x=torch.ones(64, 64, device="cuda"))
            graphed.reset()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            for count in (2048, 1024, 3072):
                x = torch.ones(count, count, device="cuda")
                graphed(x=x)
                graphed(x=x)
            del x
            graphed.close()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before + (64 << 20)
