"""Launch-bound PyTorch forwards, captured once a shape and replayed as one device graph.

graphed = graphreplay.get_graphed_forward_cls("cuda")(module, device="cuda")
y = graphed(x=x)
"""

from importlib.metadata import version

from graphreplay.errors import (
    BackendNotInstalledError,
    BackendUnavailableError,
    CaptureError,
    ClosedError,
    ConfigurationError,
    ForkedError,
    GraphReplayError,
    GraphReplayWarning,
    HostSyncError,
    NotCopyableError,
    PositionalArgumentError,
    RankDisagreementError,
    StateLostError,
    TreeMismatchError,
    UnknownDeviceError,
    UnsupportedLeafError,
)
from graphreplay.forward import GraphedForward
from graphreplay.pool import GraphPool
from graphreplay.reference import ReferenceGraphedForward
from graphreplay.registry import get_graphed_forward_cls
from graphreplay.signature import Signature, explain, kwargs_signature
from graphreplay.static import clone_static, copy_into

__version__ = version("graphreplay-core")

__all__ = [
    "BackendNotInstalledError",
    "BackendUnavailableError",
    "CaptureError",
    "ClosedError",
    "ConfigurationError",
    "ForkedError",
    "GraphPool",
    "GraphReplayError",
    "GraphReplayWarning",
    "GraphedForward",
    "HostSyncError",
    "NotCopyableError",
    "PositionalArgumentError",
    "RankDisagreementError",
    "ReferenceGraphedForward",
    "Signature",
    "StateLostError",
    "TreeMismatchError",
    "UnknownDeviceError",
    "UnsupportedLeafError",
    "__version__",
    "clone_static",
    "copy_into",
    "explain",
    "get_graphed_forward_cls",
    "kwargs_signature",
]
