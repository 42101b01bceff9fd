"""The limit: one cached batch, forward, loss, backward, update, and nothing else.

With two processes each computes its half of the batch and talks to nobody: the limit without communication. In
micro-batches it is what so many microbatches cost whoever computes them: kernels do less for their start the less they
are given.
"""

import argparse

from gate import Gate
from workloads import task


def options(parser: argparse.ArgumentParser) -> None:
    """Into how many micro-batches the global batch is cut."""
    parser.add_argument("--micro-batches", type=int, default=0)


told = task(options)
count = max(1, told.options.micro_batches // told.num_processes)
size = told.local_batch_size // count
cuts = [slice(k * size, (k + 1) * size) for k in range(count)]
batches = [(told.inputs[cut].clone(), told.targets[cut].clone()) for cut in cuts]
model = told.workload.make_model()
optimizer = told.workload.make_optimizer(model.parameters())
gate = Gate(told.gate, told.warm_up)
while True:
    for batch in batches:
        loss = told.workload.loss_of(model, batch)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    gate.step()
