"""A model that carries a state from one forward to the next, so from one microbatch to the next on a device."""

import tiny
from torch import nn

import samestep


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.last = tiny.classifier(), 0.0

    def forward(self, x):
        out = self.net(x + 0.1 * self.last)
        self.last = float(out.detach().mean())
        return out


run = samestep.Run(global_batch_size=12, num_microbatches=6)
model = Stateful()
step = run.train_step(
    model, tiny.sgd(model), lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
)
for batch in run.loader(tiny.samples(), shuffle=True):
    step(batch)
