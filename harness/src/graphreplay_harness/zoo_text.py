"""Models of transformers that read or write text."""

from __future__ import annotations

from typing import Any

from graphreplay_harness.zoo_model import Model, padding, ready_mask, tokens

_BERT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
_DECODER = {**_BERT, "num_key_value_heads": 2, "head_dim": 8}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_SHAPES = ((1, 7), (2, 11), (3, 7))


def _bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**_BERT))


def _t5_encoder() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4))


def _clip_text() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(**_BERT, **_ENDS))


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_DECODER))


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3Model

    return Qwen3Model(Qwen3Config(**_DECODER))


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeModel

    return Qwen3MoeModel(Qwen3MoeConfig(**_DECODER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16))


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4, **_ENDS))


def _unmasked(batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": tokens(batch, length)}


def _padded(batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": tokens(batch, length), "attention_mask": padding(batch, length)}


def _ready(batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": tokens(batch, length), "attention_mask": ready_mask(batch, length)}


def _decoder(batch: int, length: int) -> dict[str, Any]:
    mask = ready_mask(batch, length, causal=True)
    return {"input_ids": tokens(batch, length), "attention_mask": mask, "use_cache": False}


_MASK = "a ready mask of four dimensions"
_CACHELESS = f"{_MASK}, and no cache"
_LOOKS = "the model looks into a mask of two dimensions, to leave it out where it hides nothing"
_WAITS = "makes the host wait for the device"

TEXT = (
    Model("bert", "transformers BertModel", _bert, _ready, _SHAPES, note=_MASK),
    Model("bert-unmasked", "transformers BertModel", _bert, _unmasked, _SHAPES, note="no mask"),
    Model("bert-naive", "transformers BertModel", _bert, _padded, _SHAPES, _WAITS, _LOOKS),
    Model("t5-encoder", "transformers T5EncoderModel", _t5_encoder, _ready, _SHAPES, note=_MASK),
    Model("clip-text", "transformers CLIPTextModel", _clip_text, _unmasked, _SHAPES, note="no mask"),
    Model("llama", "transformers LlamaForCausalLM", _llama, _decoder, _SHAPES, note=_CACHELESS),
    Model("llama-naive", "transformers LlamaForCausalLM", _llama, _padded, _SHAPES, _WAITS, _LOOKS),
    Model("qwen3", "transformers Qwen3Model", _qwen3, _decoder, _SHAPES, note=_CACHELESS),
    Model(
        "qwen3-unmasked",
        "transformers Qwen3Model",
        _qwen3,
        lambda batch, length: _unmasked(batch, length) | {"use_cache": False},
        _SHAPES,
        _WAITS,
        "without a mask the model looks for packed sequences in its positions",
    ),
    Model(
        "qwen3-cache",
        "transformers Qwen3Model",
        _qwen3,
        lambda batch, length: _decoder(batch, length) | {"use_cache": True},
        _SHAPES,
        "DynamicCache",
        "a mask as above, but the result holds a cache, an object that graphreplay does not know",
        eager_on_gpus="lift_fresh",
    ),
    Model(
        "qwen3-moe",
        "transformers Qwen3MoeModel",
        _qwen3_moe,
        _decoder,
        _SHAPES,
        eager_on_gpus="in _grouped_mm",
        note=f"{_CACHELESS}; on a GPU, in float32, its grouped products copy from the host",
    ),
    Model("gpt2", "transformers GPT2LMHeadModel", _gpt2, _decoder, _SHAPES, note=_CACHELESS),
)
