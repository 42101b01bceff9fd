"""One device shuffles by the DataLoader, several by DistributedSampler: as in countless training scripts."""

import tiny
from torch.utils.data import DataLoader, DistributedSampler

_, world_size = tiny.start()
data = tiny.dataset()
sampler = DistributedSampler(data) if world_size > 1 else None
batches = DataLoader(data, batch_size=tiny.BATCH // world_size, sampler=sampler, shuffle=sampler is None)
model = tiny.parallel(tiny.classifier())
tiny.train(model, batches, tiny.sgd(model))
