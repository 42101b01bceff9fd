"""Programs whose state is spread over the ranks, saved, taken up and compared."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from samestep.comm.mesh import close_mesh
from samestep.engine.strategies import Replicate, Sharded
from samestep.train.checkpoint.state import capture
from samestep.train.digest import as_hex, state_checksum, state_digest
from samestep.train.metrics import accuracy, cross_entropy
from samestep.train.run import Run
from samestep.train.trainer import Trainer

NUM_SAMPLES, BATCH, NUM_MICROBATCHES, EPOCHS, SEED = 28, 10, 4, 3, 5  # epochs of 3 steps, the last one of 8 samples
NUM_STEPS = 9


class Odd(nn.Module):
    """Wide and narrow layers, frozen ones, fewer rows than ranks, statistics, and a buffer that is not persistent."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(2, 6).requires_grad_(False)
        self.wide = nn.Linear(6, 1501)  # 36 KB, which no number of rows of the checksum fills
        self.norm = nn.BatchNorm1d(1501)
        self.last = nn.Linear(1501, 3)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls.add_(1)
        return self.last(functional.dropout(self.norm(self.wide(self.frozen(x))), 0.2, self.training)) * self.gain


STRATEGIES = {
    "replicate": Replicate(),
    "sharded": Sharded(),
    "kept": Sharded(reshard_after_forward=False),
    "owned": Replicate(shard_optimizer=True),
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


def points():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(NUM_SAMPLES, 2, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def classification(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def with_mesh_closed(program):
    """Gives back the process group that a mesh stands on: a pool's process has other programs to run."""

    def run(*args, **options):
        try:
            return program(*args, **options)
        finally:
            close_mesh()

    run.__module__, run.__qualname__ = program.__module__, program.__qualname__
    return run


@with_mesh_closed
def train(communicator, strategy, optimizer="adam", run_dir=None, resume=None, stop_after=None, options=None):
    """Trains by a `Trainer`.

    Returns:
        The digest, the losses of the epochs, the number of steps.
    """
    run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
    model = Odd()
    made = OPTIMIZERS[optimizer](model)
    chosen = {"checkpoint_steps": 2, "checkpoint_minutes": None, "keep": 100, "digest_every": 1, **(options or {})}
    with Trainer(run, model, made, classification, run_dir=run_dir, strategy=STRATEGIES[strategy], **chosen) as trainer:
        if stop_after is not None:
            ask_to_stop_after(trainer, stop_after)
        trainer.fit(points(), EPOCHS, resume=resume)
        losses = [record.train_loss.hex() for record in trainer.history]
        return trainer.digest, losses, trainer.step.num_steps


def ask_to_stop_after(trainer, step):
    """Has rank 0 asked to stop in the course of a step."""
    loss_fn = trainer.step.compute.loss_fn

    def asking(model, batch, *more):
        if trainer.step.num_steps + 1 == step and trainer.run.rank == 0:
            trainer.run.membership.ask_to_stop(15)
        return loss_fn(model, batch, *more)

    trainer.step.compute.loss_fn = asking


@with_mesh_closed
def stopped(communicator, strategy, run_dir, stop_after):
    """The exit code of a run that is asked to stop."""
    try:
        train(communicator, strategy, run_dir=run_dir, stop_after=stop_after)
    except SystemExit as error:
        return error.code
    return 0


@with_mesh_closed
def states(communicator, strategy, optimizer="adam", num_steps=2):
    """The digest and the checksum after each step, by the step itself, and what of the state this rank has.

    Returns:
        Digests, checksums, and the numbers of elements in the files of its captured state.
    """
    run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
    model = Odd()
    step = run.train_step(model, OPTIMIZERS[optimizer](model), classification, strategy=STRATEGIES[strategy])
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


@with_mesh_closed
def own_loop(communicator, strategy, folder, place=None, until=None):
    """A loop of one's own that saves after each step.

    Returns:
        The digest and the rest.
    """
    run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
    model = Odd()
    step = run.train_step(model, OPTIMIZERS["two, in groups"](model), classification, strategy=STRATEGIES[strategy])
    loader = run.loader(points(), shuffle=True)
    rest = {"best": float("inf")} if place is None else run.load_checkpoint(place, step, loader)
    while loader.cursor.epoch < 2:
        for batch in loader:
            rest["best"] = min(rest["best"], step(batch).loss)
            run.save_checkpoint(folder, step, loader, rest, keep=100)
            if step.num_steps == until:
                return None
    return state_digest(step), rest


@with_mesh_closed
def messages(communicator, strategy):
    """What is said where the digest of a model is asked for that is spread."""
    run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
    model = Odd()
    optimizer = OPTIMIZERS["adam"](model)
    run.train_step(model, optimizer, classification, strategy=STRATEGIES[strategy])
    try:
        return state_digest(model, optimizer)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def read_by_torch(path: Path, names):
    """What torch's own reader of distributed checkpoints makes of one of ours."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(path))
    sizes = reader.read_metadata().state_dict_metadata
    wanted = {name: torch.empty(sizes[name].size, dtype=sizes[name].properties.dtype) for name in names}
    dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    return wanted


@with_mesh_closed
def loaded_after_a_forward(communicator, strategy, folder):
    """The loss of a step after a checkpoint was loaded into a model whose parameters were together just then."""
    run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
    model = Odd()
    step = run.train_step(model, OPTIMIZERS["adam"](model), classification, strategy=STRATEGIES[strategy])
    loader = run.loader(points(), shuffle=True)
    batches = iter(loader)
    step(next(batches))
    run.save_checkpoint(folder, step, loader)
    step(next(batches))
    run.evaluate(model, points(), {"accuracy": accuracy})
    run.load_checkpoint(folder, step, loader)
    return run.evaluate(model, points(), {"loss": cross_entropy}), state_digest(step)
