"""Programs whose state is sharded over the ranks, saved, resumed and compared."""

from collections import OrderedDict
from pathlib import Path

import torch
from resume_programs import BATCH, NUM_MICROBATCHES, SEED, classification, points
from torch import nn

from samestep.checkpoint.digest import as_hex, state_checksum, state_digest
from samestep.checkpoint.state import capture
from samestep.engine.strategy_options import Sharded
from samestep.metrics import accuracy, cross_entropy
from samestep.run.hooks import EMA
from samestep.run.run import Run
from samestep.run.trainer import Trainer

EPOCHS, NUM_STEPS = 3, 9


class Counted(nn.Linear):
    """A linear layer with a buffer that is not persistent."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls.add_(1)
        return super().forward(x)


class Gain(nn.Module):
    """Multiplies by a parameter of one element."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.gain


def odd():
    """Wide and narrow layers, frozen ones, fewer rows than ranks, statistics, and a buffer that is not persistent."""
    layers = {
        "frozen": Counted(2, 6).requires_grad_(False),
        "wide": nn.Linear(6, 1501),  # 36 KB, which no number of rows of the checksum fills
        "norm": nn.BatchNorm1d(1501),
        "dropout": nn.Dropout(0.2),
        "last": nn.Linear(1501, 3),
        "gain": Gain(),
    }
    return nn.Sequential(OrderedDict(layers))


STRATEGIES = {
    "replicate": "replicate",
    "sharded": Sharded(),
    "kept": Sharded(reshard_after_forward=False),
    "zero1": "zero1",
}
OPTIMIZERS = {
    "adam": lambda model: torch.optim.Adam(trained(model), lr=0.01),
    "sgd": lambda model: torch.optim.SGD(trained(model), lr=0.02),
    "two, in groups": lambda model: [
        torch.optim.SGD(
            [{"params": trained(model)[:2], "lr": 0.02}, {"params": trained(model)[2:3]}], lr=0.01, momentum=0.9
        ),
        torch.optim.AdamW(trained(model)[3:], lr=0.01, amsgrad=True),
    ],
}


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_step(communicator, strategy, optimizer="adam"):
    """A run, its model, and the step over it."""
    run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
    model = odd()
    made = OPTIMIZERS[optimizer](model)
    return run, model, run.train_step(model, made, classification, strategy=STRATEGIES[strategy])


def train(communicator, strategy, optimizer="adam", run_dir=None, resume=None, options=None):
    """Trains by a `Trainer`; the digest, the losses of the epochs, the number of steps."""
    run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
    model = odd()
    made = OPTIMIZERS[optimizer](model)
    chosen = {"checkpoint_steps": 2, "checkpoint_minutes": None, "keep": 100, "digest_every": 1, **(options or {})}
    with Trainer(run, model, made, classification, run_dir=run_dir, strategy=STRATEGIES[strategy], **chosen) as trainer:
        trainer.fit(points(), EPOCHS, resume=resume)
        losses = [record.train_loss.hex() for record in trainer.history]
        return trainer.digest, losses, trainer.step.num_steps


def states(communicator, strategy, optimizer="adam", num_steps=2):
    """Digests and checksums after each step, and the numbers of elements in the files of this rank's captured state."""
    run, _, step = make_step(communicator, strategy, optimizer)
    digests, sums = [state_digest(step)], [as_hex(int(state_checksum(step)))]
    for batch, _ in zip(run.loader(points(), shuffle=True), range(num_steps), strict=False):
        step(batch)
        digests.append(state_digest(step))
        sums.append(as_hex(int(state_checksum(step))))
    files = capture(step, {}).files
    held = {
        name: sum(getattr(value, "local", value).numel() for value in tensors.values())
        for name, tensors in files.items()
        if name != "rest"
    }
    return digests, sums, held


def own_loop(communicator, strategy, folder, place=None, until=None):
    """A loop without `Trainer` that saves after each step; the digest and the rest."""
    run, _, step = make_step(communicator, strategy, "two, in groups")
    loader = run.loader(points(), shuffle=True)
    rest = {"best": float("inf")} if place is None else run.load_checkpoint(place, step, loader)
    while loader.cursor.epoch < 2:
        for batch in loader:
            rest["best"] = min(rest["best"], step(batch).loss)
            run.save_checkpoint(folder, step, loader, rest, keep=100)
            if step.num_steps == until:
                return None
    return state_digest(step), rest


def messages(communicator, strategy):
    """The errors of asking each part of a sharded state for itself, without the step."""
    _, model, step = make_step(communicator, strategy)
    said = {}
    for name, ask in {
        "digest": lambda: state_digest(model, step.optimizers),
        "average": lambda: EMA().update(model),
    }.items():
        try:
            ask()
        except ValueError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def read_by_torch(path: Path, names):
    """Tensors of one of our checkpoints, read by torch's own reader of distributed checkpoints."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(path))
    sizes = reader.read_metadata().state_dict_metadata
    wanted = {name: torch.empty(sizes[name].size, dtype=sizes[name].properties.dtype) for name in names}
    dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    return wanted


def loaded_after_a_forward(communicator, strategy, folder):
    """The loss and digest after a checkpoint was loaded into a model whose parameters were unsharded."""
    run, model, step = make_step(communicator, strategy)
    loader = run.loader(points(), shuffle=True)
    batches = iter(loader)
    step(next(batches))
    run.save_checkpoint(folder, step, loader)
    step(next(batches))
    run.evaluate(model, points(), {"accuracy": accuracy})
    run.load_checkpoint(folder, step, loader)
    return run.evaluate(model, points(), {"loss": cross_entropy}), state_digest(step)
