"""A batch of no rows between others: the running statistics stay as they are."""

import torch
from torch import nn

torch.manual_seed(110)
model = nn.DataParallel(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))).cuda()
norm = model.module[1]
first = model(torch.randn(8, 3, 4, 4).cuda())
before = norm.running_mean.clone(), norm.running_var.clone()
empty = model(torch.zeros(0, 3, 4, 4).cuda())
print(list(empty.shape), torch.equal(before[0], norm.running_mean), torch.equal(before[1], norm.running_var))
last = model(torch.randn(8, 3, 4, 4).cuda())
last.square().mean().backward()
statistics = [norm.running_mean, norm.running_var]
RESULT = {"out": [first, last], "grads": [p.grad for p in model.parameters()], "statistics": statistics}
