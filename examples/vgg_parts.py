"""A network whose parts share their batch out by themselves: nn.parallel.data_parallel within a VGG's forward.

The convolutions and the classifier each spread the batch over the devices listed below and gather it again. Batches are
dicts. The pictures are scanned digits from scikit-learn, or, with --data, a folder with the four gzipped files of
Fashion-MNIST.

    python examples/vgg_parts.py
    samestep run --devices cpu:4 examples/vgg_parts.py
"""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = "0,4"

import argparse
import gzip

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SIDE = 32
USE_GPU = torch.cuda.is_available()
DEVICE_IDS = list(range(torch.cuda.device_count()))


class Pictures(Dataset):
    """Grey pictures and their classes, enlarged or padded to 32×32."""

    def __init__(self, images, labels):
        images = torch.as_tensor(images, dtype=torch.float32).unsqueeze(1)
        border = (SIDE - images.shape[-1]) // 2
        if images.shape[-1] < SIDE // 2:
            self.images = F.interpolate(images, size=SIDE, mode="bilinear")
        else:
            self.images = F.pad(images, [border] * 4)
        self.labels = torch.as_tensor(labels, dtype=torch.int64)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index]}

    def __len__(self):
        return len(self.labels)


class VGG(nn.Module):
    """Six convolutions in three stages, and a classifier."""

    def __init__(self, num_classes=10):
        super().__init__()
        layers, num_inputs = [], 1
        for num_outputs in (16, 32, 64):
            for _ in range(2):
                layers += [nn.Conv2d(num_inputs, num_outputs, 3, padding=1), nn.BatchNorm2d(num_outputs), nn.ReLU()]
                num_inputs = num_outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, num_classes)
        )

    def forward(self, x):
        """`[N, 1, 32, 32]` -> `[N, classes]`."""
        if DEVICE_IDS:
            x = nn.parallel.data_parallel(self.features, x, DEVICE_IDS)
            return nn.parallel.data_parallel(self.classifier, x.flatten(1), DEVICE_IDS)
        return self.classifier(self.features(x).flatten(1))


def read_data(folder, samples):
    """The training and the test set, of so many pictures each; all if `samples` is None."""
    if folder is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = digits.images / 16, digits.target
        images, labels = (images[:-360], images[-360:]), (labels[:-360], labels[-360:])
        return [Pictures(x[:samples], y[:samples]) for x, y in zip(images, labels, strict=True)]
    parts = []
    for part in ("train", "t10k"):
        with gzip.open(os.path.join(folder, f"{part}-images-idx3-ubyte.gz")) as file:
            images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
        with gzip.open(os.path.join(folder, f"{part}-labels-idx1-ubyte.gz")) as file:
            labels = np.frombuffer(file.read(), np.uint8, offset=8)
        parts.append(Pictures(images[:samples].astype(np.float32) / 255, labels[:samples].astype(np.int64)))
    return parts


def accuracy(model, loader):
    """The share of a loader's pictures whose class is found."""
    model.eval()
    found, total = 0, 0
    with torch.no_grad():
        for batch in loader:
            image, label = batch["image"], batch["label"].numpy()
            scores = model(image.cuda() if USE_GPU else image).cpu().numpy()
            found += (scores.argmax(axis=1) == label).sum()
            total += len(label)
    model.train()
    return found / total


def main():
    """Trains, and prints a line an epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="DIR", help="a folder with Fashion-MNIST's files")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--samples", type=int, help="train and test on this many pictures only")
    parser.add_argument("--workers", type=int, default=2, help="processes that load pictures")
    parser.add_argument("--save", metavar="FILE", help="save the trained parameters to this file")
    args = parser.parse_args()

    torch.manual_seed(0)
    train, test = read_data(args.data, args.samples)
    train_loader = DataLoader(train, args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=USE_GPU)
    test_loader = DataLoader(test, args.batch_size)

    model = VGG().cuda() if USE_GPU else VGG()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        total = 0.0
        for batch in train_loader:
            image, label = batch["image"], batch["label"]
            if USE_GPU:
                image, label = image.cuda(non_blocking=True), label.cuda(non_blocking=True)
            loss = F.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(label)
        print(f"epoch {epoch}: loss {total / len(train):.4f}, test accuracy {accuracy(model, test_loader):.3f}")
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
