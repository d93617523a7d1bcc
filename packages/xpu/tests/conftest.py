"""The emulated machine for the tests that ask for one."""

import gc

import pytest
import xpu_emulation


@pytest.fixture
def machine(monkeypatch):
    """An emulated torch.xpu; at the end of the test it is as a device must be left."""
    machine = xpu_emulation.install(monkeypatch)
    yield machine
    if machine.graphs:
        gc.collect()  # what the test left in cycles is freed while the emulation is there
    assert not machine.generator_captures
    assert not machine.routed
    assert xpu_emulation.current_stream().key == (0, 0)
