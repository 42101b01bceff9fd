"""A model for each fold of a cross-validation: those that are dropped must be freed."""

import gc
import weakref

import torch
from torch import nn

torch.manual_seed(116)
dropped, losses = [], []
for _ in range(4):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = nn.DataParallel(net).cuda()
    for _ in range(2):
        loss = model(torch.randn(8, 4).cuda()).square().mean()
        loss.backward()
    losses.append(loss.item())
    dropped += [weakref.ref(net), weakref.ref(model), weakref.ref(net[0].weight)]
    del net, model, loss
    gc.collect()
print(sum(ref() is not None for ref in dropped), "alive")
RESULT = {"losses": losses}
