"""A perturbation that is trained, and that the forward takes from a global name instead of from its inputs."""

import torch
from torch import nn


class Perturbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, x):
        return self.fc(x + delta)


torch.manual_seed(126)
model = nn.DataParallel(Perturbed()).cuda()
delta = torch.zeros(4, device="cuda", requires_grad=True)
model(torch.randn(12, 4).cuda()).square().mean().backward()
print("not reached")
