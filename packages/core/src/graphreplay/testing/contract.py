"""The contract as tests: every backend package subclasses ``BackendContract`` and runs it unchanged.

    class TestContract(BackendContract):
        cls = MyGraphedForward
        device = "mydevice"

One module a topic; each opens with the hazards that it covers. ``zoo`` holds the forwards.
"""

from __future__ import annotations

import sys

import pytest

# Before the imports: so that a failing assert in these modules tells its values, as in any test module.
_TOPICS = [
    f"graphreplay.testing.contract_{topic}"
    for topic in (
        "ambient",
        "capture",
        "faults",
        "hidden",
        "keys",
        "life",
        "options",
        "random",
        "refusal",
        "replay",
        "state",
        "surface",
        "turns",
        "twin",
        "verify",
    )
]
pytest.register_assert_rewrite(*(name for name in _TOPICS if name not in sys.modules))

from graphreplay.testing.contract_ambient import AmbientContract  # noqa: E402
from graphreplay.testing.contract_capture import CaptureContract  # noqa: E402
from graphreplay.testing.contract_faults import FaultContract  # noqa: E402
from graphreplay.testing.contract_hidden import HiddenContract  # noqa: E402
from graphreplay.testing.contract_keys import KeyContract  # noqa: E402
from graphreplay.testing.contract_life import LifeContract  # noqa: E402
from graphreplay.testing.contract_options import OptionsContract  # noqa: E402
from graphreplay.testing.contract_random import RandomContract  # noqa: E402
from graphreplay.testing.contract_refusal import RefusalContract  # noqa: E402
from graphreplay.testing.contract_replay import ReplayContract  # noqa: E402
from graphreplay.testing.contract_state import StateContract  # noqa: E402
from graphreplay.testing.contract_surface import SurfaceContract  # noqa: E402
from graphreplay.testing.contract_turns import TurnsContract  # noqa: E402
from graphreplay.testing.contract_verify import VerifyContract  # noqa: E402


class BackendContract(
    KeyContract,
    RefusalContract,
    StateContract,
    AmbientContract,
    CaptureContract,
    FaultContract,
    HiddenContract,
    TurnsContract,
    ReplayContract,
    RandomContract,
    LifeContract,
    SurfaceContract,
    OptionsContract,
    VerifyContract,
):
    """Every contract test."""
