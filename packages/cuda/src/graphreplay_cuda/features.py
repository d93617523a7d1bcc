"""What each feature asks of the driver, in one table."""

from __future__ import annotations

from graphreplay_cuda import driver
from graphreplay_cuda.errors import FeatureUnavailableError

MINIMUM_CUDA = {"if nodes": (12, 4), "while nodes": (12, 4), "else bodies": (12, 8)}
"""The CUDA version that a driver must serve (release notes of the CUDA toolkit; what ``nvidia-smi`` prints at the top
right). Captures, pools, replays and staged inputs work on every driver that the installed PyTorch works on."""


def available(feature: str) -> bool:
    """Whether this driver has the feature."""
    return driver.version() >= _as_number(feature)


def require(feature: str) -> None:
    """Refuses a driver without the feature.

    Raises:
        FeatureUnavailableError: with the version that it takes.
    """
    if not available(feature):
        major, minor = MINIMUM_CUDA[feature]
        has_major, has_minor = divmod(driver.version() // 10, 100)
        raise FeatureUnavailableError(
            f"{feature} need a driver for CUDA {major}.{minor} or newer, and this one serves {has_major}.{has_minor}; "
            "update the NVIDIA driver"
        )


def _as_number(feature: str) -> int:
    major, minor = MINIMUM_CUDA[feature]
    return 1000 * major + 10 * minor
