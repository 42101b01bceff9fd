"""Regression on a table: a small network under nn.DataParallel, with its loss curve in TensorBoard and as a PNG.

With --data it reads a CSV file with a header and the price in the last column, such as boston_housing.csv; without, it
predicts how diabetes goes on (442 patients, from scikit-learn).

    python examples/house_prices.py
    samestep run --devices cpu:4 examples/house_prices.py --data boston_housing.csv
    tensorboard --logdir runs/house_prices
"""

import argparse
import os

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", metavar="FILE.csv")
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--out", metavar="DIR", default="runs/house_prices", help="where the loss curve goes")
parser.add_argument("--save", metavar="FILE", help="save the trained parameters to this file")
args = parser.parse_args()


class Net1(nn.Module):
    """Two hidden layers."""

    def __init__(self, num_features):
        super().__init__()
        self.hidden1 = nn.Linear(num_features, 16)
        self.hidden2 = nn.Linear(16, 32)
        self.predict = nn.Linear(32, 1)

    def forward(self, x):
        """`[rows, features]` -> `[rows, 1]`."""
        x = torch.relu(self.hidden1(x))
        x = torch.relu(self.hidden2(x))
        return self.predict(x)


def read_table():
    """The features, one row a sample, and the target."""
    if args.data:
        table = np.loadtxt(args.data, delimiter=",", skiprows=1, quotechar='"')
        return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_diabetes

    return load_diabetes(return_X_y=True, scaled=False)


torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

x, y = read_table()
order = torch.randperm(len(x)).numpy()
num_train = len(x) * 4 // 5
train, test = order[:num_train], order[num_train:]
x = (x - x[train].mean(axis=0)) / x[train].std(axis=0)
x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32).unsqueeze(1)
loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=args.batch_size, shuffle=True)

model = nn.DataParallel(Net1(x.shape[1])).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loss_fn = nn.MSELoss()

os.makedirs(args.out, exist_ok=True)
writer = SummaryWriter(args.out)
losses = []
for epoch in range(1, args.epochs + 1):
    total = 0.0
    for features, target in loader:
        features, target = features.to(device), target.to(device)
        loss = loss_fn(model(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(features)
    losses.append(total / num_train)
    writer.add_scalar("loss", losses[-1], epoch)
    if epoch == 1 or epoch % 10 == 0:
        print(f"epoch {epoch:3}: loss {losses[-1]:.4f}")
writer.close()

figure, axes = plt.subplots()
axes.plot(range(1, args.epochs + 1), losses)
axes.set(xlabel="epoch", ylabel="mean squared error", yscale="log")
figure.savefig(os.path.join(args.out, "loss.png"))
plt.close(figure)

with torch.no_grad():
    error = loss_fn(model(x[test].to(device)), y[test].to(device)).item()
print(f"test RMSE {error**0.5:.3f}")

if args.save:
    torch.save(model.module.state_dict(), args.save)
