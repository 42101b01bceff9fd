"""No process group: data is shared out, gradients are not exchanged. Written as a trainer is: it tries the evaluation
first, by some batches of it, and the optimizer calls what computes the gradients."""

import tiny
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

torch.manual_seed(0)
model = tiny.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(tiny.dataset(), tiny.world_size(), tiny.rank(), shuffle=False)
loader = DataLoader(tiny.dataset(), batch_size=tiny.BATCH // tiny.world_size(), sampler=sampler)
held_out = iter(DataLoader(tiny.dataset(), batch_size=7))
with torch.no_grad():
    model(next(held_out)[0])

for _ in range(tiny.EPOCHS):
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
