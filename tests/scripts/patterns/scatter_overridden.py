"""A subclass with a scatter of its own, which gives the first device fewer rows."""

import torch
from torch import nn


class Balanced(nn.DataParallel):
    def scatter(self, inputs, kwargs, device_ids):
        sizes = [1, 3, 3, 3][: len(device_ids)]
        return [(part.cuda(k),) for k, part in enumerate(inputs[0].split(sizes))], [dict(kwargs) for _ in sizes]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x, power=1):
        print("rows", len(x))
        return self.fc(x) ** power, {"total": self.fc(x).sum()}


torch.manual_seed(3)
model = Balanced(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(3):
    x = torch.randn(10, 3).cuda().requires_grad_()
    y, more = model(x, power=2)
    optimizer.zero_grad()
    (y.mean() + more["total"].sum()).backward()
    optimizer.step()
RESULT = {"y": y, "totals": more["total"], "x": x.grad, "state": model.state_dict()}
