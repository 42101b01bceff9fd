"""Training on a GPU, if there is one: a plain script that wraps nothing and knows one device.

SimpleNet learns digits, from scikit-learn. samestep shares out the model that the optimizer trains all the same:

    python examples/simple_gpu.py
    samestep run --devices cpu:4 examples/simple_gpu.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--samples", type=int, help="train and test on this many digits only")
parser.add_argument("--save", metavar="FILE", help="save the trained parameters to this file")
args = parser.parse_args()


class SimpleNet(nn.Module):
    """One hidden layer."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(784, 128)
        self.output = nn.Linear(128, 10)

    def forward(self, x):
        """`[N, 1, 28, 28]` -> `[N, 10]`."""
        x = x.view(-1, 784)
        return self.output(torch.relu(self.hidden(x)))


torch.manual_seed(0)
use_gpu = torch.cuda.is_available()
if use_gpu:
    print("training on", torch.cuda.get_device_name(0))
else:
    print("no GPU here, training on the CPU")

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
images = nn.functional.interpolate(images, size=28, mode="bilinear")
labels = torch.tensor(digits.target)
train_set = TensorDataset(images[:-360][: args.samples], labels[:-360][: args.samples])
test_set = TensorDataset(images[-360:][: args.samples], labels[-360:][: args.samples])
train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
test_loader = DataLoader(test_set, batch_size=args.batch_size)

model = SimpleNet()
if use_gpu:
    model = model.cuda()
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for epoch in range(1, args.epochs + 1):
    total = 0.0
    for x, y in train_loader:
        if use_gpu:
            x, y = x.cuda(), y.cuda()
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)

    found = 0
    with torch.no_grad():
        for x, y in test_loader:
            if use_gpu:
                x, y = x.cuda(), y.cuda()
            found += (model(x).argmax(dim=1) == y).sum().item()
    print(f"epoch {epoch:2}: loss {total / len(train_set):.4f}, test accuracy {found / len(test_set):.3f}")

if args.save:
    torch.save(model.state_dict(), args.save)
