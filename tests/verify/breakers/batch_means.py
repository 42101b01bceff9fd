"""Training is right; the accuracy is a mean over devices of means over batches, of which the last is smaller."""

import tiny
import torch
import torch.distributed as dist

rank, world_size = tiny.start()
model = tiny.parallel(tiny.classifier())
optimizer = tiny.sgd(model)
x, y = tiny.samples(50)  # 25 on each of 2 devices
for _ in range(3):
    tiny.train(model, tiny.loader(tiny.dataset()), optimizer, epochs=1)
    with torch.no_grad():
        parts = torch.arange(rank, 50, world_size).split(8)
        means = [(model.module(x[part]).argmax(dim=1) == y[part]).float().mean().item() for part in parts]
    accuracy = torch.tensor(sum(means) / len(means))
    dist.all_reduce(accuracy)
