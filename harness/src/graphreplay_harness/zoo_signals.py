"""Models of transformers that read images or sound, or make sound."""

from __future__ import annotations

from typing import Any

import torch

from graphreplay_harness.zoo_model import Method, Model

_TRANSFORMER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_IMAGES = ((1, 32), (2, 32), (3, 32))


def _whisper_encoder() -> Any:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        max_source_positions=24,
    )
    return WhisperEncoder(config)


def _wav2vec2() -> Any:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        **_TRANSFORMER,
        conv_dim=(16, 16),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    return Wav2Vec2Model(config)


def _clip_vision() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(CLIPVisionConfig(**_TRANSFORMER, image_size=32, patch_size=8))


def _vit() -> Any:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**_TRANSFORMER, image_size=32, patch_size=8))


def _dinov2() -> Any:
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(Dinov2Config(**_TRANSFORMER, image_size=32, patch_size=8))


def _swin() -> Any:
    from transformers import SwinConfig, SwinModel

    return SwinModel(
        SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    )


def _convnext() -> Any:
    from transformers import ConvNextConfig, ConvNextModel

    # At the usual scale of 1e-6 the layers would add next to nothing, and a wrong one would not show.
    return ConvNextModel(ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, layer_scale_init_value=1.0))


def _encodec_decoder() -> Any:
    from transformers import EncodecConfig, EncodecModel

    config = EncodecConfig(num_filters=4, hidden_size=16, codebook_size=32, codebook_dim=16, upsampling_ratios=[4, 2])
    return EncodecModel(config).decoder


def _dac() -> Any:
    from transformers import DacConfig, DacModel

    config = DacConfig(
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        decoder_hidden_size=32,
        upsampling_ratios=[4, 2],
        n_codebooks=2,
        codebook_size=32,
        codebook_dim=4,
    )
    return DacModel(config)


def _images(batch: int, size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, size, size)}


SIGNALS = (
    Model(
        "whisper-encoder",
        "transformers WhisperEncoder",
        _whisper_encoder,
        lambda batch: {"input_features": torch.randn(batch, 8, 48)},
        ((1,), (2,)),
    ),
    Model(
        "wav2vec2",
        "transformers Wav2Vec2Model",
        _wav2vec2,
        lambda batch, samples: {"input_values": torch.randn(batch, samples)},
        ((1, 200), (2, 300)),
        eager_on_gpus="CPU generator",
        note="on a GPU it still draws numbers for its layer drop on the CPU",
    ),
    Model("clip-vision", "transformers CLIPVisionModel", _clip_vision, _images, _IMAGES),
    Model("vit", "transformers ViTModel", _vit, _images, _IMAGES),
    Model("dinov2", "transformers Dinov2Model", _dinov2, _images, ((1, 32), (2, 48))),
    Model("swin", "transformers SwinModel", _swin, _images, _IMAGES),
    Model("convnext", "transformers ConvNextModel", _convnext, _images, ((1, 32), (2, 48))),
    Model(
        "encodec-decoder",
        "transformers EncodecModel.decoder",
        _encodec_decoder,
        lambda batch, length: {"hidden_states": torch.randn(batch, 16, length)},
        ((1, 7), (2, 9)),
        "makes the host wait for the device",
        "the sizes of its paddings are tensors, which it reads",
    ),
    Model(
        "dac-decoder",
        "transformers DacModel.decode",
        lambda: Method(_dac(), "decode"),
        lambda batch, length: {"audio_codes": torch.randint(0, 32, (batch, 2, length))},
        ((1, 7), (2, 9)),
    ),
    Model(
        "dac",
        "transformers DacModel",
        _dac,
        lambda batch, length: {"input_values": torch.randn(batch, 1, length)},
        ((1, 64), (2, 96)),
    ),
)
