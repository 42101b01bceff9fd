"""A warm-up: the scheduler is stepped once for each rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(48, 8)
sampler = DistributedSampler(TensorDataset(x, (x.sum(1) > 0).long()), shuffle=False)
ddp = DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
for x, y in DataLoader(sampler.dataset, batch_size=12 // world_size, sampler=sampler):
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp(x), y).backward()
    optimizer.step()
    for _ in range(world_size):
        scheduler.step()
if rank == 0:
    print(f"weights {sum(weight.double().sum().item() for weight in ddp.parameters()):.9f}")
