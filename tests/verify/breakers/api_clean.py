"""A program of samestep's own, with dropout and augmentation: the same bits on any number of devices."""

import random

import tiny
from torch import nn

import samestep


def change(x):
    return x.flip(0) if random.random() < 0.5 else x


run = samestep.Run(global_batch_size=12, num_microbatches=6)
model = tiny.classifier(nn.BatchNorm1d(16), nn.Dropout(0.25))
step = run.train_step(
    model, tiny.sgd(model), lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
)
for batch in run.loader(tiny.Augmented(change), shuffle=True):
    step(batch)
