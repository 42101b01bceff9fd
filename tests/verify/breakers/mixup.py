"""Each sample is mixed with another one of its device's batch."""

import numpy as np
import tiny
import torch
from torch.nn import functional as F

tiny.start()
np.random.seed(1)
model = tiny.parallel(tiny.classifier())
optimizer = tiny.sgd(model)
for x, y in tiny.loader(tiny.dataset(), shuffle=False):
    share = float(np.random.beta(0.4, 0.4))
    other = torch.randperm(len(x))
    found = model(share * x + (1 - share) * x[other])
    loss = share * F.cross_entropy(found, y) + (1 - share) * F.cross_entropy(found, y[other])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
