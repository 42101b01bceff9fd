"""Outputs written to in place, returned twice, as they came in, or without a gradient from some chunks."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        h = self.fc(x)
        extra = h.mean(1) if x[0, 0] > 0 else torch.zeros(len(x), device=x.device)
        return h, h, x, extra, x[:, 0] > 0, h.detach().double(), h.to(torch.bfloat16), torch.complex(h, h)


torch.manual_seed(74)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    x = torch.linspace(-1, 1, 40).view(10, 4).cuda()
    first, second, same, extra, positive, double, half, complicated = model(x)
    first.mul_(2)
    second[:, 0] = 0
    same += 1
    loss = first.square().mean() + second.abs().mean() + (extra * positive).sum() + half.float().mean()
    loss = loss + complicated.abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {
    "loss": loss,
    "x": x,
    "outputs": [first, second, same, extra, positive, double, half],
    "state": model.state_dict(),
}
