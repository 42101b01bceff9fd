"""Segmentation: a small batch on each rank, which BatchNorm takes for the whole."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
images = torch.randn(48, 3, 8, 8)
sampler = DistributedSampler(TensorDataset(images, (images.mean(1) > 0).float()), shuffle=False)
net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 1))
ddp = DistributedDataParallel(net)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for images, masks in DataLoader(sampler.dataset, batch_size=12 // world_size, sampler=sampler):
    loss = nn.functional.binary_cross_entropy_with_logits(ddp(images)[:, 0], masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if rank == 0:
    print(f"weights {sum(weight.double().sum().item() for weight in ddp.parameters()):.9f}")
