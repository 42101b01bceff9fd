"""A masked loss is averaged by hand: each device divides by the weights of its own samples."""

import tiny
from torch.nn import functional as F

tiny.start()
model = tiny.parallel(tiny.classifier())
optimizer = tiny.sgd(model)
for x, y in tiny.loader(tiny.dataset(), shuffle=False):
    mask = (x[:, 0] > 0.2).float()
    loss = (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
