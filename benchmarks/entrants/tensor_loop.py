"""The raw loop over data that lies in one tensor: a batch is one indexed read. With two processes under DDP.

What somebody writes who finds that a `DataLoader` costs more than a small model.
"""

import torch
import torch.distributed as dist
from gate import Gate
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import SEED, task

told = task()
model: nn.Module = told.workload.make_model()
rank = 0
if told.num_processes > 1:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(model)
optimizer = told.workload.make_optimizer(model.parameters())
generator = torch.Generator().manual_seed(SEED)
gate = Gate(told.gate, told.warm_up)
while True:
    order = torch.randperm(len(told.inputs), generator=generator)
    for ids in order[rank :: told.num_processes].split(told.local_batch_size):
        optimizer.zero_grad()
        loss = told.workload.loss_of(model, (told.inputs[ids], told.targets[ids]))
        loss.backward()
        optimizer.step()
        gate.step()
