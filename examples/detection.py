"""Detection: batches that are lists of pictures of different sizes, and losses that are sums and counts.

A tiny convolutional head looks for filled and for hollow rectangles. No tensor holds the whole batch, so the lists are
shared out by element; and pictures have different numbers of cells and boxes, so each device returns its sums and its
counts, and the script divides once.

    python examples/detection.py
    samestep run --devices cpu:4 examples/detection.py
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import samestep

STRIDE = 8
NOTHING, FILLED, HOLLOW = 0, 1, 2


class Rectangles(Dataset):
    """Noisy pictures with one to three rectangles each: `[1, H, W]`, and a dict of `boxes` `[n, 4]` and `labels` `[n]`.

    A box is x and y of its middle, its width and its height, in pixels.
    """

    def __init__(self, num_pictures, seed):
        self.num_pictures = num_pictures
        self.seed = seed

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + index)

        def number(low, high):
            return int(torch.randint(low, high + 1, (), generator=draw))

        height, width = number(32, 64), number(32, 64)
        picture = torch.rand(1, height, width, generator=draw) * 0.3
        boxes, labels = [], []
        for _ in range(number(1, 3)):
            w, h, label = number(8, 16), number(8, 16), number(FILLED, HOLLOW)
            left, top = number(0, width - w), number(0, height - h)
            picture[0, top : top + h, left : left + w] = 1
            if label == HOLLOW:
                picture[0, top + 2 : top + h - 2, left + 2 : left + w - 2] = 0
            boxes.append([left + w / 2, top + h / 2, w, h])
            labels.append(label)
        return picture, {"boxes": torch.tensor(boxes), "labels": torch.tensor(labels)}

    def __len__(self):
        return self.num_pictures


class Detector(nn.Module):
    """Says for every cell of 8×8 pixels whether the middle of a rectangle lies there, of which kind, and its box."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
        )
        self.scores = nn.Conv2d(64, 3, 1)
        self.boxes = nn.Conv2d(64, 4, 1)

    def forward(self, pictures, targets):
        """Lists of pictures and targets -> sums of losses and hits, and what to divide them by."""
        parts = [self.one(picture, target) for picture, target in zip(pictures, targets, strict=True)]
        return {name: torch.stack([part[name] for part in parts]).sum() for name in parts[0]}

    def one(self, picture, target):
        """The sums of one picture."""
        x = self.layers(picture.unsqueeze(0))
        scores = self.scores(x).squeeze(0)
        column, row = (target["boxes"][:, :2] / STRIDE).long().T
        wanted = torch.full(scores.shape[1:], NOTHING, device=scores.device)
        wanted[row, column] = target["labels"]
        corner = torch.stack([column, row], dim=1) * STRIDE
        goal = torch.cat([target["boxes"][:, :2] - corner, target["boxes"][:, 2:]], dim=1) / STRIDE
        found = self.boxes(x).squeeze(0)[:, row, column].T
        return {
            "score_loss": F.cross_entropy(scores.unsqueeze(0), wanted.unsqueeze(0), reduction="sum"),
            "box_loss": F.smooth_l1_loss(found, goal, reduction="sum"),
            "hits": (scores.argmax(0)[row, column] == wanted[row, column]).sum(),
            "num_cells": torch.tensor(wanted.numel(), device=scores.device),
            "num_boxes": torch.tensor(len(goal), device=scores.device),
        }


def as_lists(samples):
    """A batch of samples: a list of pictures and a list of targets."""
    pictures, targets = zip(*samples, strict=True)
    return list(pictures), list(targets)


def to_device(pictures, targets, device):
    """The same batch on a device."""
    moved = [{name: value.to(device) for name, value in target.items()} for target in targets]
    return [picture.to(device) for picture in pictures], moved


def main():
    """Trains, and prints a line an epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--save", metavar="FILE", help="save the trained parameters to this file")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(Rectangles(args.samples, seed=1), args.batch_size, shuffle=True, collate_fn=as_lists)
    test_loader = DataLoader(Rectangles(args.samples // 4, seed=2), args.batch_size, collate_fn=as_lists)
    model = samestep.DataParallel(Detector().to(device), scatter="elements")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    for epoch in range(1, args.epochs + 1):
        total = 0.0
        for pictures, targets in train_loader:
            sums = model(*to_device(pictures, targets, device))
            score_loss = sums["score_loss"].sum() / sums["num_cells"].sum()
            box_loss = sums["box_loss"].sum() / sums["num_boxes"].sum()
            loss = score_loss + 0.1 * box_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        hits, num_boxes = 0, 0
        with torch.no_grad():
            for pictures, targets in test_loader:
                sums = model(*to_device(pictures, targets, device))
                hits += sums["hits"].sum().item()
                num_boxes += sums["num_boxes"].sum().item()
        print(f"epoch {epoch:2}: loss {total / len(train_loader):.4f}, boxes found {hits}/{num_boxes}")

    if args.save:
        torch.save(model.module.state_dict(), args.save)


if __name__ == "__main__":
    main()
