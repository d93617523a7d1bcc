"""Test utilities for graphreplay and its backends. Needs the extra ``graphreplay-core[testing]``."""
