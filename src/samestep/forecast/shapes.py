"""Published shapes: plain models of well-known sizes, for forecasts by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from samestep.forecast.subject import Subject


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder.

    Attributes:
        layers: blocks.
        width: of the residual stream.
        heads: of attention.
        kv_heads: of keys and values.
        hidden: width inside the feed-forward part.
        words: of the vocabulary.
        length: tokens of a sample.
        is_gated: SwiGLU, RMSNorm and no biases, as in Llama; else GELU, LayerNorm, biases and learned positions, as in
            GPT-2, whose head shares the embedding's weights.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    words: int
    length: int
    is_gated: bool = True


DECODERS: Mapping[str, DecoderShape] = {
    # Grattafiori et al. 2024 (The Llama 3 Herd of Models), table 3
    "llama-3.1-8b": DecoderShape(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": DecoderShape(80, 8192, 64, 8, 28672, 128256, 8192),
    # Radford et al. 2019 (Language Models are Unsupervised Multitask Learners), table 2
    "gpt2": DecoderShape(12, 768, 12, 12, 3072, 50257, 1024, is_gated=False),
    "gpt2-xl": DecoderShape(48, 1600, 25, 25, 6400, 50257, 1024, is_gated=False),
}

# Simonyan and Zisserman 2015, table 1, configuration D; 0 is a pooling
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
RESNET_STAGES: Mapping[str, tuple[int, ...]] = {  # He et al. 2016, table 1
    "resnet-50": (3, 4, 6, 3),
    "resnet-101": (3, 4, 23, 3),
}
SIDE, CLASSES = 224, 1000


class DecoderBlock(nn.Module):
    """Causal attention with grouped keys and values, then a feed-forward part; `[N, T, width]` in and out."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.is_gated = shape.is_gated
        self.head_width = shape.width // shape.heads
        norm: Callable[[int], nn.Module] = nn.RMSNorm if shape.is_gated else nn.LayerNorm
        bias = not shape.is_gated
        self.attention_norm, self.feed_norm = norm(shape.width), norm(shape.width)
        self.queries = nn.Linear(shape.width, shape.width, bias)
        self.keys = nn.Linear(shape.width, shape.kv_heads * self.head_width, bias)
        self.values = nn.Linear(shape.width, shape.kv_heads * self.head_width, bias)
        self.out = nn.Linear(shape.width, shape.width, bias)
        self.up = nn.Linear(shape.width, shape.hidden, bias)
        self.gate = nn.Linear(shape.width, shape.hidden, bias) if shape.is_gated else None
        self.down = nn.Linear(shape.hidden, shape.width, bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, T, width]` -> `[N, T, width]`."""
        x = x + self.out(self._attend(self.attention_norm(x)))
        inside = self.feed_norm(x)
        fed = (
            functional.gelu(self.up(inside))
            if self.gate is None
            else functional.silu(self.gate(inside)) * self.up(inside)
        )
        result: Tensor = x + self.down(fed)
        return result

    def _attend(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        queries = self.queries(x).view(samples, length, self.heads, self.head_width)
        keys = self.keys(x).view(samples, length, self.kv_heads, self.head_width)
        values = self.values(x).view(samples, length, self.kv_heads, self.head_width)
        if self.is_gated:
            queries, keys = _rotated(queries), _rotated(keys)
        queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
        is_grouped = self.kv_heads != self.heads
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=is_grouped)
        return mixed.transpose(1, 2).reshape(samples, length, width)


class Decoder(nn.Module):
    """Tokens `[N, T]` to scores `[N, T, words]`."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.positions = None if shape.is_gated else nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.layers))
        self.norm: nn.Module = nn.RMSNorm(shape.width) if shape.is_gated else nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False) if shape.is_gated else None

    def forward(self, x: Tensor) -> Tensor:
        """int64 `[N, T]` -> `[N, T, words]`."""
        hidden = self.embedding(x)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        head = self.embedding.weight if self.head is None else self.head.weight
        return functional.linear(self.norm(hidden), head)


class Bottleneck(nn.Module):
    """A residual block of three convolutions; `[N, C, H, W]` in, `[N, 4 * width, H / stride, W / stride]` out."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.side: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.side = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return functional.relu(self.body(x) + self.side(x), inplace=True)


def vgg16() -> nn.Module:
    """VGG-16 with its head of 4,096 units: 138,357,544 parameters."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in VGG16:
        if outputs:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = outputs
        else:
            layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, CLASSES)]
    return nn.Sequential(*layers)


def resnet(stages: tuple[int, ...]) -> nn.Module:
    """A ResNet of bottlenecks: 25,557,032 parameters with 50 layers, 44,549,160 with 101."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for number, count in enumerate(stages):
        width = 64 * 2**number
        for place in range(count):
            layers.append(Bottleneck(inputs, width, 2 if place == 0 and number else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


NAMES = (*DECODERS, "vgg-16", *RESNET_STAGES)


def published(name: str) -> Subject:
    """The subject of this name, one of `NAMES`."""
    if name in DECODERS:
        shape = DECODERS[name]
        return Subject(
            name,
            lambda: Decoder(shape),
            _token_loss,
            lambda count: tuple(torch.zeros(count, shape.length, dtype=torch.int64) for _ in range(2)),
            units=shape.length,
            unit="tokens",
        )
    return Subject(
        name,
        vgg16 if name == "vgg-16" else lambda: resnet(RESNET_STAGES[name]),
        _class_loss,
        lambda count: (torch.zeros(count, 3, SIDE, SIDE), torch.zeros(count, dtype=torch.int64)),
        optimizer="sgd",
        settings={"lr": 0.1, "momentum": 0.9},
        global_batch_size=256,
        unit="images",
    )


def _rotated(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021): `[N, T, heads, width]`; the angles themselves do not matter here."""
    half = x.shape[-1] // 2
    turn = torch.zeros(x.shape[1], 1, half, device=x.device)
    sine, cosine = turn.sin(), turn.cos()
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1).type_as(x)


def _token_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _class_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y)
