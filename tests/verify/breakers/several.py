"""The breakers that its arguments name, all in one training script, as they meet in practice."""

import random
import sys

import tiny
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

ON = set(sys.argv[1:])
_, WORLD_SIZE = tiny.start()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        extra = [nn.BatchNorm1d(16)] if "batchnorm" in ON else []
        extra += [nn.Dropout(0.25)] if "dropout" in ON else []
        self.net = tiny.classifier(*extra)
        self.register_buffer("centre", torch.zeros(4))
        self.last = torch.zeros(8)

    def forward(self, x):
        if "module_state" in ON:
            carried, self.last = self.last, x.detach().mean(dim=0)
            x = x + 0.5 * carried
        out = self.net(x)
        if "buffers" in ON:
            out = out - self.centre
            with torch.no_grad():
                self.centre.mul_(0.5).add_(0.5 * out.mean(dim=0))
        return out


def change(x):
    return x * random.uniform(0.5, 1.5) if "augmentation" in ON else x


random.seed(0)
data = tiny.Augmented(change, 13 if "sampler" in ON else 48)
if "mean_of_means" in ON:
    data.y[data.x[:, 0] > 0.2] = -100
alone = "order" in ON and WORLD_SIZE == 1
sampler = None if alone else DistributedSampler(data, shuffle="order" in ON, seed=5)
batch_size = 12 if "global_batch" in ON else 12 // WORLD_SIZE
batches = DataLoader(data, batch_size=batch_size, sampler=sampler, shuffle=alone)
model = Model() if "local_clip" in ON else tiny.parallel(Model())
optimizer = tiny.sgd(model, lr=0.05 * (WORLD_SIZE if "learning_rate" in ON else 1))
for _ in range(3):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if "local_clip" in ON:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            tiny.average_gradients(model)
        optimizer.step()
