"""Published language models, as plain modules of the published sizes: Llama 3 and GPT-2."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from samestep.estimate.workload import Workload


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a decoder; the Llama family is gated (SwiGLU, RMSNorm, rotary positions, no biases), GPT-2 is not."""

    layers: int
    width: int  # of the residual stream
    heads: int
    kv_heads: int
    hidden: int  # width inside the feed-forward part
    words: int
    length: int  # tokens of a sample
    is_gated: bool = True


DECODERS: Mapping[str, DecoderSizes] = {
    # Grattafiori et al. 2024 (The Llama 3 Herd of Models), table 3
    "llama-3.1-8b": DecoderSizes(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": DecoderSizes(80, 8192, 64, 8, 28672, 128256, 8192),
    # Radford et al. 2019 (Language Models are Unsupervised Multitask Learners), table 2
    "gpt2": DecoderSizes(12, 768, 12, 12, 3072, 50257, 1024, is_gated=False),
    "gpt2-xl": DecoderSizes(48, 1600, 25, 25, 6400, 50257, 1024, is_gated=False),
}


class DecoderBlock(nn.Module):
    """Causal attention with grouped keys and values, then a feed-forward part; `[N, T, width]` in and out."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = nn.RMSNorm if sizes.is_gated else nn.LayerNorm
        width, bias = sizes.width, not sizes.is_gated
        self.is_gated, self.head_width = sizes.is_gated, width // sizes.heads
        kv_width = sizes.kv_heads * self.head_width
        self.attention_norm, self.feed_norm = norm(width), norm(width)
        self.queries = nn.Linear(width, width, bias)
        self.keys, self.values = nn.Linear(width, kv_width, bias), nn.Linear(width, kv_width, bias)
        self.out = nn.Linear(width, width, bias)
        self.up = nn.Linear(width, sizes.hidden, bias)
        self.gate = nn.Linear(width, sizes.hidden, bias) if sizes.is_gated else None
        self.down = nn.Linear(sizes.hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, T, width]` -> `[N, T, width]`."""
        x = x + self.out(self._attend(self.attention_norm(x)))
        inside = self.feed_norm(x)
        up = self.up(inside)
        fed = functional.gelu(up) if self.gate is None else functional.silu(self.gate(inside)) * up
        result: Tensor = x + self.down(fed)
        return result

    def _attend(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            layer(x).unflatten(-1, (-1, self.head_width)) for layer in (self.queries, self.keys, self.values)
        )
        if self.is_gated:
            queries, keys = _rotated(queries), _rotated(keys)
        queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
        is_grouped = keys.shape[1] != queries.shape[1]
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=is_grouped)
        return mixed.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Tokens `[N, T]` to scores `[N, T, words]`."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.words, sizes.width)
        self.positions = None if sizes.is_gated else nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(DecoderBlock(sizes) for _ in range(sizes.layers))
        self.norm: nn.Module = nn.RMSNorm(sizes.width) if sizes.is_gated else nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.words, bias=False)
        if not sizes.is_gated:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """int64 `[N, T]` -> `[N, T, words]`."""
        hidden = self.embedding(x)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


def published(name: str) -> Workload:
    """The workload of this name, one of `DECODERS`."""
    sizes = DECODERS[name]
    return Workload(
        name,
        lambda: Decoder(sizes),
        lambda model, batch: functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        lambda count: tuple(torch.zeros(count, sizes.length, dtype=torch.int64) for _ in range(2)),
        units=sizes.length,
        unit="tokens",
    )


def _rotated(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) of `[N, T, heads, width]`, with angles of zero: the values do not matter."""
    half = x.shape[-1] // 2
    angles = torch.zeros(x.shape[1], 1, half, device=x.device)
    sine, cosine = angles.sin(), angles.cos()
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1).type_as(x)
