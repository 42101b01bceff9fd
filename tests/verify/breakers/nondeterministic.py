"""Many rows are added up at few places by several threads at once: by atomic additions, in no fixed order."""

import tiny
import torch
from torch import nn

REPEATS = 200  # so many rows that threads take turns on a busy core too: one after the other they add in a fixed order


class Pooled(nn.Module):
    """Spreads what it is given over many rows, and adds these up at four places."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 20_000))

    def forward(self, x):
        out = self.mix(x)
        rows = self.scale.repeat(REPEATS)
        places = torch.arange(len(rows)) % 4
        sums = torch.zeros(4).index_put((places,), rows, accumulate=True)
        return out[:, :4] + 5e-7 * sums


tiny.start()
torch.set_num_threads(4)
model = tiny.parallel(Pooled())
tiny.train(model, tiny.loader(tiny.dataset()), tiny.sgd(model))
