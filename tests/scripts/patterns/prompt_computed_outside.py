"""A frozen model, and a prompt that is trained: computed outside, and taken from an attribute in the forward."""

import torch
from torch import nn


class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, x):
        return self.fc(x + self.prompt)


torch.manual_seed(127)
net = Prompted().requires_grad_(False)
model = nn.DataParallel(net).cuda()
generator = nn.Linear(3, 4).cuda()
net.prompt = generator(torch.randn(3).cuda())
model(torch.randn(12, 4).cuda()).square().mean().backward()
print("not reached")
