"""Different parts of a model on different devices, the same batch.

The layers are put on two GPUs, and the forward moves what one part returns to where the next one is. Then one GPU waits
while the other computes. The pictures are scanned digits from scikit-learn.

    python examples/model_parallel.py
    samestep run --devices cpu:2 --logical-devices 2 examples/model_parallel.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

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


def train(dataset, args):
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


def main():
    """Trains, and prints a line an epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--samples", type=int, help="train on this many pictures only")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--save", metavar="FILE", help="save the losses to this file")
    args = parser.parse_args()

    digits = load_digits()
    images = torch.as_tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)[: args.samples]
    dataset = TensorDataset(images, torch.as_tensor(digits.target)[: args.samples])
    losses = []
    for epoch, loss in enumerate(train(dataset, args), 1):
        print(f"epoch {epoch}: loss {loss:.4f}")
        losses.append(loss)
    if args.save:
        torch.save(losses, args.save)


if __name__ == "__main__":
    main()
