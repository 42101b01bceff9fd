"""Transformers' `Trainer` on a model of one's own that returns its loss; two processes by torchrun.

Logging, saving, reports, the progress bar and the check of logged losses are off by their switches; no clipping and a
constant learning rate, as for the others; no search for unused parameters under DDP.
"""

import tempfile

from gate import Gate
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from workloads import Task, task

MANY_STEPS = 1_000_000_000


class WithLoss(nn.Module):
    """The workload's model, called and answering as the trainer wants it."""

    def __init__(self, told: Task) -> None:
        super().__init__()
        self.workload = told.workload
        self.model = told.workload.make_model()

    def forward(self, inputs, labels):
        """The loss and the outputs."""
        outputs = self.model(inputs)
        return {"loss": self.workload.loss(outputs, labels), "logits": outputs}


class Samples(Dataset):
    """The samples as dicts."""

    def __init__(self, told: Task) -> None:
        self.inputs, self.targets = told.inputs, told.targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": self.targets[index]}


class AtTheGate(TrainerCallback):
    """Passes the gate after each step."""

    def __init__(self, told: Task) -> None:
        self.gate = Gate(told.gate, told.warm_up)

    def on_step_end(self, args, state, control, **kwargs):
        """A step is finished."""
        self.gate.step()


def main() -> None:
    """Trains without end."""
    told = task()
    model = WithLoss(told)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=told.local_batch_size,
            max_steps=MANY_STEPS,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            remove_unused_columns=False,
            logging_strategy="no",
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
        )
        assert arguments.world_size == told.num_processes
        optimizer = told.workload.make_optimizer(model.parameters())
        trainer = Trainer(
            model, arguments, train_dataset=Samples(told), optimizers=(optimizer, None), callbacks=[AtTheGate(told)]
        )
        trainer.train()


if __name__ == "__main__":
    main()
