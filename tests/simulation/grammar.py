"""The grammar of programs: from choices to the text of a script of the public interface."""

import textwrap
from dataclasses import dataclass, fields, replace
from pathlib import Path

from hypothesis import strategies as st

HEAD = Path(__file__).with_name("simulated_ranks.py")
WIDTH, CLASSES = 6, 3

# Blocks [n, 6] -> [n, 6], of which a model is a row: an expression, and the class that it needs.
SIMPLE_BLOCKS = {
    "linear": "nn.Linear(6, 6)",
    "tanh": "nn.Tanh()",
    "relu": "nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))",
    "dropout": "nn.Dropout(0.3)",
    "batch norm": "nn.BatchNorm1d(6)",
    "cumulative": "nn.BatchNorm1d(6, momentum=None)",
    "layer norm": "nn.LayerNorm(6)",
    "group norm": "nn.GroupNorm(2, 6)",
    "convolution": (
        "nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3, padding=1), nn.Tanh(), "
        "nn.Conv1d(3, 1, 1), nn.Flatten())"
    ),
    "frozen": "nn.Linear(6, 6).requires_grad_(False)",
    "weight norm": "parametrizations.weight_norm(nn.Linear(6, 6))",
    "spectral norm": "parametrizations.spectral_norm(nn.Linear(6, 6))",
    "orthogonal": "parametrizations.orthogonal(nn.Linear(6, 6))",
}
CLASS_BLOCKS = {
    "embedding": """
        class Embedded(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(8, 6)

            def forward(self, x):
                return x + self.table((2 * x).long().clamp(0, 7)).mean(1)
    """,
    "recurrent": """
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.cells = nn.LSTM(2, 2, batch_first=True)

            def forward(self, x):
                return self.cells(x.unflatten(1, (3, 2)))[0].flatten(1)
    """,
    "attention": """
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.heads = nn.MultiheadAttention(2, 1, dropout=0.1, batch_first=True)

            def forward(self, x):
                x = x.unflatten(1, (3, 2))
                return (x + self.heads(x, x, x, need_weights=False)[0]).flatten(1)
    """,
    "tied": """
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
                self.second.weight = self.first.weight

            def forward(self, x):
                return self.second(torch.tanh(self.first(x)))
    """,
    "twice": """
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = self.same = nn.Linear(6, 6)

            def forward(self, x):
                return self.same(torch.tanh(self.part(x)))
    """,
    "recomputed": """
        class Recomputed(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

            def forward(self, x):
                return checkpoint(self.part, x, use_reentrant=REENTRANT)
    """,
    "counting": """
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
                self.register_buffer("scale", torch.ones(6), persistent=False)

            def forward(self, x):
                if self.training:
                    self.calls += 1
                    self.scale = self.scale * 0.99
                return x * self.scale * (1 + 0.01 * self.calls)
    """,
    "double": """
        class Double(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = nn.Linear(6, 6, dtype=torch.float64)

            def forward(self, x):
                return x + self.part(x.double()).float()
    """,
    "bfloat16": """
        class Brain(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = nn.Linear(6, 6, dtype=torch.bfloat16)

            def forward(self, x):
                return x + self.part(x.bfloat16()).float()
    """,
    "complex": """
        class Complex(nn.Module):
            def __init__(self):
                super().__init__()
                self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))

            def forward(self, x):
                return (x * self.turn).real + (x * self.turn).imag
    """,
    "sometimes": """
        class Sometimes(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

            def forward(self, x):
                return x + (self.one if x.detach().sum() > 0 else self.other)(x)
    """,
}
BLOCKS = [*SIMPLE_BLOCKS, *CLASS_BLOCKS]
NORMALISED = {"batch norm", "cumulative"}  # a microbatch has two samples or none
DRAWING = {"dropout", "attention"}

