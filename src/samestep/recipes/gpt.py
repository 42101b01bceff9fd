"""A small GPT that predicts the next byte of a text (after Radford et al. 2019, GPT-2).

samestep train gpt --data book.txt       or a copy, to change: samestep run my_gpt.py --data book.txt
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import samestep
from samestep.data.named import text_data
from samestep.recipes.command_line import make_parser, number, trainer_options

NUM_BYTES, INIT_STD = 256, 0.02
METRICS = {"perplexity": samestep.metrics.perplexity, "loss": samestep.metrics.cross_entropy_with(class_dim=-1)}


class DecoderBlock(nn.Module):
    """Causal self-attention, then a feed-forward network, each added to its input; `[N, T, width]` in and out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm, self.queries_keys_values = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.attention_out, self.feed_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.feed_in, self.feed_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention_dropout, self.dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Attention is written out: fused kernels for CUDA are not deterministic, or are chosen by shape."""
        split = self.queries_keys_values(self.attention_norm(x)).unflatten(2, (3, -1, self.head_width))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        scores = queries @ keys.transpose(-2, -1) * self.head_width**-0.5
        later = torch.ones(*scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = self.attention_dropout(scores.masked_fill(later, float("-inf")).softmax(-1))
        x = x + self.dropout(self.attention_out((weights @ values).transpose(1, 2).flatten(2)))
        fed: Tensor = self.dropout(self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x)))))
        return x + fed


class Gpt(nn.Module):
    """Bytes to scores of each next byte; up to `context` of them, and if tied by the weights that embed them."""

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float, *, tied: bool = True) -> None:
        super().__init__()
        self.byte_embedding, self.position_embedding = nn.Embedding(NUM_BYTES, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, NUM_BYTES, bias=False)
        for name, weight in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(weight, std=INIT_STD) if weight.dim() == 2 else nn.init.zeros_(weight)
        for name, weight in self.named_parameters():
            if name.endswith("_out.weight"):  # two a layer are added, so that deep models do not begin larger
                nn.init.normal_(weight, std=INIT_STD * (2 * layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """int64 `[N, T]` to float `[N, T, 256]`."""
        places = self.position_embedding.weight[: x.shape[1]]
        x = self.norm(self.blocks(self.dropout(self.byte_embedding(x) + places)))
        scores: Tensor = functional.linear(x, self.byte_embedding.weight) if self.head is None else self.head(x)
        return scores


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> samestep.Mean:
    """The cross-entropy in nats, summed over the bytes that have a target, others are -100, with their number."""
    scores, y = model(batch[0]).float(), batch[1]
    return samestep.Mean(functional.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="sum"), (y >= 0).sum())


def main() -> None:
    """Trains, and prints the digest of the final state: the same on any number of devices."""
    parser = make_parser(__doc__, data="a text file", epochs=3, batch=64, lr=2e-3)
    for name, default in {"layers": 4, "heads": 4, "head-width": 32, "context": 64}.items():
        parser.add_argument(f"--{name}", type=number(1), default=default, help="%(default)s")
    parser.add_argument("--dropout", type=number(0, below=1, whole=False), default=0.1, help="%(default)s")
    args = parser.parse_args()
    run = samestep.Run(args.global_batch_size, args.num_microbatches, args.seed)  # first: it seeds every generator
    train, test, about = text_data(args.data, args.context)
    model = Gpt(args.layers, args.heads * args.head_width, args.heads, args.context, args.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    options = trainer_options(run, args, about)
    with samestep.Trainer(run, model, optimizer, loss_fn, max_grad_norm=1.0, **options) as trainer:
        trainer.fit(train, args.epochs, max_steps=args.max_steps, eval_data=test, metrics=METRICS, resume=args.resume)
        run.print(f"digest   {trainer.digest}")


if __name__ == "__main__":
    main()
