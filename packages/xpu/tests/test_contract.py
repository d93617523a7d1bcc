"""The contract, kept by the XPU backend on a device, and the rows of it that only a device has."""

import re
from pathlib import Path

import pytest
import torch

from graphreplay.testing import zoo
from graphreplay.testing.contract import BackendContract
from graphreplay.testing.contract_twin import ContractBase
from graphreplay_xpu import XPUGraphedForward

pytestmark = pytest.mark.xpu

README = Path(__file__).parents[1] / "README.md"


class TestXPU(BackendContract):
    cls = XPUGraphedForward
    device = "xpu"


class TestDevice(ContractBase):
    cls = XPUGraphedForward
    device = "xpu"

    def test_another_stream_sees_inputs_and_outputs_in_order(self):
        twin = self.twin(zoo.MLP())
        with torch.no_grad():
            twin(x=self.x())
            streams = [torch.xpu.Stream() for _ in range(3)]
            for call in range(12):
                stream = streams[call % 3]
                stream.wait_stream(torch.xpu.current_stream())
                with torch.xpu.stream(stream):
                    late = torch.randn(2048, 2048, device="xpu")
                    late = (late @ late @ late)[:3, :8] * 0 + self.x(seed=call)
                    twin(x=late)
                torch.xpu.current_stream().wait_stream(stream)
        assert twin.counts() == (1, 12, 0)

    def test_tf32_of_onednn_is_keyed(self):
        twin = self.twin(lambda *, x: x @ x.t())
        before = torch.backends.mkldnn.allow_tf32
        with torch.no_grad():
            try:
                for seed in range(4):
                    torch.backends.mkldnn.allow_tf32 = seed % 2 == 0
                    twin(x=self.x(seed=seed))
            finally:
                torch.backends.mkldnn.allow_tf32 = before
        assert twin.counts() == (2, 2, 0)

    def test_the_code_in_the_readme_runs(self):
        (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
        names = {}
        exec(code, names)
        assert names["y"].shape == (64, 256)
        assert (names["graphed"].captures, names["graphed"].stats()["replays"]) == (1, 8)

    @pytest.mark.parametrize("fault", ["raise", "read"])
    def test_a_failed_capture_leaves_the_device_as_it_was(self, fault):
        def forward(*, x):
            y = x * 2
            if torch.xpu.is_current_stream_capturing():
                if fault == "raise":
                    raise ValueError("planned")
                y.sum().item()
            return y

        stream, graphed = torch.xpu.current_stream(), self.wrap(forward)
        torch.xpu.manual_seed(3)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(graphed(x=self.x()), self.x() * 2)
            drawn = torch.rand(4, device="xpu")
            assert not graphed.enabled
            assert torch.xpu.current_stream() == stream
            torch.xpu.manual_seed(3)
            assert torch.equal(torch.rand(4, device="xpu"), drawn)
            other = self.twin(zoo.MLP())
            for seed in range(3):
                other(x=self.x(seed=seed))
        assert other.counts() == (1, 2, 0)
