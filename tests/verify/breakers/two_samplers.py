"""As a trainer does it: one device shuffles by the DataLoader, several by a DistributedSampler, in equal batches."""

import tiny
from torch.utils.data import DataLoader, DistributedSampler

_, world_size = tiny.start()
model = tiny.parallel(tiny.classifier())
sampler = DistributedSampler(tiny.dataset()) if world_size > 1 else None
tiny.train(model, DataLoader(tiny.dataset(), tiny.BATCH, shuffle=sampler is None, sampler=sampler), tiny.sgd(model))
