"""The schedule is stepped once a device in every step, as some wrappers do."""

import tiny
import torch

_, world_size = tiny.start()
model = tiny.parallel(tiny.classifier())
optimizer = tiny.sgd(model)


class PerDevice(torch.optim.lr_scheduler.StepLR):
    def step(self, epoch=None):
        super().step(epoch)


scheduler = PerDevice(optimizer, step_size=2, gamma=0.5)
for _ in range(3):
    for x, y in tiny.loader(tiny.dataset()):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        for _ in range(world_size):
            scheduler.step()
