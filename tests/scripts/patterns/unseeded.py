"""A script that seeds nothing: it draws the same on any number of devices all the same."""

import random

import numpy as np
import torch
from torch import nn

model = nn.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))).cuda()
loss = model(torch.randn(10, 4).cuda()).square().mean()
loss.backward()
RESULT = {"loss": loss, "grad": model.module[0].weight.grad, "draws": [random.random(), np.random.rand()]}
