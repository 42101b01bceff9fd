"""Only the distributed branch switches mixed precision on."""

import tiny
import torch
from torch.nn import functional as F

_, world_size = tiny.start()
model = tiny.parallel(tiny.classifier())
optimizer = tiny.sgd(model)
for x, y in tiny.loader(tiny.dataset()):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=world_size > 1):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
