"""A dataset that augments by a generator of its own, which nobody seeds by sample."""

import numpy as np
import tiny
from torch import nn

import samestep

run = samestep.Run(global_batch_size=12, num_microbatches=6)
generator = np.random.default_rng(3)
data = tiny.Augmented(lambda x: x * float(generator.uniform(0.5, 1.5)))
model = tiny.classifier()
step = run.train_step(
    model, tiny.sgd(model), lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
)
for batch in run.loader(data, shuffle=True):
    step(batch)
