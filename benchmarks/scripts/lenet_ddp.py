"""The same under `DistributedDataParallel`, as its tutorial writes it."""

import torch
import torch.distributed as dist
from lenet import BATCH_SIZE, Clock, LeNet, made_up_images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(LeNet())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()
dataset = made_up_images()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=BATCH_SIZE // dist.get_world_size(), sampler=sampler)

clock = Clock()
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        clock.tick()
if dist.get_rank() == 0:
    clock.report()
dist.destroy_process_group()
