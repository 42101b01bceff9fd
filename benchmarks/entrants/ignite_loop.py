"""Ignite: `create_supervised_trainer` under `idist.Parallel`, with `auto_model`, `auto_optim` and `auto_dataloader`.

As its documentation of `ignite.distributed` shows. The trainer returns the loss as a number each step, its default.
"""

import ignite.distributed as idist
from gate import Gate
from ignite.engine import Events, create_supervised_trainer
from workloads import Task, task

MANY_EPOCHS = 1_000_000_000


def training(local_rank: int, told: Task) -> None:
    """Trains without end."""
    assert idist.get_world_size() == told.num_processes
    loader = idist.auto_dataloader(told.dataset, batch_size=told.workload.global_batch_size, shuffle=True)
    model = idist.auto_model(told.workload.make_model())
    optimizer = idist.auto_optim(told.workload.make_optimizer(model.parameters()))
    trainer = create_supervised_trainer(model, optimizer, told.workload.loss, device=idist.device())
    gate = Gate(told.gate, told.warm_up)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: gate.step())
    trainer.run(loader, max_epochs=MANY_EPOCHS)


def main() -> None:
    """Starts the processes by torchrun's variables, or none."""
    told = task()
    with idist.Parallel(backend="gloo" if told.num_processes > 1 else None) as parallel:
        parallel.run(training, told)


if __name__ == "__main__":
    main()
