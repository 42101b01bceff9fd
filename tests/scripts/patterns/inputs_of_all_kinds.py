"""Inputs from the host, expanded, transposed and sliced ones, some that a chunk does not use, some shorter ones."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x, bias, table, names):
        h = self.fc(x) + bias
        return h if x[0, 0] > 0 else h + table.sum() + len(names)


torch.manual_seed(80)
model = nn.DataParallel(Net()).cuda()
x = torch.linspace(-1, 1, 80).view(8, 10).t()[:, ::2]
table = torch.randn(7, 2, requires_grad=True)
prompt = nn.Parameter(torch.randn(1, 3))
out = model(x, prompt.expand(10, 3), table, ["a", "b"])
out.square().sum().backward()
print(x.device, out.device, table.grad.device)
RESULT = {"out": out, "table": table.grad, "prompt": prompt.grad, "weight": model.module.fc.weight.grad}
