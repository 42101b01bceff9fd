"""A recurrent model keeps its last hidden state, of whichever samples this device had before."""

import tiny
import torch
from torch import nn


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(8, 16), nn.Linear(16, 4)
        self.h = None

    def forward(self, x):
        h = torch.zeros(16) if self.h is None else self.h
        h = self.cell(x, h.expand(len(x), 16))
        self.h = h.detach().mean(dim=0)
        return self.out(h)


tiny.start()
model = tiny.parallel(Stateful())
tiny.train(model, tiny.loader(tiny.dataset()), tiny.sgd(model))
