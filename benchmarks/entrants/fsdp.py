"""FSDP2 as PyTorch's tutorial "Getting Started with Fully Sharded Data Parallel" writes it: each block, then the model.

The local batch is one forward and backward; FSDP2 takes the mean of the processes' gradients.
"""

import torch.distributed as dist
from gate import Gate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from workloads import Block, task

told = task()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (told.num_processes,))
model: nn.Module = told.workload.make_model()
for part in model.modules():
    if isinstance(part, Block):
        fully_shard(part, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = told.workload.make_optimizer(model.parameters())
sampler: DistributedSampler[object] = DistributedSampler(told.dataset)
loader = DataLoader(told.dataset, batch_size=told.local_batch_size, sampler=sampler)
gate = Gate(told.gate, told.warm_up)
epoch = 0
while True:
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = told.workload.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gate.step()
    epoch += 1
