"""A loss that draws from a generator of its own."""

import random

import tiny
from torch import nn

import samestep

run = samestep.Run(global_batch_size=12, num_microbatches=6)
generator = random.Random(7)
model = tiny.classifier()


def loss_fn(model, batch):
    smoothing = generator.uniform(0.0, 0.3)
    return nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing)


step = run.train_step(model, tiny.sgd(model), loss_fn)
for batch in run.loader(tiny.samples(), shuffle=True):
    step(batch)
