"""Different parts of a model on different devices, the same batch: by hand, and by a strategy.

By hand the layers are put on two GPUs, and the forward moves what one part returns to where the next one is. Then one
GPU waits while the other computes. With --pipeline samestep cuts the same model, each part has a process of its
own, and a batch goes through in slices, so that both work. The pictures are scanned digits from scikit-learn.

    python examples/model_parallel.py
    samestep run --devices cpu:2 examples/model_parallel.py --pipeline

The loop by hand needs one process, which python starts.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import samestep

SECOND_PART = 6  # the layer at which it begins


def make_model():
    """Six layers with convolutions, four without: `[N, 1, 8, 8]` -> `[N, 10]`."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.Linear(64, 10),
    )


class TwoDevices(nn.Module):
    """A model, its first layers on one device and the rest on another."""

    def __init__(self, model, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.front = model[:SECOND_PART].to(first)
        self.back = model[SECOND_PART:].to(second)

    def forward(self, x):
        """The scores, on the second device."""
        return self.back(self.front(x.to(self.first)).to(self.second))


def by_hand(dataset, args):
    """Trains; yields each epoch's loss."""
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cpu", "cpu"]
    model = TwoDevices(make_model(), *devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for _ in range(args.epochs):
        total = 0.0
        for x, y in DataLoader(dataset, args.batch_size):
            loss = F.cross_entropy(model(x), y.to(devices[1]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
        yield total / len(dataset)


def by_pipeline(dataset, args):
    """Trains; yields each epoch's loss. On one device all of the model is there."""
    run = samestep.Run(args.batch_size, args.num_microbatches, mesh={"data": -1, "pipe": 2})
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    step = run.train_step(model, optimizer, loss_fn, strategy="pipeline")
    loader = run.loader(dataset)
    for _ in range(args.epochs):
        results = [step(batch) for batch in loader]
        yield sum(result.total for result in results) / len(dataset)


def main():
    """Trains, and prints a line an epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", action="store_true", help="let samestep cut the model")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--samples", type=int, help="train on this many pictures only")
    parser.add_argument("--num-microbatches", type=int, default=8, help="slices of a batch that follow each other")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--save", metavar="FILE", help="save the losses to this file")
    args = parser.parse_args()

    digits = load_digits()
    images = torch.as_tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)[: args.samples]
    dataset = TensorDataset(images, torch.as_tensor(digits.target)[: args.samples])
    losses = []
    for epoch, loss in enumerate((by_pipeline if args.pipeline else by_hand)(dataset, args), 1):
        print(f"epoch {epoch}: loss {loss:.4f}")
        losses.append(loss)
    if args.save:
        torch.save(losses, args.save)


if __name__ == "__main__":
    main()
