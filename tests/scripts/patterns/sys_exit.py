"""A script that ends itself with an exit code."""

import sys

import torch
from torch import nn

torch.manual_seed(46)
model = nn.DataParallel(nn.Linear(3, 1)).cuda()
loss = model(torch.randn(10, 3).cuda()).square().mean()
loss.backward()
RESULT = {"loss": loss, "grad": model.module.weight.grad}
print(f"loss {loss.item():.6f}, which is good enough")
sys.exit(3)
