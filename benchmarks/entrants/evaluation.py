"""How many samples are scored when a test set is evaluated, by each tool's own documented way.

Every process leaves the number of those that it scored in `record-PID.json` in its working folder. The imports are in
the functions: a process needs those of one tool.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gate import Gate
from torch import Tensor, nn
from torch.utils.data import DataLoader
from workloads import Task, task


def with_ddp(told: Task) -> int:
    """A `DistributedSampler` that does not shuffle, as its documentation has it for many processes."""
    import torch.distributed as dist
    from torch.utils.data.distributed import DistributedSampler

    sampler: DistributedSampler[object] | None = None
    if told.num_processes > 1:
        dist.init_process_group("gloo")
        sampler = DistributedSampler(told.dataset, shuffle=False)
    model = told.workload.make_model()
    loader = DataLoader(told.dataset, batch_size=told.local_batch_size, sampler=sampler)
    return _score(model, loader)


def with_accelerate(told: Task) -> int:
    """`prepare` and `gather_for_metrics`; the first process scores what was gathered."""
    from accelerate import Accelerator  # type: ignore[import-untyped]  # it ships no types

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(told.dataset, batch_size=told.local_batch_size)
    model, loader = accelerator.prepare(told.workload.make_model(), loader)
    scored = 0
    for inputs, targets in loader:
        with torch.no_grad():
            outputs, targets = accelerator.gather_for_metrics((model(inputs), targets))
        scored += len(outputs) if accelerator.is_main_process else 0
    return scored


def with_lightning(told: Task) -> int:
    """`Trainer.validate` on a module with a `validation_step`."""
    import lightning

    class Module(lightning.LightningModule):
        """Counts what it is given."""

        def __init__(self) -> None:
            super().__init__()
            self.model = told.workload.make_model()
            self.scored = 0

        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            """One batch of this process."""
            self.scored += len(self.model(batch[0]))

    module = Module()
    loader = DataLoader(told.dataset, batch_size=told.local_batch_size)
    strategy = "ddp" if told.num_processes > 1 else "auto"
    trainer = lightning.Trainer(accelerator="cpu", devices=told.num_processes, strategy=strategy, barebones=True)
    trainer.validate(module, loader, verbose=False)
    return module.scored


def with_fabric(told: Task) -> int:
    """`setup` and `setup_dataloaders`."""
    from lightning.fabric import Fabric

    strategy = "ddp" if told.num_processes > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=told.num_processes, strategy=strategy)
    fabric.launch()
    loader = DataLoader(told.dataset, batch_size=told.local_batch_size)
    return _score(fabric.setup(told.workload.make_model()), fabric.setup_dataloaders(loader))


def with_samestep(told: Task) -> int:
    """`run.evaluate` with a metric of one's own, which sees each microbatch."""
    import samestep

    run = samestep.Run(told.workload.global_batch_size)
    scored = 0

    def seen(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal scored
        scored += len(outputs)
        return outputs.argmax(1) == batch[1]

    run.evaluate(told.workload.make_model(), (told.inputs, told.targets), {"accuracy": seen})
    return scored


TOOLS: dict[str, Callable[[Task], int]] = {
    "plain": with_ddp,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "fabric": with_fabric,
    "samestep": with_samestep,
}


def options(parser: argparse.ArgumentParser) -> None:
    """Which tool."""
    parser.add_argument("--tool", choices=TOOLS, required=True)


@torch.no_grad()
def _score(model: nn.Module, loader: Any) -> int:
    """How many samples of a loader go through a model."""
    return sum(len(model(inputs)) for inputs, _ in loader)


def main() -> None:
    """Scores the test set once, and waits at the gate for the end."""
    torch.set_num_threads(1)
    told = task(options)
    scored = TOOLS[told.options.tool](told)
    Path(f"record-{os.getpid()}.json").write_text(json.dumps(scored), encoding="ascii")
    Gate(told.gate, warm_up=1).step()


if __name__ == "__main__":
    main()
