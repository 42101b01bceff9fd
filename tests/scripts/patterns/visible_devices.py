"""Two devices chosen by the environment variable, in the script; and ids given by hand: a range, and a list."""

import os

os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
os.environ["CUDA_VISIBLE_DEVICES"] = "0,4"

import torch
from torch import nn

torch.manual_seed(82)
torch.cuda.set_device(0)
print(torch.cuda.device_count(), "devices, now on", torch.cuda.current_device())
model = nn.DataParallel(nn.Linear(4, 2)).cuda()
losses = model(torch.randn(10, 4).cuda()).square().mean()
losses.backward()
hidden = nn.parallel.data_parallel(nn.Linear(4, 6).cuda(), torch.randn(11, 4).cuda(), range(3))
out = nn.parallel.data_parallel(model.module, (hidden[:, :4],), [0, 1], output_device=0)
out.square().mean().backward()
RESULT = {"loss": losses, "grad": model.module.weight.grad, "ids": model.device_ids, "out": out}
