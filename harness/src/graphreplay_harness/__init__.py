"""Demo and benchmarks for graphreplay on real models: ``python -m graphreplay_harness.demo``."""

from importlib.metadata import version

__version__ = version("graphreplay-harness")
