"""A result that no two processes have in common."""

import os

import torch
from torch import nn

model = nn.DataParallel(nn.Linear(2, 2)).cuda()
model(torch.zeros(4, 2).cuda())
RESULT = {"id": os.getpid()}
