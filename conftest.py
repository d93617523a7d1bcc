"""Shared by every test of the workspace: Hypothesis profiles, and skips for devices that are not there."""

import os
import warnings

import pytest
from hypothesis import HealthCheck, settings

# From the library defaults by name: under CI=true the active ones differ (derandomized, no database).
_DEFAULTS = settings.get_profile("default")
for _name, _max_examples in {"dev": 100, "ci": 500, "deep": 5000}.items():
    settings.register_profile(
        _name,
        parent=_DEFAULTS,
        max_examples=_max_examples,
        deadline=None,  # a forward's first call is far slower than the ones after it
        print_blob=True,  # a failure seen elsewhere can be replayed here
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for device in ("cuda", "xpu"):
        if item.get_closest_marker(device) is not None and not _available(device):
            pytest.skip(f"no {device} device")


def _available(device: str) -> bool:
    import torch  # here, so that tests of the workspace alone start without it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CUDA build of PyTorch warns where there is no driver
        return bool(getattr(torch, device).is_available())
