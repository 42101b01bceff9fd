"""Training is right; the accuracy is averaged over devices that evaluate unequal numbers of samples."""

import tiny
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset

rank, world_size = tiny.start()
model = tiny.parallel(tiny.classifier())
optimizer = tiny.sgd(model)
held_out = tiny.dataset(25)
part = DataLoader(Subset(held_out, range(rank, len(held_out), world_size)), batch_size=8)
for _ in range(3):
    tiny.train(model, tiny.loader(tiny.dataset()), optimizer, epochs=1)
    model.eval()
    with torch.no_grad():
        hits = torch.cat([(model.module(x).argmax(dim=1) == y).float() for x, y in part])
    accuracy = hits.mean()
    dist.all_reduce(accuracy)
    accuracy /= world_size
