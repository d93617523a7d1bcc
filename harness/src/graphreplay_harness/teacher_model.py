"""A diffusion transformer over packed rows, called as TaoMate calls its audio teacher."""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention, silu

from graphreplay_harness.teacher_memo import Memo

MODALITIES = 4
"""Text, video, audio, reference audio."""


@dataclass(frozen=True)
class Size:
    """How large a teacher is."""

    layers: int
    width: int
    heads: int
    time_width: int
    text_width: int
    video_width: int
    audio_width: int


SMALL = Size(layers=3, width=64, heads=4, time_width=32, text_width=48, video_width=24, audio_width=16)
LARGE = Size(layers=40, width=1024, heads=16, time_width=512, text_width=1024, video_width=96, audio_width=64)


@dataclass(frozen=True)
class Layout:
    """How many rows of each kind are packed, in this order; padding follows."""

    text: int
    video: int
    audio: int
    reference: int

    @property
    def rows(self) -> int:
        return self.text + self.video + self.audio + self.reference


@dataclass(frozen=True)
class EmbeddingPlan:
    """Which modality each row is of. The forward takes it from PLAN, not from its kwargs."""

    modalities: Tensor
    """[seq_len], int64."""
    fingerprint: str
    """Equal for plans of equal content."""


PLAN: ContextVar[EmbeddingPlan] = ContextVar("PLAN")


class Attention(nn.Module):
    """Self-attention with a rotary embedding, and a low-rank adapter that ``lora_on`` of the model switches."""

    def __init__(self, size: Size, rank: int = 8) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.lora_down = nn.Linear(size.width, rank, bias=False)
        self.lora_up = nn.Linear(rank, 3 * size.width, bias=False)

    def forward(self, x: Tensor, rope: Tensor, mask: Tensor, lora_on: bool) -> Tensor:
        qkv = self.qkv(x)
        if lora_on:
            qkv = qkv + self.lora_up(self.lora_down(x))
        q, k, v = qkv.view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
        mixed = scaled_dot_product_attention(_rotate(q, rope)[None], _rotate(k, rope)[None], v[None], mask)
        result: Tensor = self.out(mixed[0].transpose(0, 1).reshape(len(x), -1))
        return result


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    cos, sin = rope.to(x.dtype).unbind(-1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class AdaLN(nn.Module):
    """Shifts, scales and gates for every row, from one projection for each noise level, through the memo."""

    def __init__(self, name: str, size: Size, parts: int, memo: Memo) -> None:
        super().__init__()
        self.name, self.parts, self._memo = name, parts, memo
        self.linear = nn.Linear(size.time_width, parts * size.width)

    def forward(self, t_emb: Tensor, levels: Tensor) -> tuple[Tensor, ...]:
        projected = self._memo.project(self.name, self.linear, t_emb, lambda: self.linear(silu(t_emb)))
        return projected.index_select(0, levels).chunk(self.parts, dim=-1)


class Block(nn.Module):
    def __init__(self, index: int, size: Size, memo: Memo) -> None:
        super().__init__()
        self.adaln = AdaLN(f"blocks.{index}", size, 6, memo)
        self.attention = Attention(size)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor, t_emb: Tensor, levels: Tensor, rope: Tensor, mask: Tensor, lora_on: bool) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.adaln(t_emb, levels)
        width = x.shape[-1:]
        x = x + gate * self.attention(layer_norm(x, width) * (1 + scale) + shift, rope, mask, lora_on)
        result: Tensor = x + mlp_gate * self.mlp(layer_norm(x, width) * (1 + mlp_scale) + mlp_shift)
        return result


def _two_layers(width: int, inner: int, outer: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, outer))


class Teacher(nn.Module):
    """The transformer. ``lora_on`` is state that the kwargs do not show, and so is the plan in PLAN."""

    def __init__(self, size: Size, memo: Memo) -> None:
        super().__init__()
        self.size, self.adaln_cache, self.lora_on = size, memo, False
        self.text_in = nn.Linear(size.text_width, size.width)
        self.video_in = nn.Linear(size.video_width, size.width)
        self.audio_in = nn.Linear(size.audio_width, size.width)
        self.modality = nn.Embedding(MODALITIES, size.width)
        self.time_in = nn.Sequential(
            nn.Linear(32, size.time_width), nn.SiLU(), nn.Linear(size.time_width, size.time_width)
        )
        self.blocks = nn.ModuleList(Block(index, size, memo) for index in range(size.layers))
        self.final = AdaLN("final", size, 2, memo)
        self.audio_out = nn.Linear(size.width, size.audio_width)

    def forward(
        self,
        *,
        x: Tensor,
        audio_x: Tensor,
        text_embeddings: Tensor,
        unique_timesteps: Tensor,
        inverse_indices: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor,
        rope: Tensor,
        seq_len: int,
        max_seqlen: int,
        attention_mask: Tensor | None,
        layout: Layout,
    ) -> Tensor:
        """The velocity of the audio latents, [audio rows, audio width].

        Args:
            x: [1, video rows, video width].
            audio_x: [audio and reference rows, audio width]; the reference is a clean tail.
            text_embeddings: [1, text rows, text width].
            unique_timesteps: [3]: noise levels of audio, video and of what is clean.
            inverse_indices: [seq_len], which of the three each row is at.
            positions: [seq_len], int64, rows of the RoPE table.
            cu_seqlens: [sequences + 1], int32, where the packed sequences begin and end; rows attend within theirs.
            rope: [positions, half a head, 2].
            seq_len: rows with padding.
            max_seqlen: rows without.
            attention_mask: None.
            layout: what the rows are.
        """
        assert attention_mask is None
        parts = (self.text_in(text_embeddings[0]), self.video_in(x[0]), self.audio_in(audio_x))
        hidden = nn.functional.pad(torch.cat(parts), (0, 0, 0, seq_len - max_seqlen))
        hidden = hidden + self.modality(PLAN.get().modalities)
        t_emb = self.time_in(_sinusoids(unique_timesteps).to(hidden.dtype))
        self.adaln_cache.prepare(t_emb)
        rows = torch.arange(seq_len, device=x.device)
        sequence = (rows[:, None] >= cu_seqlens[None, 1:]).sum(1)
        mask, turns = sequence[:, None] == sequence, rope.index_select(0, positions)
        for block in self.blocks:
            hidden = block(hidden, t_emb, inverse_indices, turns, mask, self.lora_on)
        shift, scale = self.final(t_emb, inverse_indices)
        hidden = layer_norm(hidden, hidden.shape[-1:]) * (1 + scale) + shift
        start = layout.text + layout.video
        velocity: Tensor = self.audio_out(hidden[start : start + layout.audio])
        return velocity


def _sinusoids(timesteps: Tensor) -> Tensor:
    frequencies = torch.exp(torch.arange(16, device=timesteps.device) * (-math.log(10_000) / 16))
    angles = timesteps[:, None] * 1000 * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def make_teacher(device: torch.device, dtype: torch.dtype, size: Size, memo: Memo, seed: int = 0) -> Teacher:
    """A teacher with random weights, in evaluation mode. The global random generators end as they were."""
    on_gpu = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(on_gpu, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(seed)
        with torch.device(device):
            teacher = Teacher(size, memo)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)  # random weights at their usual scale all but ignore what they are given
    return teacher.to(device=device, dtype=dtype).eval().requires_grad_(False)
