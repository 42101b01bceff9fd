"""Evaluation: DistributedSampler repeats a sample, so that 47 are counted as 48."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(95, 8)
data = TensorDataset(x, (x.sum(1) > 0).long())
train, test = torch.utils.data.Subset(data, range(48)), torch.utils.data.Subset(data, range(48, 95))
ddp = DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for x, y in DataLoader(train, batch_size=12 // world_size, sampler=DistributedSampler(train, shuffle=False)):
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp(x), y).backward()
    optimizer.step()
sampler = DistributedSampler(test, shuffle=False)
score = torch.zeros(2)
with torch.no_grad():
    for x, y in DataLoader(test, batch_size=12 // world_size, sampler=sampler):
        score += torch.stack([(ddp(x).argmax(1) == y).sum(), torch.tensor(len(y))])
dist.all_reduce(score)
if rank == 0:
    print(f"accuracy {score[0] / score[1]:.9f} of {score[1]:.0f} samples")
