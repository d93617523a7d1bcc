"""The contract, kept by the reference backend on the CPU."""

from graphreplay import ReferenceGraphedForward
from graphreplay.testing.contract import BackendContract


class TestReference(BackendContract):
    cls = ReferenceGraphedForward
    device = "cpu"
