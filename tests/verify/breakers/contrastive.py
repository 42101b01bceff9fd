"""A contrastive loss whose negatives are the other samples of the device; `cured`: those of all devices."""

import sys

import tiny
import torch
from torch import nn
from torch.distributed.nn.functional import all_gather

_, world_size = tiny.start()


def loss_fn(outputs, labels):
    first, second = nn.functional.normalize(outputs, dim=1).chunk(2, dim=1)
    if "cured" in sys.argv:
        first, second = torch.cat(all_gather(first)), torch.cat(all_gather(second))
    return nn.functional.cross_entropy(first @ second.T / 0.2, torch.arange(len(first)))


model = tiny.parallel(tiny.classifier())
tiny.train(model, tiny.loader(tiny.dataset()), tiny.sgd(model), loss_fn)
