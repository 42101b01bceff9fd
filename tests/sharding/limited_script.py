"""Trains a model of 48 MiB under a limit of memory: `limited_script.py STRATEGY MIB` (0: no limit).

Prints the last loss and gradient norm, and the private bytes that it took.
"""

import re
import resource
import sys
from pathlib import Path

import torch
import torch.distributed.fsdp  # what it takes to load these is not what is measured
import torch.optim.adamw
from torch import nn
from torch.nn import functional

import samestep

WIDTH = 1024


def data_bytes():
    """The private memory that this process has asked for."""
    return 1024 * int(re.search(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def loss(model, batch):
    """A mean over the microbatch."""
    peak.append(data_bytes())
    return functional.mse_loss(model(batch), batch)


strategy, limit = sys.argv[1], int(sys.argv[2])
run = samestep.Run(global_batch_size=16, num_microbatches=8, seed=1)
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (limit << 20), resource.RLIM_INFINITY))
begin, peak = data_bytes(), []
model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(12)))
options = {"strategy": "zero1"} if strategy == "zero1" else {"strategy": strategy}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
step = run.train_step(model, optimizer, loss, **options)
if strategy in ("replicate", "zero1"):  # at the end of a backward, before its gradient is summed
    model[0][0].weight.register_post_accumulate_grad_hook(lambda _: peak.append(data_bytes()))
for _ in range(3):
    result = step(torch.randn(16, WIDTH))
    peak.append(data_bytes())
run.print("norms", result.loss.hex(), result.grad_norm.hex())
run.print("bytes", max(peak) - begin)