DATASETS = {
    "tensors": "",
    "samples": """
        class Samples(Dataset):
            def __len__(self):
                return NUM_SAMPLES

            def __getitem__(self, index):
                return X[index], Y[index]
    """,
    "noisy": """
        class Noisy(Dataset):
            def __len__(self):
                return NUM_SAMPLES

            def __getitem__(self, index):
                x = X[index] + 0.1 * torch.rand(()) + 0.1 * float(np.random.rand()) + 0.1 * random.random()
                return x, Y[index]
    """,
    "forked": """
        class Forked(Dataset):
            def __len__(self):
                return NUM_SAMPLES

            def __getitem__(self, index):
                with torch.random.fork_rng():
                    return X[index] + 0.1 * torch.rand(6), Y[index]
    """,
    "rarely": """
        class Rarely(Dataset):
            def __len__(self):
                return NUM_SAMPLES

            def __getitem__(self, index):
                return X[index] + (0.1 * random.random() if index % 5 == 4 else 0), Y[index]
    """,
    "iterable": """
        class Stream(IterableDataset):
            epoch = 0

            def set_epoch(self, epoch):
                self.epoch = epoch

            def __iter__(self):
                for index in range(NUM_SAMPLES):
                    place = (index + self.epoch) % NUM_SAMPLES
                    yield X[place] + 0.1 * torch.rand(()), Y[place]
    """,
    "streams": """
        def stream(index, count):
            for place in range(index, NUM_SAMPLES, count):
                yield X[place] + 0.1 * random.random(), Y[place]
    """,
    "sampler": """
        class Shuffled(Sampler):
            def __init__(self):
                self.draws, self.calls = np.random.default_rng(3), 0

            def __len__(self):
                return NUM_SAMPLES

            def __iter__(self):
                self.calls += 1
                return iter((self.draws.permutation(NUM_SAMPLES) + self.calls).__mod__(NUM_SAMPLES).tolist())
    """,
}
DATA = {  # what gives the samples: the dataset that it needs, and an expression
    "tensors": ("tensors", "(X, Y)"),
    "dict": ("tensors", '{"x": X, "y": Y}'),
    "tensor dataset": ("tensors", "TensorDataset(X, Y)"),
    "subset": ("tensors", "Subset(TensorDataset(X, Y), range(NUM_SAMPLES - 1, -1, -1))"),
    "samples": ("samples", "Samples()"),
    "noisy": ("noisy", "Noisy()"),
    "forked": ("forked", "Forked()"),
    "rarely": ("rarely", "Rarely()"),
    "noisy subset": ("noisy", "Subset(Noisy(), range(NUM_SAMPLES))"),
    "iterable": ("iterable", "Stream()"),
    "streams": ("streams", "run.loader(streams=stream)"),
    "own loader": ("noisy", "DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=num_workers)"),
    "own generator": (
        "samples",
        "DataLoader(Samples(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(9))",
    ),
    "own drop last": ("samples", "DataLoader(Samples(), batch_size=BATCH, shuffle=True, drop_last=True)"),
    "own sampler": ("sampler", "DataLoader(TensorDataset(X, Y), batch_size=BATCH, sampler=Shuffled())"),
    "own persistent": (
        "tensors",
        "DataLoader(TensorDataset(X, Y), batch_size=BATCH, shuffle=True, num_workers=num_workers, "
        "persistent_workers=num_workers > 0)",
    ),
}
OF_LOADERS = {"streams", *(name for name in DATA if name.startswith("own "))}  # not for `run.loader(…)`
NUMBERED = {"tensors", "dict", "tensor dataset", "samples"}  # an id is a row, so that a plain loop can read them

