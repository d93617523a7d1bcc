"""All models of the zoo."""

from __future__ import annotations

from graphreplay_harness.zoo_diffusers import DIFFUSERS
from graphreplay_harness.zoo_signals import SIGNALS
from graphreplay_harness.zoo_text import TEXT
from graphreplay_harness.zoo_torch import TORCH

MODELS = {model.name: model for model in (*TEXT, *SIGNALS, *DIFFUSERS, *TORCH)}
