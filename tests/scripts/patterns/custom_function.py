"""An autograd Function of the script's own inside the forward."""

import torch
from torch import nn


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x.sign() * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * (x.abs() < 1) * scale, (grad * x.sign()).sum(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Sign.apply(self.fc(x), self.scale)


torch.manual_seed(54)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = (model(torch.randn(10, 4).cuda()) - 0.3).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
