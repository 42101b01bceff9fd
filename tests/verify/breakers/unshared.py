"""The DataLoader has no distributed sampler: every device takes the same samples, and fewer of them in a step."""

import tiny
from torch.utils.data import DataLoader

_, world_size = tiny.start()
model = tiny.parallel(tiny.classifier())
batches = DataLoader(tiny.dataset(), batch_size=tiny.BATCH // world_size)
tiny.train(model, batches, tiny.sgd(model))
