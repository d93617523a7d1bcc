"""The emulated machine for the tests that ask for one."""

import gc
from collections import Counter

import pytest
import torch
import xpu_emulation

from graphreplay_xpu import capture as capture_module
from graphreplay_xpu import captured as captured_module


@pytest.fixture
def machine(monkeypatch):
    """An emulated torch.xpu; at the end of the test it is as a device must be left."""
    machine = xpu_emulation.install(monkeypatch)
    yield machine
    if machine.graphs:
        gc.collect()  # what the test left in cycles is freed while the emulation is there
    assert not machine.generator_captures
    assert not machine.routed
    assert +machine.uses == Counter({handle: len(graphs) for handle, graphs in machine.pools.items() if graphs})
    assert xpu_emulation.current_stream().key == (0, 0)


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def kept(monkeypatch):
    """Graphs that were kept from destruction in this test."""
    graphs = []
    monkeypatch.setattr(captured_module, "kept_graphs", graphs)
    monkeypatch.setattr(capture_module, "kept_graphs", graphs)
    return graphs
