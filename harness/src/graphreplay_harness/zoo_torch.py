"""Modules of torch itself, scripted and compiled ones, and of torchvision and timm."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from graphreplay_harness.zoo_model import Model, padding

_SEQUENCES = ((1, 5), (2, 9))
_IMAGES = ((1, 32), (2, 64))


def _perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))


def _scripted() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # it still works, and is still met
        return torch.jit.script(_perceptron())


def _compiled() -> Any:
    return torch.compile(_perceptron(), backend="eager")


def _encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **options)


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _resnet() -> Any:
    from torchvision.models import resnet18

    return resnet18(weights=None, num_classes=5)


def _timm(name: str, **options: Any) -> Any:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=5, **options)


def _sequence(batch: int, length: int) -> dict[str, Any]:
    return {"input": torch.randn(batch, length, 16)}


def _padded(batch: int, length: int) -> dict[str, Any]:
    return {"src": torch.randn(batch, length, 16), "src_key_padding_mask": padding(batch, length) == 0}


def _image(batch: int, size: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, 3, size, size)}


TORCH = (
    Model(
        "lstm", "torch LSTM", lambda: nn.LSTM(16, 24, 2, batch_first=True, bidirectional=True), _sequence, _SEQUENCES
    ),
    Model("gru", "torch GRU", lambda: nn.GRU(16, 24, batch_first=True), _sequence, _SEQUENCES),
    Model(
        "transformer-encoder",
        "torch TransformerEncoder",
        lambda: _encoder(enable_nested_tensor=False),
        _padded,
        _SEQUENCES,
        note="a mask of padding, and `enable_nested_tensor=False`",
    ),
    Model(
        "transformer-encoder-nested",
        "torch TransformerEncoder",
        _encoder,
        _padded,
        _SEQUENCES,
        "nested",
        "a nested tensor has its sizes on the host, read from the mask",
        eager_on_gpus="capture failed",
    ),
    Model(
        "batch-norm-training",
        "torch Conv2d, BatchNorm2d",
        _batch_norm,
        lambda batch, size: {"input": torch.randn(batch, 3, size, size)},
        ((2, 8), (3, 12)),
        note="in training mode; buffers are written",
        training=True,
    ),
    Model("torchscript", "torch.jit.script of a Sequential", _scripted, _sequence, _SEQUENCES),
    Model("compiled", "torch.compile of a Sequential", _compiled, _sequence, _SEQUENCES),
    Model("resnet18", "torchvision resnet18", _resnet, _image, _IMAGES),
    Model(
        "timm-vit",
        "timm VisionTransformer",
        lambda: _timm("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=2),
        _image,
        ((1, 32), (2, 32)),
    ),
    Model("timm-mobilenetv3", "timm MobileNetV3", lambda: _timm("mobilenetv3_small_050"), _image, _IMAGES),
)
