"""Noise on a gradient, drawn by the backward of a Function of the script's own."""

import torch
from torch import nn


class Perturbed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + 0.01 * torch.rand_like(grad)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, x):
        return Perturbed.apply(self.fc(x))


torch.manual_seed(125)
model = nn.DataParallel(Net()).cuda()
model(torch.randn(16, 4).cuda()).mean().backward()
print("not reached")
