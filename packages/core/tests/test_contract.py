"""The contract, kept by the reference backend on the CPU."""

from graphreplay import ReferenceGraphedForward
from graphreplay.testing.contract_capture import CaptureContract
from graphreplay.testing.contract_keys import KeyContract
from graphreplay.testing.contract_state import StateContract


class TestReference(CaptureContract, KeyContract, StateContract):
    cls = ReferenceGraphedForward
    device = "cpu"
