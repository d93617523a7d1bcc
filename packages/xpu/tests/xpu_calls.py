"""What the tests on the emulated device share."""

import torch
from emulated_forward import EmulatedForward
from xpu_emulation import Stream, stream

from graphreplay.testing import zoo

X = zoo.rows(3)


def wrap(forward=lambda *, x: x * 2 + 1, **options):
    return EmulatedForward(forward, device="cpu", **options)


def assert_graphed(graphed, expected=lambda x: x * 2 + 1):
    """The first call captures and the later ones replay."""
    for seed in range(3):
        assert torch.equal(graphed(x=zoo.rows(3, seed)), expected(zoo.rows(3, seed)))
    assert (graphed.captures, graphed.stats()["replays"]) == (1, 2)


def on_streams(graphed, count=4):
    """Calls it on one stream after another."""
    for seed in range(count):
        with stream(Stream()):
            assert torch.equal(graphed(x=zoo.rows(3, seed)), zoo.rows(3, seed) * 2 + 1)
