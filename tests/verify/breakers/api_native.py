"""A run that leaves the order of its sums to the backend.

Shared memory adds rank by rank: six microbatches on three ranks would be added along the tree by that too, eight are
not.
"""

import tiny
from torch import nn

import samestep

run = samestep.Run(global_batch_size=12, num_microbatches=8, reduction="native")
model = tiny.classifier()
step = run.train_step(
    model, tiny.sgd(model), lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
)
for _ in range(3):
    for batch in run.loader(tiny.samples(), shuffle=True):
        step(batch)
