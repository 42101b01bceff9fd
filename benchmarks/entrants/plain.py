"""PyTorch as its tutorials write it: a `DataLoader` that shuffles; with two processes DDP and `DistributedSampler`.

Sources: the tutorials "Optimizing Model Parameters" and "Getting Started with Distributed Data Parallel", started by
torchrun. The tutorials' printed lines are left out.
"""

import torch.distributed as dist
from gate import Gate
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from workloads import task

told = task()
model: nn.Module = told.workload.make_model()
sampler: DistributedSampler[object] | None = None
if told.num_processes > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(told.dataset)
optimizer = told.workload.make_optimizer(model.parameters())
loader = DataLoader(told.dataset, batch_size=told.local_batch_size, shuffle=sampler is None, sampler=sampler)
gate = Gate(told.gate, told.warm_up)
epoch = 0
while True:
    if sampler is not None:
        sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = told.workload.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gate.step()
    epoch += 1
