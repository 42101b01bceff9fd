"""Noise on a gradient, drawn by a hook in the backward."""

import torch
from torch import nn


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.first(x).relu()
        if h.requires_grad:
            h.register_hook(lambda grad: grad + 0.1 * torch.randn_like(grad))
        return self.last(h)


torch.manual_seed(124)
model = nn.DataParallel(Noisy()).cuda()
model(torch.randn(12, 4).cuda()).square().mean().backward()
print("not reached")
