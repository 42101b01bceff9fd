"""Inputs are noised in the training loop, by a draw for this device's samples alone."""

import tiny
import torch
from torch.nn import functional as F

rank, _ = tiny.start()
model = tiny.parallel(tiny.classifier())
torch.manual_seed(100 + rank)
optimizer = tiny.sgd(model)
for x, y in tiny.loader(tiny.dataset()):
    noisy = x + 0.3 * torch.randn_like(x)
    optimizer.zero_grad()
    F.cross_entropy(model(noisy), y).backward()
    optimizer.step()
