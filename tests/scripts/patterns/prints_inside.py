"""Prints inside the forward, by each chunk and in its order."""

import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        print("rows", x[:, 0].tolist(), end="")
        sys.stdout.write(" on to the layer\n")
        print("to the other stream", file=sys.stderr)
        h = self.fc(x)
        print("done with", len(x), "rows")
        return h


torch.manual_seed(51)
model = nn.DataParallel(Net()).cuda()
for step in range(2):
    print("step", step)
    x = torch.arange(40.0).view(10, 4).cuda()
    out = model(x)
    print("out", tuple(out.shape))
RESULT = {"out": out}
