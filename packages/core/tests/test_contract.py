"""The contract, kept by the reference backend on the CPU."""

from graphreplay import ReferenceGraphedForward
from graphreplay.testing.contract_capture import CaptureContract


class TestCapture(CaptureContract):
    cls = ReferenceGraphedForward
    device = "cpu"
