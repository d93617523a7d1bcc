"""A prompt encoder, one graph for each token count; and one that writes by a boolean mask, which runs eagerly."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from graphreplay_taomate import GraphedForward

IMAGE = 3
"""The token that stands for an image."""


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.mlp_norm(x))


class Encoder(nn.Module):
    """Causal, like the decoders that encode prompts; image embeddings take the places of image tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(Layer(32, 4) for _ in range(3))
        self.norm = nn.RMSNorm(32)
        self.eval().requires_grad_(False)

    def place(self, embeddings, mask, image):
        return torch.where(mask[..., None], image, embeddings)

    def forward(self, *, input_ids, image):
        x = self.place(self.embed(input_ids), input_ids == IMAGE, image)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class WritingEncoder(Encoder):
    def place(self, embeddings, mask, image):
        embeddings[mask] = image.expand(int(mask.shape[1]), -1)[: mask.shape[1]][mask[0]]
        return embeddings


def prompt(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(IMAGE + 1, 100, (1, tokens), generator=generator)
    input_ids[0, seed % tokens] = IMAGE
    return {"input_ids": input_ids, "image": torch.randn(32, generator=generator)}


PROMPTS = [prompt(tokens, seed) for seed, tokens in enumerate((17, 24, 17, 31, 24, 17))]


@torch.inference_mode()
def test_one_graph_for_each_token_count():
    encoder = Encoder()
    graphed = GraphedForward(encoder, device="cpu", reference=True, name="encoder")
    for kwargs in PROMPTS:
        assert torch.equal(graphed(**kwargs), encoder(**kwargs))
    stats = graphed.stats()
    assert (stats["captures"], stats["graphs"], stats["replays"], stats["eager_calls"]) == (3, 3, 3, 0)
    first, last = (encoder(**PROMPTS[index]) for index in (0, 2))
    assert not torch.equal(first, last)  # of one token count


@torch.inference_mode()
def test_a_write_by_a_boolean_mask_runs_eagerly_and_names_its_line():
    encoder = WritingEncoder()
    graphed = GraphedForward(encoder, device="cpu", reference=True, name="encoder")
    for kwargs in PROMPTS:
        result = graphed(**kwargs)
        assert torch.equal(result, encoder(**kwargs))
        assert torch.equal(result, Encoder()(**kwargs))
    lines, start = inspect.getsourcelines(WritingEncoder.place)
    line = start + next(index for index, text in enumerate(lines) if "embeddings[mask] =" in text)
    stats = graphed.stats()
    assert (stats["captures"], stats["graphs"], stats["eager_calls"], stats["enabled"]) == (0, 0, 5, False)
    assert f" at {__file__}:{line} in place makes the host wait" in stats["disabled_reason"]
    assert stats["eager_reasons"] == {stats["disabled_reason"]: 5}


class FillingEncoder(Encoder):
    def place(self, embeddings, mask, image):
        embeddings[mask] = 0.5
        return embeddings.masked_fill(mask[..., None], 0.25)


class ScatteringEncoder(Encoder):
    def place(self, embeddings, mask, image):
        return embeddings.masked_scatter(mask[..., None], image.expand(mask.shape[1], -1))


@torch.inference_mode()
@pytest.mark.parametrize("cls", [FillingEncoder, ScatteringEncoder])
def test_constants_by_a_mask_and_masked_scatter_are_captured(cls):
    encoder = cls()
    graphed = GraphedForward(encoder, device="cpu", reference=True, name="encoder")
    for kwargs in PROMPTS:
        assert torch.equal(graphed(**kwargs), encoder(**kwargs))
    assert (graphed.captures, graphed.stats()["replays"], graphed.disabled_reason) == (3, 3, None)


@pytest.mark.cuda
@torch.inference_mode()
def test_on_a_gpu():
    for cls, captures in ((Encoder, 3), (FillingEncoder, 3), (ScatteringEncoder, 3), (WritingEncoder, 0)):
        encoder = cls().cuda()
        graphed = GraphedForward(encoder, device="cuda", name="encoder")
        for kwargs in PROMPTS:
            kwargs = {name: tensor.cuda() for name, tensor in kwargs.items()}
            torch.testing.assert_close(graphed(**kwargs), encoder(**kwargs))
        assert graphed.captures == captures
        assert graphed.enabled is (captures > 0)
    assert f" at {__file__}:" in graphed.disabled_reason
