"""What a call costs on the host before any device work; graphreplay_harness.bench_host says what each case is."""

import pytest
import torch

from graphreplay_harness.bench_host import CASES


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", CASES)
def test_host(benchmark, name):
    case = CASES[name]()
    benchmark(case.run)
    assert case.check()
