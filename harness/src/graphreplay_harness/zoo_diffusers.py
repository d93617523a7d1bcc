"""Models of diffusers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import remove_weight_norm

from graphreplay_harness.zoo_model import Method, Model

_VAE = {
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}


def _unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def _flux() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )


def _sd3() -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=16,
    )


def _stable_audio() -> Any:
    from diffusers import StableAudioDiTModel

    return StableAudioDiTModel(
        in_channels=8,
        out_channels=8,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        cross_attention_dim=32,
        cross_attention_input_dim=16,
        global_states_input_dim=16,
        time_proj_dim=16,
    )


def _wan() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
    )


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(**_VAE)


def _oobleck() -> Any:
    from diffusers import AutoencoderOobleck

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.nn.utils.weight_norm` is deprecated", FutureWarning)
        return AutoencoderOobleck(
            encoder_hidden_size=8,
            downsampling_ratios=[2, 4],
            channel_multiples=[1, 2],
            decoder_channels=8,
            decoder_input_channels=8,
        )


def _plain_oobleck() -> Any:
    vae = _oobleck()
    for module in vae.modules():
        if hasattr(module, "weight_g"):
            remove_weight_norm(module)
    return vae


def _time(batch: int) -> Tensor:
    return torch.rand(batch)


def _unet_inputs(batch: int, size: int) -> dict[str, Any]:
    return {
        "sample": torch.randn(batch, 4, size, size),
        "timestep": _time(batch) * 1000,
        "encoder_hidden_states": torch.randn(batch, 5, 16),
    }


def _flux_inputs(batch: int, size: int) -> dict[str, Any]:
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    positions = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1).float()
    return {
        "hidden_states": torch.randn(batch, size * size, 8),
        "encoder_hidden_states": torch.randn(batch, 5, 16),
        "pooled_projections": torch.randn(batch, 16),
        "timestep": _time(batch),
        "img_ids": positions,
        "txt_ids": torch.zeros(5, 3),
    }


def _sd3_inputs(batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, size, size),
        "encoder_hidden_states": torch.randn(batch, 5, 16),
        "pooled_projections": torch.randn(batch, 16),
        "timestep": _time(batch) * 1000,
    }


def _stable_audio_inputs(batch: int, length: int) -> dict[str, Any]:
    angles = torch.rand(length + 1, 8)
    return {
        "hidden_states": torch.randn(batch, 8, length),
        "timestep": _time(batch),
        "encoder_hidden_states": torch.randn(batch, 5, 16),
        "global_hidden_states": torch.randn(batch, 1, 16),
        "rotary_embedding": (angles.cos(), angles.sin()),
        "return_dict": False,
    }


def _wan_inputs(batch: int, frames: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, frames, size, size),
        "timestep": _time(batch) * 1000,
        "encoder_hidden_states": torch.randn(batch, 5, 16),
    }


def _oobleck_inputs(batch: int, length: int) -> dict[str, Any]:
    return {"z": torch.randn(batch, 8, length)}


DIFFUSERS = (
    Model("unet2d-condition", "diffusers UNet2DConditionModel", _unet, _unet_inputs, ((1, 8), (2, 16))),
    Model("flux", "diffusers FluxTransformer2DModel", _flux, _flux_inputs, ((1, 4), (2, 6))),
    Model("sd3", "diffusers SD3Transformer2DModel", _sd3, _sd3_inputs, ((1, 8), (2, 12))),
    Model("stable-audio-dit", "diffusers StableAudioDiTModel", _stable_audio, _stable_audio_inputs, ((1, 9), (2, 12))),
    Model("wan", "diffusers WanTransformer3DModel", _wan, _wan_inputs, ((1, 2, 8), (1, 3, 12))),
    Model(
        "autoencoder-kl-decoder",
        "diffusers AutoencoderKL.decode",
        lambda: Method(_vae(), "decode"),
        lambda batch, size: {"z": torch.randn(batch, 4, size, size)},
        ((1, 4), (2, 6)),
    ),
    Model(
        "autoencoder-kl-encoder",
        "diffusers AutoencoderKL.encode",
        lambda: Method(_vae(), "encode"),
        lambda batch, size: {"x": torch.randn(batch, 3, size, size)},
        ((1, 8), (2, 16)),
        "DiagonalGaussianDistribution",
        "the result holds a distribution, an object that graphreplay does not know",
    ),
    Model(
        "oobleck-decoder",
        "diffusers AutoencoderOobleck.decode",
        lambda: Method(_plain_oobleck(), "decode"),
        _oobleck_inputs,
        ((1, 5), (2, 8)),
        note="after `torch.nn.utils.remove_weight_norm` of its layers",
    ),
    Model(
        "oobleck-decoder-naive",
        "diffusers AutoencoderOobleck.decode",
        lambda: Method(_oobleck(), "decode"),
        _oobleck_inputs,
        ((1, 5), (2, 8)),
        "the forward changes attribute",
        "`torch.nn.utils.weight_norm` stores a new weight on its layer at each call",
    ),
)
