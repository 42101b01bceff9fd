"""Each device clips its own gradient, and averages what is left."""

import tiny
import torch
from torch.nn import functional as F

tiny.start()
model = tiny.classifier()
optimizer = tiny.sgd(model)
for x, y in tiny.loader(tiny.dataset()):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    tiny.average_gradients(model)
    optimizer.step()