LOSSES = {  # the function, and whether a plain loop has it
    "mean": "return functional.cross_entropy(model(x), y)",
    "per sample": 'return functional.cross_entropy(model(x), y, reduction="none")',
    "weighted": """
        total = functional.cross_entropy(model(x)[y > 0], y[y > 0], reduction="sum")
        return samestep.Mean(total, (y > 0).sum())
    """,
    "scalars": """
        losses = functional.cross_entropy(model(x), y, reduction="none")
        return losses, {"largest": losses.detach().square(), "ones": samestep.Mean((y == 1).sum().float(), len(y))}
    """,
    "counts": 'return functional.cross_entropy(model(x), y, reduction="sum") / counts["all"]',
    "noise": "return functional.cross_entropy(model(x + 0.1 * torch.randn_like(x)) + float(np.random.rand()), y)",
    "sometimes nan": """
        bad = (x[:, 0] == X[2, 0]).any()
        return functional.cross_entropy(model(x), y) * torch.where(bad, float("nan"), 1.0)
    """,
}
OPTIMIZERS = {
    "sgd": "torch.optim.SGD({}, lr=0.1)",
    "momentum": "torch.optim.SGD({}, lr=0.1, momentum=0.9, nesterov=True)",
    "adam": "torch.optim.Adam({}, lr=0.02)",
    "adamw amsgrad": "torch.optim.AdamW({}, lr=0.02, amsgrad=True)",
    "adam fused": "torch.optim.Adam({}, lr=0.02, fused=True)",
    "adam foreach": "torch.optim.Adam({}, lr=0.02, foreach=True)",
    "rmsprop": "torch.optim.RMSprop({}, lr=0.01, centered=True, momentum=0.5)",
    "adagrad": "torch.optim.Adagrad({}, lr=0.05)",
    "adadelta": "torch.optim.Adadelta({}, lr=0.5)",
    "adamax": "torch.optim.Adamax({}, lr=0.02)",
    "nadam": "torch.optim.NAdam({}, lr=0.02)",
    "radam": "torch.optim.RAdam({}, lr=0.02)",
    "asgd": "torch.optim.ASGD({}, lr=0.05)",
    "rprop": "torch.optim.Rprop({}, lr=0.01)",
    "adafactor": "torch.optim.Adafactor({}, lr=0.05)",
}
NOT_ELEMENTWISE = {"nadam", "radam", "adafactor"}
NOT_COMPLEX = {"adamax", "nadam", "rprop", "adafactor", "adam fused", "asgd", "radam"}
SCHEDULERS = {
    "none": "",
    "step": "schedules.StepLR(optimizer, 2, gamma=0.7)",
    "cosine": "schedules.CosineAnnealingLR(optimizer, 5)",
    "one cycle": "schedules.OneCycleLR(optimizer, 0.1, total_steps=40, cycle_momentum=False)",
    "sequential": (
        "schedules.SequentialLR(optimizer, [schedules.LinearLR(optimizer, 0.1, total_iters=3), "
        "schedules.StepLR(optimizer, 2)], [3])"
    ),
    "epochs": "schedules.ExponentialLR(optimizer, 0.5)",
    "plateau": "schedules.ReduceLROnPlateau(optimizer, patience=0)",
}
HOOKS = {
    "epochs": """
        class ByEpoch(samestep.Hook):
            name = "schedule"

            def __init__(self, scheduler):
                self.scheduler = scheduler
                self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict

            def on_epoch_end(self, trainer, record):
                self.scheduler.step()
    """,
    "plateau": """
        class ByLoss(samestep.Hook):
            name = "schedule"

            def __init__(self, scheduler):
                self.scheduler = scheduler
                self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict

            def on_epoch_end(self, trainer, record):
                self.scheduler.step(record.train_loss)
    """,
    "average": "",
    "thawing": """
        class Thawing(samestep.Hook):
            def on_epoch_start(self, trainer, epoch):
                trainer.model[0].requires_grad_(epoch != 2)
    """,
    "drawing": """
        class Drawing(samestep.Hook):
            total = 0.0

            def on_step_end(self, trainer, result):
                self.total = 0.5 * self.total + torch.rand(()).item() + float(np.random.rand()) + random.random()
                with torch.no_grad():
                    next(trainer.model[-1].parameters()).add_(0.001 * self.total)

            def state_dict(self):
                return {"total": self.total}

            def load_state_dict(self, state):
                self.total = state["total"]
    """,
    "stopping": """
        class Stopping(samestep.Hook):
            def __init__(self, rank, step):
                self.at = rank, step

            def on_step_end(self, trainer, result):
                if (trainer.run.membership.rank, result.step) == self.at:
                    trainer.stop()
    """,
    "looking": """
        class Looking(samestep.Hook):
            def on_step_end(self, trainer, result):
                trainer.run.predict(trainer.model, (X, Y))
                repr(trainer), trainer.digest
    """,
}
PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]


