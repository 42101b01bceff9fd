"""Reinforcement learning: the loss is computed by the module within DistributedDataParallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
states, actions, advantages = torch.randn(48, 8), torch.randint(4, (48, 1)), torch.randn(48)
sampler = DistributedSampler(TensorDataset(states, actions, advantages), shuffle=False)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for states, actions, advantages in DataLoader(sampler.dataset, batch_size=12 // world_size, sampler=sampler):
    policy = ddp.module(states).log_softmax(1).gather(1, actions)[:, 0]
    optimizer.zero_grad()
    (-policy * advantages).mean().backward()
    optimizer.step()
if rank == 0:
    print(f"weights {sum(weight.double().sum().item() for weight in ddp.parameters()):.9f}")
