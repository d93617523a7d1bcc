"""What can go wrong, one class a kind. Every message says what happened, where, and what to do next."""

from __future__ import annotations


class GraphReplayError(Exception):
    """Base of every error that graphreplay raises."""


class GraphReplayWarning(RuntimeWarning):
    """Base of every warning: the result is right, but the caller pays more than they need to."""


class ConfigurationError(GraphReplayError, ValueError):
    """A constructor argument that cannot be honoured."""


class PositionalArgumentError(GraphReplayError, TypeError):
    """A graphed forward was called with positional arguments; it takes keywords only."""


class _LeafError(GraphReplayError):
    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)  # both, so that the error can be pickled
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class UnsupportedLeafError(_LeafError, TypeError):
    """A leaf that has no stable key, or that may hide a tensor.

    Attributes:
        path: the leaf as a Python accessor, such as ``kwargs["rope"][0]``.
        problem: what is wrong with it, without the path.
    """


class TreeMismatchError(_LeafError, ValueError):
    """Two trees that should have the same structure differ.

    Attributes:
        path: the first place that differs, as a Python accessor.
        problem: how it differs, without the path.
    """


class UnknownDeviceError(GraphReplayError, ValueError):
    """A device type that neither torch nor any installed backend knows."""


class BackendNotInstalledError(GraphReplayError, ImportError):
    """The device type is known, but the package that drives it is not installed."""


class BackendUnavailableError(GraphReplayError, RuntimeError):
    """The backend is installed, but this machine cannot run it."""


class CaptureError(GraphReplayError, RuntimeError):
    """A forward could not be captured."""


class HostSyncError(CaptureError):
    """A forward made the host wait for the device, which no graph can replay."""


class RankDisagreementError(GraphReplayError, RuntimeError):
    """The ranks of a process group are out of step, or one of them is gone, and no call can bring them back. The
    message names the rank and the phase; start the processes anew."""


class StateLostError(GraphReplayError, RuntimeError):
    """What a forward wrote while it was captured could not be put back: buffers are as after more calls than were made.
    Load the module's state anew."""


class ClosedError(GraphReplayError, RuntimeError):
    """A graphed forward was used after ``close()``."""


class ForkedError(GraphReplayError, RuntimeError):
    """A graphed forward was used in a process forked after it was built; device graphs do not survive a fork."""


class NotCopyableError(GraphReplayError, TypeError):
    """A graphed forward was copied or pickled; its graphs hold addresses of this process."""
