"""samestep: the loop of its README. The ledger, checkpoints and logs are the trainer's; this loop has none."""

import argparse
import os
import sys

from samestep.devices.portable import portable_variables

if "--portable" in sys.argv:  # before NumPy is imported
    os.environ.update(portable_variables("cpu", True))

from gate import Gate
from workloads import task

import samestep


def options(parser: argparse.ArgumentParser) -> None:
    """What a run may be told."""
    parser.add_argument("--num-microbatches", type=int)
    parser.add_argument("--strategy", default="replicate")
    parser.add_argument("--portable", action="store_true", help="kernels that are alike on all CPUs")
    parser.add_argument("--map-style", action="store_true", help="read a dataset sample by sample, instead of tensors")


told = task(options)
run = samestep.Run(
    told.workload.global_batch_size,
    told.options.num_microbatches,
    num_threads=told.options.num_threads,
)
assert run.world_size == told.num_processes
model = told.workload.make_model()
optimizer = told.workload.make_optimizer(model.parameters())
step = run.train_step(
    model,
    optimizer,
    told.workload.loss_of,
    strategy=told.options.strategy,
)
loader = run.loader(told.dataset if told.options.map_style else (told.inputs, told.targets), shuffle=True)
gate = Gate(told.gate, told.warm_up)
while True:
    for batch in loader:
        result = step(batch)
        gate.step()
