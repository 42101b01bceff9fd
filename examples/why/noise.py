"""Flow matching: all ranks have one seed, so that their samples get the same noise."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 8))
sampler = DistributedSampler(data, shuffle=False)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for (x,) in DataLoader(data, batch_size=12 // world_size, sampler=sampler):
    noise, time = torch.randn(len(x), 8), torch.rand(len(x), 1)
    velocity = ddp(torch.cat([noise + time * (x - noise), time], 1))
    optimizer.zero_grad()
    nn.functional.mse_loss(velocity, x - noise).backward()
    optimizer.step()
if rank == 0:
    print(f"weights {sum(weight.double().sum().item() for weight in ddp.parameters()):.9f}")
