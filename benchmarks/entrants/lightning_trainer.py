"""Lightning: a `LightningModule` and a `Trainer`, as "Lightning in 15 minutes" shows; strategy "ddp" for two processes.

`barebones=True` is its switch for measuring speed: no logger, checkpoints, progress bar or summary.
"""

import lightning
from gate import Gate
from torch.utils.data import DataLoader
from workloads import Task, task


class Module(lightning.LightningModule):
    """The workload's model and optimizer."""

    def __init__(self, told: Task) -> None:
        super().__init__()
        self.workload = told.workload
        self.model = told.workload.make_model()

    def training_step(self, batch, batch_idx):
        """The loss of a batch."""
        inputs, targets = batch
        return self.workload.loss(self.model(inputs), targets)

    def configure_optimizers(self):
        """The workload's own."""
        return self.workload.make_optimizer(self.parameters())


class AtTheGate(lightning.Callback):
    """Passes the gate after each step."""

    def __init__(self, told: Task) -> None:
        self.told = told

    def on_train_start(self, trainer, pl_module):
        """Opens the gate in the process that trains."""
        self.gate = Gate(self.told.gate, self.told.warm_up)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """A step is finished."""
        self.gate.step()


def main() -> None:
    """Trains without end."""
    told = task()
    loader = DataLoader(told.dataset, batch_size=told.local_batch_size, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=told.num_processes,
        strategy="ddp" if told.num_processes > 1 else "auto",
        max_epochs=-1,
        barebones=True,
        callbacks=[AtTheGate(told)],
    )
    assert trainer.world_size == told.num_processes
    trainer.fit(Module(told), loader)


if __name__ == "__main__":
    main()
