"""Tensor parallelism: PyTorch divides the matrices of a small transformer, samestep trains it over the data.

`parallelize_module` gives each rank along "tensor" some heads of the attention and some features of the feed-forward
network. The ranks along "data" share each batch, and the bits do not depend on how many these are: 2, 4 and 6 devices
print the same numbers. The pictures are scanned digits from scikit-learn; each of their eight rows is a position.

    python examples/tensor_parallel.py
    samestep run --devices cpu:2 examples/tensor_parallel.py
    samestep run --devices cpu:4 examples/tensor_parallel.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import samestep

WIDTH, HEADS, ROWS = 32, 4, 8
PLAN = {
    "*.queries": ColwiseParallel(),
    "*.keys": ColwiseParallel(),
    "*.values": ColwiseParallel(),
    "*.attention_out": RowwiseParallel(),
    "*.feed_in": ColwiseParallel(),
    "*.feed_out": RowwiseParallel(),
}
"""Columns first, then rows: one sum over the ranks after the attention, and one after the feed-forward network."""


class Block(nn.Module):
    """Attention and a feed-forward network, each added to its input: `[N, T, WIDTH]` -> `[N, T, WIDTH]`."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.feed_in, self.feed_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """The layers give a rank its own heads only, so their number is -1 here."""
        normed = self.attention_norm(x)
        queries, keys, values = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))


class Transformer(nn.Module):
    """Pictures to classes: `[N, 8, 8]` -> `[N, 10]`."""

    def __init__(self, layers=2):
        super().__init__()
        self.rows = nn.Linear(8, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(ROWS, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x):
        """The mean over the positions is what the head sees."""
        return self.head(self.norm(self.blocks(self.rows(x) + self.positions)).mean(1))


def main():
    """Trains, and prints a line an epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--samples", type=int, help="train on this many pictures only")
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share a model: 1, 2 or 4")
    parser.add_argument("--save", metavar="FILE", help="save the losses to this file")
    args = parser.parse_args()

    run = samestep.Run(args.batch_size, mesh={"data": -1, "tensor": args.tensor})
    model = Transformer()
    parallelize_module(model.blocks, run.mesh["tensor"], PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # made afterwards: it is to hold the divided parameters
    step = run.train_step(model, optimizer, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))

    digits = load_digits()
    images = torch.as_tensor(digits.images / 16, dtype=torch.float32)
    data = images[: args.samples], torch.as_tensor(digits.target)[: args.samples]
    loader = run.loader(data, shuffle=True)
    losses = []
    for epoch in range(1, args.epochs + 1):
        results = [step(batch) for batch in loader]
        losses.append(sum(result.total for result in results) / len(data[0]))
        run.print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    scores = run.evaluate(model, data, {"accuracy": samestep.metrics.accuracy})
    run.print(f"accuracy {scores['accuracy']:.3f}")
    if args.save and run.is_main:
        torch.save(losses, args.save)


if __name__ == "__main__":
    main()
