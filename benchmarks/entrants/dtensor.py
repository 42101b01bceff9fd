"""Tensor parallel as PyTorch's tutorial "Large Scale Transformer model training with Tensor Parallel" writes it.

The feed-forward networks are divided two layers at a time; every process takes the whole batch, in one forward.
"""

import torch.distributed as dist
from gate import Gate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, RandomSampler
from workloads import Block, task

told = task()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (told.num_processes,))
model = told.workload.make_model()
for part in model.modules():
    if isinstance(part, Block):
        parallelize_module(part, mesh, {"feed.0": ColwiseParallel(), "feed.2": RowwiseParallel()})
optimizer = told.workload.make_optimizer(model.parameters())
dataset = told.dataset
loader = DataLoader(dataset, batch_size=told.workload.global_batch_size, sampler=RandomSampler(dataset))
gate = Gate(told.gate, told.warm_up)
while True:
    for inputs, targets in loader:
        loss = told.workload.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gate.step()
