"""What a call costs on the host before any device work: its key, its static copy, and staging on the CPU."""

from dataclasses import dataclass

import pytest
import torch

from graphreplay import ReferenceGraphedForward, clone_static, copy_into, kwargs_signature


@dataclass(frozen=True)
class PackedLayout:
    rows: int
    lengths: tuple[int, ...]


@pytest.fixture
def flat():
    """15 tensors and 5 scalars."""
    tensors = {f"t{number}": torch.ones(4, 8) for number in range(15)}
    return {**tensors, "seq_len": 207, "max_seqlen": 256, "scale": 1.5, "mask": None, "causal": True}


@pytest.fixture
def kwargs():
    """15 tensors, 5 scalars and a layout, as a diffusion transformer over packed rows takes them."""
    tensors = {f"t{number}": torch.ones(4, 8) for number in range(13)}
    return {
        **tensors,
        "rope": (torch.ones(8, 2), torch.ones(8, 2)),
        "seq_len": 207,
        "max_seqlen": 256,
        "scale": 1.5,
        "mask": None,
        "causal": True,
        "layout": PackedLayout(207, (198, 9)),
    }


def forward(*, t0, t1, **_):
    return t0 + t1


def test_flat_signature(benchmark, flat):
    assert benchmark(kwargs_signature, flat) == kwargs_signature(dict(reversed(flat.items())))


def test_nested_signature(benchmark, kwargs):
    assert benchmark(kwargs_signature, kwargs) == kwargs_signature(dict(reversed(kwargs.items())))


def test_clone_static(benchmark, kwargs):
    assert benchmark(clone_static, kwargs)["t0"].sum().item() == 32.0


def test_copy_into(benchmark, kwargs):
    static = clone_static(kwargs)
    kwargs["t0"] = torch.zeros(4, 8)
    assert benchmark(copy_into, static, kwargs) == 15
    assert static["t0"].sum().item() == 0.0


def test_hit_of_the_reference_backend(benchmark, kwargs):
    graphed = ReferenceGraphedForward(forward, device="cpu")
    graphed(**kwargs)
    kwargs["t0"] = torch.zeros(4, 8)
    assert benchmark(graphed, **kwargs).sum().item() == 32.0
    assert graphed.stats()["replays"] >= 1
    assert graphed.captures == 1