@dataclass(frozen=True)
class Program:
    """The choices of a program; the first value of each is the simplest, to which hypothesis shrinks."""

    blocks: tuple[str, ...] = ()
    data: str = "tensors"
    samples: int = 4
    batch: int = 4
    microbatches: int = 1
    epochs: int = 1
    seed: int = 0
    loss: str = "mean"
    optimizer: str = "sgd"
    second: str = ""  # another optimizer, for every other parameter
    groups: bool = False
    scheduler: str = "none"
    clip: bool = False
    precision: str = "32-true"
    loop: str = "trainer"
    zero1: bool = False
    shuffle: bool = False
    hooks: tuple[str, ...] = ()
    calls: bool = False  # of `fit`, an epoch each, with draws between them
    best: bool = False
    patience: bool = False
    evaluated: bool = False
    steps: int = 0  # `max_steps`
    critic: bool = False  # a second step over the model, in a loop of one's own
    shares: tuple[int, ...] = ()
    reentrant: bool = False

    def __repr__(self):
        simplest = Program()
        changed = [f.name for f in fields(self) if getattr(self, f.name) != getattr(simplest, f.name)]
        return f"Program({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    @property
    def plain(self):
        """Whether a plain loop of PyTorch computes the same, but for the rounding of several microbatches."""
        return (
            self.data in NUMBERED
            and self.loss == "mean"
            and not (self.clip or self.zero1 or self.hooks or self.critic or self.best or self.patience or self.calls)
            and self.precision == "32-true"
            and self.scheduler in ("none", "step", "cosine", "one cycle", "sequential")
            and not DRAWING & {*self.blocks}
            and (self.microbatches == 1 or not {*self.blocks} & {*NORMALISED, "sometimes", "counting", "bfloat16"})
            and (self.microbatches == 1 or (self.optimizer in ("sgd", "momentum") and not self.second))
        )


def allowed(p):
    """The nearest program that the documentation allows."""
    changes = {"microbatches": min(p.microbatches, p.batch)}
    if p.loop == "own":
        changes |= {"hooks": (), "calls": False, "best": False, "patience": False, "evaluated": False, "steps": 0}
        if p.data in OF_LOADERS:
            changes["data"] = "noisy"
        if p.scheduler in ("epochs", "plateau"):
            changes["scheduler"] = "step"
    else:
        changes["critic"] = False
    if p.data in ("streams", "iterable") or p.data.startswith("own "):
        changes["shuffle"] = False
    if p.best or p.patience:
        changes["evaluated"] = True
        changes["best"] = True
    if p.critic:
        changes["zero1"] = False
    if p.zero1 or changes.get("zero1"):
        changes["second"] = ""
        if p.optimizer in NOT_ELEMENTWISE:
            changes["optimizer"] = "adam"
        changes["hooks"] = tuple(hook for hook in changes.get("hooks", p.hooks) if hook != "thawing")
    if "complex" in p.blocks:
        if p.optimizer in NOT_COMPLEX:
            changes["optimizer"] = "adam"
        if p.second in NOT_COMPLEX:
            changes["second"] = "sgd"
    if p.second:
        changes |= {"groups": False}
    if p.precision != "32-true" and {"double", "bfloat16", "complex", "orthogonal"} & {*p.blocks}:
        changes["precision"] = "32-true"
    if NORMALISED & {*p.blocks}:
        changes |= even(p, changes["microbatches"])
    p = replace(p, **changes)
    if "thawing" in p.hooks:  # it freezes the first layer, and something must be left to train: the last one
        p = replace(p, hooks=tuple(h for h in p.hooks if h != "drawing"))
    return p


