"""What can go wrong with a CUDAGraph beyond what every backend can raise."""

from __future__ import annotations

from graphreplay import BackendUnavailableError, CaptureError, GraphReplayError


class GraphStateError(GraphReplayError, RuntimeError):
    """A method that the graph's state does not admit, such as a replay before the capture has ended."""


class FeatureUnavailableError(BackendUnavailableError):
    """The driver is too old for a kind of node; the message names the CUDA version that it takes."""


class PredicateError(GraphReplayError, ValueError):
    """A predicate that no conditional node can read: it must be one bool on the graph's device."""


class ConditionalBodyError(CaptureError):
    """The body of a conditional node holds, or did, what no body can."""


class DriverError(GraphReplayError, RuntimeError):
    """A call of the CUDA driver failed; the message names the call and the driver's error."""
