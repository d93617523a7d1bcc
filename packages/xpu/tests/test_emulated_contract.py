"""The whole contract over the hooks of the XPU backend, with torch.xpu emulated on the CPU.

It shows that the hooks do their part: what they call and in which order, that streams are ordered, that a capture which
fails leaves nothing behind, that graphs are freed after their replays. It cannot show what only a device does: whether
its captures take the operators in, its random numbers, its memory (sizes, reuse, out of memory outside a capture),
its timing, forks and joins of streams inside a capture, tensors of the CPU among those of the device, and whether
torch's XPU graphs keep to what the emulation assumes of them. test_contract.py is for that.
"""

import pytest
import torch
from emulated_forward import EmulatedForward

from graphreplay import registry
from graphreplay.testing import zoo
from graphreplay.testing.contract import BackendContract


class _Entry:
    def load(self):
        return EmulatedForward


@pytest.fixture(autouse=True)
def found(machine, monkeypatch):
    monkeypatch.setattr(registry, "_installed", lambda: {"cpu": _Entry()})
    yield
    assert [key for key, queue in machine.queues.items() if queue.recording] == []


class TestEmulated(BackendContract):
    cls = EmulatedForward
    device = "cpu"  # where the tensors are; the hooks see xpu:0


def test_the_graphs_of_the_contract_are_emulated_ones(machine):
    graphed = EmulatedForward(zoo.MLP(), device="cpu")
    with torch.no_grad():
        for _ in range(3):
            graphed(x=zoo.rows(3))
    (graph,) = machine.graphs
    assert len(graph._work.calls) >= 2
    assert list(graph._replays) == [(0, 0)]
    assert graph._stream.key == (0, 1)
    assert graphed.pool.backend.device == torch.device("xpu", 0)
