"""The workload of an estimate: a model with its loss, batch and optimizer; published decoders by their shape."""

import difflib
import importlib
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.checks import check_choice
from samestep.engine.losses import Mean
from samestep.errors import UsageError

OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")


@dataclass(frozen=True)
class Workload:
    """A training: `loss(model, batch)` under the loss contract, batches of any size, an optimizer of `OPTIMIZERS`."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor | Mean]
    make_batch: Callable[[int], Any]  # from a number of samples; the values do not matter
    optimizer: str = "adamw"
    settings: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the optimizer
    global_batch_size: int = 64
    units: int = 1  # of `unit` in a sample
    unit: str = "samples"  # of the speed: "samples", "images", "tokens"


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: the children, at least two and of one class, of the container with the most parameters.

    FSDP2 wraps them one by one, a pipeline is cut between them, activation checkpointing recomputes each.
    """
    best: list[nn.Module] = []
    most = 0
    for module in model.modules():
        children = list(module.children())
        if (
            isinstance(module, nn.ModuleList | nn.Sequential)
            and len(children) > 1
            and len(set(map(type, children))) == 1
        ):
            size = sum(parameter.numel() for parameter in module.parameters())
            if size > most:
                best, most = children, size
    return best


def batch_like(sample: Any, count: int) -> Any:
    """The same nested value with so many samples along dim 0, all zeros."""
    return tree_map_only(Tensor, lambda tensor: tensor.new_zeros((count, *tensor.shape[1:])), sample)


def load_workload(
    name: str,
    known: Sequence[str],
    input_shape: str | None,
    input_dtype: str,
    target_shape: str | None,
    target_dtype: str,
) -> Workload:
    """The workload of `FILE.py:function` or `package.module:function`; other names are not among the known ones.

    The function returns a model, whose samples the shapes describe, or (model, loss function, batch). Without a target
    shape the loss is the sum of the outputs; integer targets are classes, others are compared by mean square.
    """
    if ":" not in name:
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(
            f"there is no model {name!r}; {hint}needed: one of {', '.join(known)}, or FILE.py:function or "
            "package.module:function (such as torchvision.models:resnet50) that returns an nn.Module"
        )
    function = _find_function(name)
    for dtype in (input_dtype, target_dtype):
        check_choice("dtype", dtype, DTYPES, option="--input-dtype, --target-dtype")
    if input_shape is None:
        return _from_triple(name, function)
    sample = torch.zeros(1, *_read_shape(input_shape, "--input-shape"), dtype=getattr(torch, input_dtype))
    target = None
    if target_shape is not None:
        target = torch.zeros(1, *_read_shape(target_shape, "--target-shape"), dtype=getattr(torch, target_dtype))
    return Workload(
        name, lambda: _checked(name, function()), _shaped_loss, lambda count: batch_like((sample, target), count)
    )


def _shaped_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    scores = model(x)
    if y is None:
        return sum((leaf.float().sum() for leaf in tree_leaves(scores) if isinstance(leaf, Tensor)), torch.zeros(()))
    if y.is_floating_point():
        return functional.mse_loss(scores, y)
    return functional.cross_entropy(scores.flatten(0, -2) if y.ndim > 1 else scores, y.flatten())


def _from_triple(name: str, function: Callable[[], Any]) -> Workload:
    """The workload of a function that returns (model, loss function, batch)."""

    def parts() -> tuple[nn.Module, Any, Any]:
        made = function()
        if isinstance(made, tuple) and len(made) == 3:
            return _checked(name, made[0]), made[1], made[2]
        _checked(name, made)
        raise UsageError(
            f"{name} returns a model alone; describe its samples by --input-shape (and --target-shape), or return "
            "(model, loss_fn, batch)"
        )

    def make_batch(count: int) -> Any:
        _, loss, batch = parts()
        return loss, batch_like(batch, count)

    return Workload(name, lambda: parts()[0], lambda model, batch: batch[0](model, batch[1]), make_batch)


def _checked(name: str, made: Any) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise UsageError(f"{name} returns a {type(made).__name__}; needed: an nn.Module, or (model, loss_fn, batch)")
    return made


def _read_shape(text: str, option: str) -> tuple[int, ...]:
    """`3,224,224`; an empty text is a sample that is a single number."""
    try:
        sizes = tuple(int(size) for size in text.split(",") if size.strip())
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        raise UsageError(f"got {option} {text!r}; needed: the sizes of one sample, such as 3,224,224")
    return sizes


def _find_function(name: str) -> Callable[[], Any]:
    """The function that `FILE.py:function` or `package.module:function` names; a file can import its neighbours."""
    source, _, function = name.rpartition(":")
    path = Path(source)
    is_file = source.endswith(".py")
    if is_file and not path.is_file():
        raise UsageError(f"got {path}: there is no such file")
    folder = str(path.resolve().parent if is_file else Path.cwd())
    sys.path.insert(0, folder)
    try:
        found = runpy.run_path(source) if is_file else vars(importlib.import_module(source))
    except ModuleNotFoundError as error:
        raise UsageError(
            f"got {name!r}: {error}; give the file, FILE.py:function, or a module that is installed"
        ) from error
    finally:
        sys.path.remove(folder)
    if not callable(found.get(function)):
        own = [key for key, value in found.items() if getattr(value, "__module__", "") == found["__name__"]]
        raise UsageError(f"{source} has no function {function!r}; it has {', '.join(own) or 'none'}")
    build: Callable[[], Any] = found[function]
    return build


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
