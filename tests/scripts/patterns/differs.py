"""A result, an input or a loss that differs between processes, as the argument says."""

import os
import sys

import torch
from torch import nn

torch.manual_seed(52)
net = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
model, features = nn.DataParallel(net).cuda(), []
net[1].register_forward_hook(lambda module, args, out: features.append(out))  # of this process's chunks only
x = torch.randn(10, 4) + (os.getpid() if sys.argv[1] == "input" else 0)
out = model(x.cuda())  # the line of the input
loss = out.square().mean() + (torch.cat(features).mean() if sys.argv[1] == "loss" else 0)
loss.backward()  # the line of the loss
RESULT = {"id": os.getpid()}
