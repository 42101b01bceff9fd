"""Programs that are stopped and resumed; each case is something whose state could be lost on the way."""

import math
import random
from functools import partial

import numpy as np
import torch
import train_programs
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset
from train_programs import classification

from samestep.metrics import accuracy, cross_entropy
from samestep.run.hooks import Hook
from samestep.run.run import Run
from samestep.run.trainer import Trainer

METRICS = {"accuracy": accuracy, "loss": cross_entropy}
NUM_SAMPLES, BATCH, NUM_MICROBATCHES, EPOCHS, SEED = 28, 10, 4, 4, 5  # 4 epochs of 3 steps, the last one of 8 samples


def points(num_samples=NUM_SAMPLES):
    """Points on a plane, drawn once and for all."""
    return train_programs.points(num_samples)


def plain(width=8):
    """BatchNorm and dropout, whose statistics and randomness matter."""
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))


class Images(nn.Module):
    """Convolutions in channels_last, over points that are made images."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2))
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        images = x[:, :, None, None].repeat(1, 1, 3, 3).contiguous(memory_format=torch.channels_last)
        return self.layers(images).flatten(1)


class Odd(nn.Module):
    """Tied weights, a frozen layer, a buffer that is not persistent, and one that comes later."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(2, 4).requires_grad_(False)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("late", None)

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.late = torch.full((2,), 0.5) if self.calls > 2 else None
        scale = 1.0 if self.late is None else self.late.sum() * (1 + 0.01 * float(self.calls))
        hidden = torch.tanh(self.second(torch.tanh(self.first(self.frozen(x)))))
        return self.last(hidden) * scale


class Momentum64(torch.optim.Optimizer):
    """Momentum in float64, in a list, whatever the parameters are."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    moments = state.setdefault("moments", [torch.zeros_like(parameter, dtype=torch.float64)])
                    moments[0].mul_(0.9).add_(parameter.grad.double() / 3)
                    parameter.sub_((group["lr"] * moments[0]).to(parameter.dtype))


OPTIMIZERS = {
    "sgd momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.02),
    "adamw fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "float64 momentum": Momentum64,
}
SCHEDULERS = {
    "multi step": lambda o: schedules.MultiStepLR(o, [2, 5, 7], gamma=0.5),
    "chained": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o, 0.5, 3), schedules.ExponentialLR(o, 0.9)]),
}


class Noisy(Dataset):
    """Samples with noise from all global generators."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        x, y = points()[0][index], points()[1][index]
        return x + 0.1 * (torch.rand(()) + float(np.random.rand()) + random.random()), y


