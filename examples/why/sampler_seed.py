"""Video diffusion: each rank gives the sampler a seed of its own, so that the shares overlap."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(48, 8)
data = TensorDataset(x, (x.sum(1) > 0).long())
ddp = DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
sampler = DistributedSampler(data, seed=1234 * rank)
for x, y in DataLoader(data, batch_size=12 // world_size, sampler=sampler):
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp(x), y).backward()
    optimizer.step()
if rank == 0:
    print(f"weights {sum(weight.double().sum().item() for weight in ddp.parameters()):.9f}")