def even(p, microbatches):
    """Sizes by which no microbatch has a single sample."""
    batch = max(p.batch, 2 * microbatches)
    short = p.samples % batch
    samples = p.samples + (2 * microbatches - short if 0 < short < 2 * microbatches else 0)
    if p.data in ("streams", "iterable"):
        samples = batch * max(1, p.samples // batch)
    return {"batch": batch, "samples": samples}


def programs():
    """Draws programs."""
    few = st.booleans
    rare = st.sampled_from([False, False, False, True])
    return st.builds(
        Program,
        blocks=st.lists(st.sampled_from(BLOCKS), max_size=4).map(tuple),
        data=st.sampled_from([*DATA]),
        samples=st.integers(4, 22),
        batch=st.integers(3, 10),
        microbatches=st.integers(1, 6),
        epochs=st.integers(1, 3),
        seed=st.integers(0, 99),
        loss=st.sampled_from([*LOSSES]),
        optimizer=st.sampled_from([*OPTIMIZERS]),
        second=st.sampled_from(["", "", "", "sgd", "adam", "rmsprop"]),
        groups=rare,
        scheduler=st.sampled_from([*SCHEDULERS]),
        clip=rare,
        precision=st.sampled_from(["32-true", "32-true", *PRECISIONS]),
        loop=st.sampled_from(["trainer", "trainer", "own"]),
        zero1=rare,
        shuffle=few(),
        hooks=st.lists(st.sampled_from(["average", "thawing", "drawing"]), max_size=2, unique=True).map(tuple),
        calls=rare,
        best=rare,
        patience=rare,
        evaluated=rare,
        steps=st.sampled_from([0, 0, 0, 1, 3, 5]),
        critic=rare,
        shares=st.lists(st.integers(1, 4), min_size=4, max_size=4).map(tuple) | st.just(()),
        reentrant=rare,
    ).map(allowed)


def text(p):
    """The script of a program: its functions `train` and, if a plain loop can do it, `plain`."""
    blocks = [SIMPLE_BLOCKS.get(name) or _class_name(CLASS_BLOCKS[name]) + "()" for name in p.blocks]
    classes = [CLASS_BLOCKS[name] for name in dict.fromkeys(p.blocks) if name in CLASS_BLOCKS]
    dataset, data = DATA[p.data]
    hooks = [*p.hooks, "looking", "stopping", *([p.scheduler] if p.scheduler in ("epochs", "plateau") else [])]
    if p.loop == "own":
        hooks = []
    is_named = p.data == "dict"
    batch = 'x, y = batch["x"], batch["y"]' if is_named else "x, y = batch"
    arguments = "model, batch, counts" if p.loss == "counts" else "model, batch"
    parts = [
        _imports(),
        f"NUM_SAMPLES, BATCH, MICROBATCHES, EPOCHS, SEED = "
        f"{p.samples}, {p.batch}, {p.microbatches}, {p.epochs}, {p.seed}\n"
        + (f"REENTRANT = {p.reentrant}\n" if "recomputed" in p.blocks else "")
        + (f"SHARES = {list(p.shares)}\n" if p.shares else "")
        + "generator = torch.Generator().manual_seed(7)\n"
        "X = torch.randn(NUM_SAMPLES, 6, generator=generator)\n"
        "Y = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)",
        *map(_dedent, classes),
        _dedent(DATASETS[dataset]),
        "def make_model():\n    return nn.Sequential(\n"
        + "".join(f"        {block},\n" for block in ["nn.Linear(6, 6)", *blocks, "nn.Linear(6, 3)"])
        + "    )",
        _optimizers(p),
        f"def loss_fn({arguments}):\n    {batch}\n" + textwrap.indent(_dedent(LOSSES[p.loss]), "    "),
        *map(_dedent, (HOOKS[name] for name in dict.fromkeys(hooks))),
        _shown(),
        _own_loop(p, data) if p.loop == "own" else _trainer(p, data),
        _plain(p) if p.plain else "",
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def _imports():
    return _dedent("""
        import math

        from torch import nn
        from torch.nn import functional
        from torch.nn.utils import parametrizations
        from torch.optim import lr_scheduler as schedules
        from torch.utils.checkpoint import checkpoint
        from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset

        import samestep
    """)


def _shown():
    return _dedent("""
        def shown(value):
            return "nan" if math.isnan(value) else float(value).hex()


        def draws():
            return [torch.rand(()).item(), float(np.random.rand()), random.random()]


        def rates(optimizer):
            optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
            return [float(group["lr"]) for each in optimizers for group in each.param_groups]


        def weights(model):
            return [number for parameter in model.parameters() for number in parameter.detach().flatten().tolist()]
    """)


def _optimizers(p):
    one = OPTIMIZERS[p.optimizer]
    if p.second:
        body = f"trained = list(model.parameters())\nreturn [{one.format('trained[::2]')}, " + (
            f"{OPTIMIZERS[p.second].format('trained[1::2]')}]"
        )
    elif p.groups:
        grouped = '[{"params": trained[:2], "lr": 0.01}, {"params": trained[2:]}]'
        body = f"trained = list(model.parameters())\nreturn {one.format(grouped)}"
    else:
        body = f"return {one.format('model.parameters()')}"
    return "def make_optimizer(model):\n" + textwrap.indent(body, "    ")


def _run(p):
    shares = ""
    if p.shares:
        shares = ", shares=SHARES[: communicator.world_size] if communicator else None"
    scheduler = SCHEDULERS[p.scheduler]
    if p.second:
        scheduler = scheduler.replace("optimizer", "optimizer[0]")
    lines = [
        f"run = samestep.Run(BATCH, MICROBATCHES, SEED, communicator=communicator{shares})",
        "model = make_model()",
        "optimizer = make_optimizer(model)",
        f"scheduler = {scheduler}" if scheduler else "",
    ]
    return "\n".join(line for line in lines if line)


def _options(p):
    options = ["max_grad_norm=0.3"] if p.clip else []
    options += [f'precision="{p.precision}"'] if p.precision != "32-true" else []
    options += ['on_nonfinite="skip"'] if p.loss == "sometimes nan" else []
    options += ["shard_optimizer=True"] if p.zero1 else []
    options += ["scheduler=scheduler"] if p.scheduler not in ("none", "epochs", "plateau") else []
    options += ['counts_fn=lambda batch: {"all": len(batch["y"])}'] if p.loss == "counts" and p.data == "dict" else []
    options += ['counts_fn=lambda batch: {"all": len(batch[1])}'] if p.loss == "counts" and p.data != "dict" else []
    return "".join(f", {option}" for option in options)


def _trainer(p, data):
    hooks = [*("samestep.EMA(0.9)" if h == "average" else f"{_class_name(HOOKS[h])}()" for h in p.hooks), "losses"]
    if p.scheduler in ("epochs", "plateau"):
        hooks.append(f"{_class_name(HOOKS[p.scheduler])}(scheduler)")
    goal = ', best="loss"' if p.best else ""
    goal += ", patience=1" if p.patience else ""
    forward = ', forward=lambda model, batch: model(batch["x"])' if p.data == "dict" else ""
    measured = '{"x": X, "y": Y}' if p.data == "dict" else "(X, Y)"
    loss = "samestep.metrics.cross_entropy"
    if p.data == "dict":
        loss = 'lambda output, batch: functional.cross_entropy(output, batch["y"], reduction="none")'
    measured = f"{measured}, metrics={{'loss': {loss}}}{forward}".replace("'", '"')
    evaluated = f", eval_data={measured}" if p.evaluated else ""
    steps = f", max_steps={p.steps}" if p.steps else ""
    fit = "trainer.fit(data, {}" + f"{steps}{evaluated}, shuffle={p.shuffle}, resume=resume, **loading)"
    fits = fit.replace("{}", "EPOCHS", 1)
    if p.calls:
        fits = "drawn = []\nfor _ in range(EPOCHS):\n    " + fit.replace("{}", "1", 1) + "\n    drawn = draws()"
    loads = "{}" if p.data in OF_LOADERS else '{"num_workers": num_workers}'
    return _dedent("""
        class Losses(samestep.Hook):
            def __init__(self):
                self.steps = {}

            def on_step_end(self, trainer, result):
                self.steps[str(result.step)] = [shown(result.loss), shown(result.grad_norm), result.num_samples]
    """) + "\n\n\n" + "\n".join(line for line in [
        "def train(communicator=None, folder=None, resume=None, every=1, num_workers=0, looks=False, stops=None):",
        textwrap.indent(_run(p), "    "),
        f"    data, loading, losses = {data}, {loads}, Losses()",
        f"    hooks = [{', '.join(hooks)}, *([Looking()] if looks else []), "
        "*([Stopping(*stops)] if stops else [])]",
        '    writing = {"checkpoint_steps": every, "checkpoint_minutes": None, "checkpoint_retries": 0, "keep": 1000}',
        "    with samestep.Trainer(",
        f"        run, model, optimizer, loss_fn, run_dir=folder, hooks=hooks, digest_every=1{goal}{_options(p)}, "
        "**writing",
        "    ) as trainer:",
        textwrap.indent(fits, " " * 8),
        "        history = [(r.epoch, shown(r.train_loss), {k: shown(v) for k, v in r.eval.items()}) "
        "for r in trainer.history]",
        "        best = trainer.best and trainer.best.epoch" if p.best else "",
        "        if best and folder is not None:" if p.best else "",
        "            with trainer.best_weights():" if p.best else "",
        f"                assert trainer.evaluate({measured}) == trainer.best.eval" if p.best else "",
        "        return {",
        '            "digest": trainer.digest,',
        '            "losses": losses.steps,',
        '            "history": history,',
        '            "rates": rates(optimizer),',
        '            "best": best,' if p.best else "",
        '            "drawn": drawn,' if p.calls else "",
        '            "scale": float(trainer.step.loss_scale),',
        '            "draws": draws(),',
        '            "weights": weights(model),',
        "        }",
    ] if line)  # fmt: skip


def _own_loop(p, data):
    rows = 'batch["x"]' if p.data == "dict" else "batch[0]"
    critic = [
        "    other = torch.optim.SGD(model[0].parameters(), lr=0.01)",
        f"    steps = [step, run.train_step(model, other, lambda model, batch: model({rows}).square().mean())]",
    ]
    return "\n".join(line for line in [
        "def train(communicator=None, folder=None, resume=None, every=1, num_workers=0, looks=False):",
        textwrap.indent(_run(p), "    "),
        f"    step = run.train_step(model, optimizer, loss_fn{_options(p)})",
        *(critic if p.critic else ["    steps = [step]"]),
        f"    loader = run.loader({data}, shuffle={p.shuffle}, num_workers=num_workers)",
        '    rest = {"losses": {}}',
        "    if resume is not None:",
        "        rest = run.load_checkpoint(resume, steps, loader)",
        "    while loader.cursor.epoch < EPOCHS:",
        "        for batch in loader:",
        "            for each in steps:",
        "                result = each(batch)",
        '                rest["losses"][str(result.step)] = [shown(result.loss), shown(result.grad_norm), '
        "result.num_samples]",
        "            if folder is not None and step.num_steps % every == 0:",
        '                run.save_checkpoint(f"{folder}/checkpoints", steps, loader, rest, keep=1000)',
        "            if looks:",
        f"                run.predict(model, loader, forward=lambda model, batch: model({rows}))",
        '    return {"digest": samestep.state_digest(step), "losses": rest["losses"], "rates": rates(optimizer), '
        '"scale": float(step.loss_scale), "draws": draws(), "weights": weights(model)}',
    ] if line)  # fmt: skip


def _plain(p):
    rows = '{"x": X[ids], "y": Y[ids]}' if p.data == "dict" else "(X[ids], Y[ids])"
    stepped = "        scheduler.step()" if p.scheduler != "none" else ""
    step = "            for each in optimizers:\n                each.step()\n" + (
        "            scheduler.step()\n" if stepped else ""
    )
    limit = f"            if count == {p.steps}:\n                break\n" if p.steps else ""
    outer = f"        if count == {p.steps}:\n            break\n" if p.steps else ""
    return (
        "def plain(communicator=None):\n"
        + textwrap.indent(_run(replace(p, shares=())), "    ")
        + "\n    optimizers, count = optimizer if isinstance(optimizer, list) else [optimizer], 0\n"
        f"    loader = run.loader((X, Y), shuffle={p.shuffle})\n"
        "    for epoch in range(EPOCHS):\n"
        "        for start in range(0, NUM_SAMPLES, BATCH):\n"
        "            ids = torch.as_tensor(loader.ids(epoch, start, min(start + BATCH, NUM_SAMPLES)))\n"
        "            for each in optimizers:\n                each.zero_grad()\n"
        f"            loss_fn(model, {rows}).backward()\n"
        + step
        + "            count += 1\n"
        + limit
        + outer
        + '    return {"digest": samestep.state_digest(model, optimizer), "weights": weights(model)}'
    )


def _class_name(source):
    return source.split("class ", 1)[1].split("(", 1)[0]


def _dedent(source):
    return textwrap.dedent(source).strip("\n")
