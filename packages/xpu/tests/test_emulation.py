"""The emulation itself refuses what a device does."""

import pytest
import torch
import xpu_emulation
from xpu_calls import X
from xpu_emulation import Race, Stream, XPUGraph


def test_the_emulated_graph_refuses_what_a_real_one_does(machine):
    graph, other = XPUGraph(), XPUGraph()
    with pytest.raises(RuntimeError, match="without a capture"):
        graph.capture_end()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    side = Stream()
    with xpu_emulation.stream(side):
        graph.capture_begin(pool=xpu_emulation.graph_pool_handle())
        with pytest.raises(RuntimeError, match="already in the recording state"):
            other.capture_begin()
        with xpu_emulation.stream(Stream()), pytest.raises(RuntimeError, match="same stream"):
            graph.capture_end()
        with pytest.raises(RuntimeError, match="wait cannot be called for a queue which is recording"):
            side.synchronize()
        y = X * 2
        graph.capture_end()
    with pytest.raises(RuntimeError, match="already owns"):
        graph.capture_begin()
    with pytest.raises(Race, match="may meet the seed"):
        graph.replay()
    side.synchronize()
    y.zero_()
    graph.replay()
    assert torch.equal(y, X * 2)
    xpu_emulation.current_stream().record_event().synchronize()
    graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with pytest.raises(RuntimeError, match="dropped with its last graph"):
        graph.capture_begin(pool=graph._pool)
    with pytest.raises(AssertionError, match="device-wide wait"):
        torch.xpu.synchronize()
    machine.routed.clear()
    machine.generator_captures = False
