"""The raw loop over data that lies in one tensor: a batch is one indexed read. With several processes under DDP.

For those to whom a `DataLoader` costs more than a small model. In micro-batches it accumulates gradients as PyTorch's
documentation of `no_sync` shows.
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from gate import Gate
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import SEED, task


def options(parser: argparse.ArgumentParser) -> None:
    """The number of parts of the global batch that have a forward and a backward each."""
    parser.add_argument("--micro-batches", type=int, default=0)


told = task(options)
count = max(1, told.options.micro_batches // told.num_processes)
model: nn.Module = told.workload.make_model()
rank = 0
if told.num_processes > 1:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(model)
optimizer = told.workload.make_optimizer(model.parameters())
generator = torch.Generator().manual_seed(SEED)
gate = Gate(told.gate, told.warm_up)


def backward(ids: torch.Tensor) -> None:
    """Adds the gradient of some samples, as their share of this process's batch."""
    loss = told.workload.loss_of(model, (told.inputs[ids], told.targets[ids]))
    (loss if count == 1 else loss / count).backward()


while True:
    order = torch.randperm(len(told.inputs), generator=generator)
    for batch in order[rank :: told.num_processes].split(told.local_batch_size):
        optimizer.zero_grad()
        *others, last = batch.chunk(count)
        with model.no_sync() if told.num_processes > 1 else contextlib.nullcontext():
            for ids in others:
                backward(ids)
        backward(last)
        optimizer.step()
        gate.step()
