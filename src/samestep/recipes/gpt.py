"""A small byte-level GPT: predicts the next byte of a text.

Source: the decoder of Radford et al. 2019 (GPT-2): layer norm before each part, learned positions, GELU, the output
weights shared with the byte embedding.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from samestep.data.readers import IGNORE_INDEX, ByteWindows, read_bytes, to_bytes
from samestep.engine.losses import Mean
from samestep.errors import DataError
from samestep.metrics import cross_entropy_with, perplexity
from samestep.recipes.recipe import DataOptions, Recipe, RecipeData
from samestep.recipes.settings import check_source, own_options

NUM_BYTES = 256
EVAL_PART = 10
INIT_STD = 0.02


def data(asked: DataOptions) -> RecipeData:
    """A text file by `--data`, or the language reference that ships with CPython; the last 10 % for evaluation.

    The embedded text is a part of the Python that runs, and differs a little between Python versions.
    """
    options = own_options("gpt", asked.options)
    check_source("gpt", asked.data_dir)
    name = Path(asked.data).name if asked.data else "Python's language reference"
    text = read_bytes(asked.data) if asked.data else _language_reference()
    if len(text) < 2 * EVAL_PART:
        raise DataError(f"{name}: {len(text)} bytes are too short a text; at least {2 * EVAL_PART} are needed")
    cut = len(text) - len(text) // EVAL_PART
    train, test = (ByteWindows(part, options["context"]) for part in (text[:cut], text[cut:]))
    sizes = f"{len(train):,} windows of {options['context']} train, {len(test):,} test"
    return RecipeData(train, test, f"{name}: {len(text):,} bytes ({sizes})", options)


class DecoderBlock(nn.Module):
    """Causal self-attention, then a feed-forward network, each added to its input; `[N, T, width]` in and out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)
        self.attention_dropout = nn.Dropout(dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, T, width]` -> `[N, T, width]`."""
        x = x + self.dropout(self.attention_out(self._attend(self.attention_norm(x))))
        fed: Tensor = self.dropout(self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x)))))
        return x + fed

    def _attend(self, x: Tensor) -> Tensor:
        """Written out: the fused kernels for CUDA have a backward that is not deterministic, or are chosen by shape."""
        together = self.queries_keys_values(x)
        samples, length, _ = together.shape
        split = together.view(samples, length, 3, -1, self.head_width)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        scores = queries @ keys.transpose(-2, -1) * self.head_width**-0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = self.attention_dropout(scores.masked_fill(later, float("-inf")).softmax(-1))
        mixed: Tensor = weights @ values
        return mixed.transpose(1, 2).reshape(samples, length, -1)


class Gpt(nn.Module):
    """Bytes `[N, T]`, T up to `context`, to scores of each next byte `[N, T, 256]`.

    Args:
        layers: blocks.
        width: of each position's vector.
        heads: of the attention; a divisor of `width`.
        context: the most bytes of a window.
        dropout: the probability of an entry to be dropped.
        tied: whether the output shares the byte embedding's weights.
    """

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float, *, tied: bool = True) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(NUM_BYTES, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        blocks = [DecoderBlock(width, heads, dropout) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, NUM_BYTES, bias=False)
        self.apply(_initialize)
        for block in blocks:
            # Each layer adds two parts to the sum, whose variance must not grow with the number of layers.
            for part in (block.attention_out, block.feed_out):
                nn.init.normal_(part.weight, std=INIT_STD * (2 * layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """int64 `[N, T]` -> `[N, T, 256]`."""
        places = self.position_embedding.weight[: x.shape[1]]
        hidden: Tensor = self.norm(self.blocks(self.dropout(self.byte_embedding(x) + places)))
        return _scores(hidden, self._output_weights())

    def _output_weights(self) -> nn.Embedding | nn.Linear:
        return self.byte_embedding if self.head is None else self.head


def _scores(hidden: Tensor, weights: nn.Embedding | nn.Linear) -> Tensor:
    """The output layer, called as a module if it is one: FSDP gathers its weights in the hooks of that call."""
    scores: Tensor = weights(hidden) if isinstance(weights, nn.Linear) else functional.linear(hidden, weights.weight)
    return scores


def model(data: RecipeData) -> Gpt:
    """4 layers of width 128: 834,304 parameters."""
    return Gpt(**data.options)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
    """The cross-entropy in nats, summed over the bytes that have a target, with their number."""
    x, y = batch
    scores = model(x).flatten(0, 1)
    total = functional.cross_entropy(scores.float(), y.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return Mean(total, (y != IGNORE_INDEX).sum())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _language_reference() -> Tensor:
    from pydoc_data.topics import topics

    return to_bytes("\n".join(topics[name] for name in sorted(topics)).encode())


RECIPE = Recipe(
    name="gpt",
    summary="a small GPT over bytes: Python's language reference (embedded), or a text file by --data",
    data=data,
    model=model,
    loss=loss,
    metrics={"perplexity": perplexity, "loss": cross_entropy_with(class_dim=-1)},
    headline="perplexity",
    headline_label="test perplexity",
    optimizer="adamw",
    lr=2e-3,
    weight_decay=0.1,
    max_grad_norm=1.0,
    global_batch_size=64,
    epochs=3,
)