class Stream(IterableDataset):
    """The samples one after another, in an order of the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        x, y = points()
        for index in range(NUM_SAMPLES):
            place = (index * 5 + self.epoch) % NUM_SAMPLES
            yield x[place] + 0.1 * torch.rand(()), y[place]


class StatisticsFixed(Hook):
    """Puts the normalisation into evaluation mode in the third epoch."""

    def on_epoch_start(self, trainer, epoch):
        trainer.model[1].train(epoch != 3)


class Ordered(Sampler):
    """Draws the order in a way of its own; its state is a number, a generator, or what `state_dict` says."""

    newest = None

    def __init__(self, way):
        Ordered.newest, self.way = self, way
        self.epoch, self.calls = 0, [0]
        self.draws = {
            "legacy": np.random.RandomState(3),
            "python": random.Random(3),
            "torch": own_generator(),
        }.get(way)
        if way == "state_dict":
            self.state_dict = lambda: {"calls": self.calls[0]}
            self.load_state_dict = lambda state: self.calls.__setitem__(0, state["calls"])

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        order = list(range(NUM_SAMPLES))
        if self.way == "torch":
            return iter(torch.randperm(NUM_SAMPLES, generator=self.draws).tolist())
        (self.draws or random.Random(f"{self.epoch} {self.calls}")).shuffle(order)
        self.calls[0] += 1 if self.way == "state_dict" else 0
        return iter(order)


class SetEpoch(Hook):
    """Tells the sampler the number of the epoch."""

    def on_epoch_start(self, trainer, epoch):
        Ordered.newest.epoch = epoch


def own_generator():
    return torch.Generator().manual_seed(99)


def persistent(num_workers, **options):
    """A loader whose workers live on; samples without noise, which they would draw from where they are."""
    options = {"batch_size": BATCH, "shuffle": True, **options}
    return DataLoader(TensorDataset(*points()), num_workers=num_workers, persistent_workers=True, **options)


DATA = {
    "tensors": points,
    "noisy": Noisy,
    "user's, shuffled": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True),
    "user's, own generator": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True, generator=own_generator()),
    "user's, own sampler": lambda: DataLoader(
        Noisy(), batch_size=BATCH, sampler=RandomSampler(Noisy(), replacement=True, generator=own_generator())
    ),
    "user's, a stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "user's, drop_last": lambda: DataLoader(TensorDataset(*points()), batch_size=BATCH, drop_last=True, shuffle=True),
    "user's, workers": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=2),
    "user's, persistent workers": lambda: persistent(1),
    **{
        f"user's, sampler by {way}": partial(
            lambda way: DataLoader(Noisy(), batch_size=BATCH, sampler=Ordered(way)), way
        )
        for way in ("legacy", "python", "torch", "state_dict", "hook")
    },
}

# What tests/simulation resumes, too, with optimizers, schedulers, precisions and losses: for other tests alone.
SIMULATED = {"noisy", "user's, shuffled", "user's, own generator", "user's, persistent workers"}
OTHERS = {"plain": {}, **{name: {"data": name} for name in SIMULATED}}
CASES = {
    "float64 momentum": {"optimizer": "float64 momentum"},
    "multi step": {"scheduler": "multi step", "optimizer": "adam"},
    "chained": {"scheduler": "chained"},
    **{name: {"data": name} for name in DATA if name not in ("tensors", *SIMULATED)},
    "channels_last": {"model": Images, "optimizer": "adam"},
    "odd model": {
        "model": Odd,
        "optimizer": lambda model: torch.optim.Adam([p for p in model.parameters() if p.requires_grad]),
    },
    "late check": {"optimizer": "adamw fused", "options": {"late_check": True}},
    "noisy evaluation": {"eval": "noisy"},
    "evaluation by a loader": {"eval": "loader"},
    "evaluation mode in parts": {"trainer": {"hooks": [StatisticsFixed()]}},
    "user's, sampler by hook": {"data": "user's, sampler by hook", "trainer": {"hooks": [SetEpoch()]}},
    "own loader": {"data": "loader"},
    "own loader, drop_last": {"data": "loader, drop_last"},
}


def make_data(run, kind):
    """The data of a case, made anew."""
    if kind.startswith("loader"):
        return run.loader(Noisy(), shuffle=True, drop_last=kind.endswith("drop_last"))
    return DATA[kind]()


def make_optimizers(model, kind):
    if callable(kind):
        return kind(model)
    return OPTIMIZERS[kind](model.parameters())


def train(
    communicator, name="plain", run_dir=None, resume=None, *, calls=(EPOCHS,), draws=False, num_workers=0, **more
):
    """Trains a case, by one or several calls of `fit` with draws of the script between them.

    Returns:
        The digest, the history without its times, scheduler and loss scale, and what the script drew.
    """
    case = {**(CASES | OTHERS)[name], **more}
    run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
    model = case.get("model", plain)()
    optimizer = make_optimizers(model, case.get("optimizer", "sgd momentum"))
    scheduler = SCHEDULERS[case["scheduler"]](optimizer) if "scheduler" in case else None
    data = make_data(run, case.get("data", "tensors"))
    options = {"checkpoint_steps": 1, "checkpoint_minutes": None, "keep": 1000, "digest_every": 1}
    options |= {**case.get("options", {}), **case.get("trainer", {})}
    evaluated = {"noisy": Noisy, "loader": lambda: run.loader(Noisy(), shuffle=True)}.get(case.get("eval"), points)()
    drawn = []
    with Trainer(
        run, model, optimizer, case.get("loss", classification), run_dir=run_dir, scheduler=scheduler, **options
    ) as trainer:
        for number in calls:
            trainer.fit(
                data,
                number,
                eval_data=evaluated,
                metrics=METRICS,
                shuffle=case.get("shuffle", True),
                num_workers=num_workers,
                resume=resume,
                **case.get("fit", {}),
            )
            if draws:
                drawn.append((torch.rand(1).item(), float(np.random.randn()), random.random()))
        end = (torch.rand(1).item(), float(np.random.randn()), random.random())
        progress = None if scheduler is None else repr(scheduler.state_dict()["_last_lr"])
        return trainer.digest, shown(trainer.history), progress, trainer.step.state_dict(), drawn, end


def shown(history):
    """Records without times; NaN equal to itself."""
    return [(r.epoch, _hex(r.train_loss), {k: _hex(v) for k, v in r.eval.items()}) for r in history]


def _hex(value):
    return "nan" if math.isnan(value) else value.hex()


def gan_loop(communicator, folder, first=0, last=None, place=None, saves=True):
    """A loop of one's own with two steps over one model, a loader, draws, and what the user keeps.

    Returns:
        Digest, sample ids of the last epoch, rest, draws.
    """
    from samestep.checkpoint.digest import state_digest

    run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
    gan = nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))})
    critic, generator = (
        torch.optim.Adam(gan["critic"].parameters(), 0.01),
        torch.optim.Adam(gan["generator"].parameters(), 0.01),
    )
    schedule = schedules.StepLR(critic, 3)

    def critic_loss(gan, batch):
        fake = gan["generator"](torch.randn(len(batch[0]), 2, device=batch[0].device)).detach()
        return (gan["critic"](fake) - gan["critic"](batch[0])).mean()

    def generator_loss(gan, batch):
        return -gan["critic"](gan["generator"](torch.randn(len(batch[0]), 2, device=batch[0].device))).mean()

    steps = [
        run.train_step(gan, critic, critic_loss, scheduler=schedule),
        run.train_step(gan, generator, generator_loss),
    ]
    loader = run.loader(Noisy(), shuffle=True)
    rest = {"best": 0.0, "average": torch.zeros(2), "seen": []}
    if place is not None:
        rest = run.load_checkpoint(place, steps, loader)
    paths = []
    while loader.cursor.epoch < 3:
        for batch in loader:
            results = [step(batch) for step in steps]
            rest["best"] = max(rest["best"], results[0].loss)
            rest["average"] = 0.9 * rest["average"] + 0.1 * (torch.rand(2) + float(np.random.rand()))
            rest["seen"] += batch.ids().tolist()
            if saves:
                paths.append(run.save_checkpoint(folder, steps, loader, rest, keep=100))
    rest["average"] = rest["average"].tolist()
    return state_digest(gan, [critic, generator]), schedule.last_epoch, rest, [str(path) for path in paths]
