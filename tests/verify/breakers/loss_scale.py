"""One sample is too large for the loss scale: the device that has it skips the update, and the others do not."""

import tiny
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

tiny.start()
x, y = tiny.samples()
x[5] *= 1e3
model = tiny.classifier()
optimizer = tiny.sgd(model, lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125)
for features, labels in tiny.loader(TensorDataset(x, y), shuffle=False):
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(features), labels)).backward()
    scaler.unscale_(optimizer)
    tiny.average_gradients(model)
    scaler.step(optimizer)
    scaler.update()
