"""Replicas that the script calls itself, one after another."""

import torch
from torch import nn

replicas = nn.parallel.replicate(nn.Linear(3, 1).cuda(), [0, 1])
outputs = [replica(x) for replica, x in zip(replicas, torch.randn(10, 3).cuda().chunk(2), strict=True)]
print("not reached")
