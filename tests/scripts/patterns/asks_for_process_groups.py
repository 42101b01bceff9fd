"""Code that would divide its work if it found itself among several processes: it must not."""

import os

import torch
import torch.distributed as dist
from torch import nn

rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
torch.manual_seed(84)
model = nn.DataParallel(nn.Linear(4, 2)).cuda()
x = torch.randn(12, 4)[rank::size]
loss = model(x.cuda()).square().mean()
loss.backward()
print(rank, size, int(os.environ.get("WORLD_SIZE", 1)))
RESULT = {"loss": loss, "grad": model.module.weight.grad}
