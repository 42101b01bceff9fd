"""The grammar of programs: from choices to the text of a script of the public interface."""

import textwrap
from dataclasses import field, make_dataclass, replace
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
    "embedding": (
        "Block(lambda self, x: x + self.table((2 * x).long().clamp(0, 7)).mean(1), table=nn.Embedding(8, 6))"
    ),
    "recurrent": (
        "Block(lambda self, x: self.cells(x.unflatten(1, (3, 2)))[0].flatten(1), cells=nn.LSTM(2, 2, batch_first=True))"
    ),
    "attention": (
        "Block(lambda self, x: x + self.heads(*[x.unflatten(1, (3, 2))] * 3, need_weights=False)[0].flatten(1), "
        "heads=nn.MultiheadAttention(2, 1, dropout=0.1, batch_first=True))"
    ),
    "tied": (
        "Block(lambda self, x: self.second(torch.tanh(self.first(x))), first=(layer := nn.Linear(6, 6)), "
        "second=Block(lambda self, x: functional.linear(x, self.weight), weight=layer.weight))"
    ),
    "twice": "Block(lambda self, x: self.same(self.part(x).tanh()), part=(layer := nn.Linear(6, 6)), same=layer)",
    "recomputed": (
        "Block(lambda self, x: checkpoint(self.part, x, use_reentrant=REENTRANT), "
        "part=nn.Sequential(nn.Linear(6, 6), nn.Tanh()))"
    ),
    "double": ("Block(lambda self, x: x + self.part(x.double()).float(), part=nn.Linear(6, 6, dtype=torch.float64))"),
    "bfloat16": (
        "Block(lambda self, x: x + self.part(x.bfloat16()).float(), part=nn.Linear(6, 6, dtype=torch.bfloat16))"
    ),
    "complex": (
        "Block(lambda self, x: (x * self.turn).real + (x * self.turn).imag, "
        "turn=nn.Parameter(torch.randn(6, dtype=torch.complex64)))"
    ),
    "sometimes": (
        "Block(lambda self, x: x + (self.one if x.detach().sum() > 0 else self.other)(x), "
        "one=nn.Linear(6, 6), other=nn.Linear(6, 6))"
    ),
}
BLOCK = """
    class Block(nn.Module):
        def __init__(self, function, **parts):
            super().__init__()
            self.function = function
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, x):
            return self.function(self, x)
"""
CLASS_BLOCKS = {
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
}
BLOCKS = [*SIMPLE_BLOCKS, *CLASS_BLOCKS]
SIMPLE_BLOCKS |= {  # of which a line tells, see NAMED
    "own draws": "Block(lambda self, x: x + torch.rand(x.shape, generator=self.draws), draws=torch.Generator())",
    "unused": "Block(lambda self, x: x, part=nn.Linear(6, 6))",
}
CLASS_BLOCKS["remembering"] = """
    class Remembering(nn.Module):
        last = 0.0

        def forward(self, x):
            before, self.last = self.last, x.detach().mean()
            return x + before
"""
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
        class Noisy(Samples):
            def __getitem__(self, index):
                x = X[index] + 0.1 * torch.rand(()) + 0.1 * float(np.random.rand()) + 0.1 * random.random()
                return x, Y[index]
    """,
    "forked": """
        class Forked(Samples):
            def __getitem__(self, index):
                with torch.random.fork_rng():
                    return X[index] + 0.1 * torch.rand(6), Y[index]
    """,
    "numpy": """
        class OwnDraws(Samples):
            def __init__(self):
                self.draws = np.random.default_rng(3)

            def __getitem__(self, index):
                return X[index] + 0.1 * float(self.draws.random()), Y[index]
    """,
    "rarely": """
        class Rarely(Samples):
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
    "listed": """
        class Listed(Sampler):
            def __init__(self):
                self.order = [*range(NUM_SAMPLES)]

            def __len__(self):
                return NUM_SAMPLES

            def __iter__(self):
                random.shuffle(self.order)
                return iter(self.order)
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
    "nested": ("tensors", '{"inputs": ((X,), [X]), "y": Y}'),
    "joined": ("noisy", "ConcatDataset([TensorDataset(X[:2], Y[:2]), Subset(Noisy(), range(2, NUM_SAMPLES))])"),
    "transformed": (
        "tensors",
        "samestep.TensorData((X, Y), transform=lambda batch: (batch[0] + 0.1 * torch.rand(()), batch[1]))",
    ),
    "numpy": ("numpy", "OwnDraws()"),
    "iterable": ("iterable", "Stream()"),
    "streams": ("streams", "run.loader(streams=stream)"),
    "own loader": ("noisy", "DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=num_workers)"),
    "own generator": (
        "samples",
        "DataLoader(Samples(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(9))",
    ),
    "own drop last": ("samples", "DataLoader(Samples(), batch_size=BATCH, shuffle=True, drop_last=True)"),
    "own sampler": ("sampler", "DataLoader(TensorDataset(X, Y), batch_size=BATCH, sampler=Shuffled())"),
    "own list": ("listed", "DataLoader(TensorDataset(X, Y), batch_size=BATCH, sampler=Listed())"),
    "own weighted": (
        "noisy",
        "DataLoader(Noisy(), BATCH, sampler=WeightedRandomSampler([1.0, 2.0] * (NUM_SAMPLES // 2), NUM_SAMPLES), "
        "worker_init_fn=random.seed)",
    ),
    "own batches": (
        "tensors",
        "DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(RandomSampler(X), BATCH, drop_last=False))",
    ),
    "own persistent": (
        "tensors",
        "DataLoader(TensorDataset(X, Y), batch_size=BATCH, shuffle=True, num_workers=num_workers, "
        "persistent_workers=num_workers > 0)",
    ),
}
OF_LOADERS = {"streams", *(name for name in DATA if name.startswith("own "))}  # not for `run.loader(…)`
NUMBERED = {"tensors", "dict", "nested", "tensor dataset", "samples"}  # an id is a row, which a plain loop can read
FORMS = {  # of a batch: its inputs, its target, and that of the whole data; a pair else
    "dict": ('batch["x"]', 'batch["y"]', '{"x": X, "y": Y}'),
    "nested": ('batch["inputs"][0][0]', 'batch["y"]', '{"inputs": ((X,), [X]), "y": Y}'),
}
METRICS = {  # of an evaluation: what is made of output and target, and the metrics; the first is called loss
    "classes": ("{}", "Y", """
        cross_entropy; accuracy; top_k(2); cross_entropy_with(class_dim=1, ignore_index=2);
        from_torchmetrics(F1Score("multiclass", num_classes=3, average=None), update=counted)
    """),
    "numbers": ("{}[:, 0]", "Y", """
        mean_squared_error; root_mean_squared_error; mean_absolute_error; Metric(rare, math.exp)
    """),
    "tokens": ("{}[:, None]", "Y[:, None]", """
        perplexity; token_accuracy; perplexity_with(class_dim=-1, ignore_index=1);
        token_accuracy_with(class_dim=-1, ignore_index=1)
    """),
}  # fmt: skip

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
    "sgd decay": "torch.optim.SGD({}, lr=0.1, weight_decay=0.1, maximize=True, foreach=True)",
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
    "forgotten": "schedules.ExponentialLR(optimizer, 0.5)",
}
SCHEDULING = """
    class {}(samestep.Hook):
        name = "schedule"

        def __init__(self, scheduler):
            self.scheduler = scheduler
            self.state_dict, self.load_state_dict = {}

        def on_epoch_end(self, trainer, record):
            self.scheduler.step({})
"""
HOOKS = {
    "epochs": SCHEDULING.format("ByEpoch", "scheduler.state_dict, scheduler.load_state_dict", ""),
    "plateau": SCHEDULING.format("ByLoss", "scheduler.state_dict, scheduler.load_state_dict", "record.train_loss"),
    "forgotten": SCHEDULING.replace("self.state_dict, self.load_state_dict", "self.rest").format("Forgotten", 0, ""),
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

            def on_epoch_start(self, trainer, epoch):
                self.total += epoch + torch.rand(()).item()

            def on_epoch_end(self, trainer, record):
                self.total -= record.train_loss if math.isfinite(record.train_loss) else 0

            def on_evaluation_end(self, trainer, metrics):
                self.total += random.random() * len(metrics)

            def on_checkpoint(self, trainer, step):
                assert step == trainer.step.num_steps

            def on_fit_start(self, trainer):
                assert not trainer.model.training or trainer.model[0].training

            def on_fit_end(self, trainer):
                assert trainer.step.num_steps > 0

            def state_dict(self):
                return {"total": self.total}

            def load_state_dict(self, state):
                self.total = state["total"]
    """,
    "forgetful": """
        class Forgetful(samestep.Hook):
            def __init__(self):
                self.total = torch.zeros(())

            def on_step_end(self, trainer, result):
                with torch.no_grad():
                    self.total += 0.001
                    next(trainer.model[-1].parameters()).add_(self.total)
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
                look(trainer.run, trainer.model, trainer.step)
                trainer.say(f"{trainer} {trainer.digest} {trainer.best} {[*result.batch.microbatches]}")
                trainer.predict(WHOLE, forward=forward)
                trainer.evaluate(WHOLE, {"rare": rare}, forward=forward)

            def on_epoch_end(self, trainer, record):
                trainer.say(f"{record.as_json()} {record.tags()} {record.describe([])}")

            def on_failure(self, trainer, error):
                trainer.say(str(error))
    """,
}
NAMED = {  # a block, dataset, hook or scheduler whose bits another number of ranks or a resume may change: the line
    "remembering": "last: written in the forward",
    "own draws": "draws (Generator): drawn from while microbatches run",
    "unused": "parameters got no gradient in the first 3 steps, such as ",
    "numpy": "the dataset keeps a generator of its own (Generator)",
    "own list": "the sampler Listed has order, which changes in training",
    "forgetful": "the hook Forgetful has total (Tensor)",
    "forgotten": "the hook Forgotten has scheduler (ExponentialLR)",
    "early": "drawn before samestep.Run",
}
OPTIONS = {  # further arguments of calls; one thread a rank, since OpenMP has a number of its own in each rank's thread
    "Run": """
        reduction="ordered"; num_threads=1; timeout_seconds=60.0; mesh={"data": -1};
        spares=int(communicator is not None and communicator.world_size > 1)
    """,
    "train_step": """
        late_check=False; overlap=False; bucket_bytes=64; on_nonfinite="raise"; strategy="replicate";
        strategy=samestep.Replicate(shard_optimizer=False); observers=[Watching()]
    """,
    "loader": """
        drop_last=True; collate_fn=collated; cache="device"; multiprocessing_context="fork"; exact_states=True
    """,
    "Trainer": """
        loggers=[Log()]; name="another"; contract={"note": 1}; epoch_line=("loss", "test loss");
        checkpoint_minutes=1e-9; checkpoint_retries=1; keep=2; digest_every=2; resume_command="again";
        state={"other": other}
    """,
    "fit": """
        eval_every=2; collate_fn=collated; allow_contract_change=True
    """,
    "save_checkpoint": """
        keep=2; checkpoint_retries=1
    """,
    "load_checkpoint": """
        allow_contract_change=True
    """,
    "load_state_dict": """
        allow_contract_change=True
    """,
}
OPTIONS = [f"{call}: {' '.join(each.split())}" for call, text in OPTIONS.items() for each in text.split(";")]
HELPERS = {  # what an option needs
    "Watching": """
        class Watching(samestep.StepObserver):
            def note(self, *seen):
                self.seen = seen

            on_made = on_step = on_phase = on_batch = on_microbatch = on_loss = on_gradients = note
            on_bucket = on_wait = on_update = on_failure = note
    """,
    "Log": """
        class Log:
            def log(self, step, scalars):
                random.random(), torch.rand(())

            def close(self):
                pass
    """,
    "collated": """
        def collated(samples):
            batch = default_collate(samples)
            {inputs}.add_(0.1 * torch.rand(()) + 0.1 * random.random())
            return batch
    """,
}
STRATEGIES = {  # by which a step may be placed on the ranks, and the axes of the mesh within "data"
    "replicate": ("samestep.Replicate()", {}),
    "zero1": ("samestep.Replicate(shard_optimizer=True)", {}),
    "sharded": ("samestep.Sharded()", {}),
    "kept": ("samestep.Sharded(wrap=1, reshard_after_forward=False)", {}),
    "wrapped": ("samestep.Sharded(wrap=lambda module: isinstance(module, nn.Linear), cpu_offload=True)", {}),
    "recomputing": ("samestep.Sharded(activation_checkpointing=True)", {}),
    "sharded halves": ('samestep.Sharded(param_dtype="bf16")', {}),
    "pipeline": ("samestep.Pipeline(example=torch.ones(2, 6))", {"pipe": 2}),
    "gpipe": ('samestep.Pipeline(schedule="gpipe")', {"pipe": 3}),
    "1f1b": ('samestep.Pipeline(split=["1"], schedule="1f1b")', {"pipe": 2}),
    "tensor": ('"tensor"', {"tensor": 2}),
    "tensor 3": ('"tensor"', {"tensor": 3}),
}
OF_TIERS = {"sharded halves", "tensor", "tensor 3"}  # with bits of their own, on all numbers of ranks along "data"
PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]


RARE = [False, False, False, True]
CHOICES = {  # of each field of a program; the first one is the simplest, to which hypothesis shrinks
    "data": [name for name in DATA if name not in NAMED],
    "samples": range(4, 23),
    "batch": [4, 3, *range(5, 11)],
    "microbatches": range(1, 7),
    "epochs": range(1, 4),
    "seed": range(100),
    "loss": [*LOSSES],
    "optimizer": [*OPTIMIZERS],
    "second": ["", "", "", "sgd", "adam", "rmsprop"],  # another optimizer, for every other parameter
    "groups": RARE,
    "scheduler": [name for name in SCHEDULERS if name not in NAMED],
    "clip": RARE,
    "precision": ["32-true", "32-true", *PRECISIONS],
    "loop": ["trainer", "trainer", "own"],
    "zero1": RARE,
    "shuffle": [False, True],
    "calls": ["", "", "", "drawing", "freezing"],  # what happens between calls of `fit` of an epoch each
    "best": ["", "", "", '"loss"', '("loss", "min")', '("loss", "max")'],  # the argument
    "patience": RARE,
    "evaluated": ["", "", "", *METRICS],  # by which metrics
    "steps": [0, 0, 0, 1, 3, 5],  # `max_steps`
    "critic": RARE,  # a second step over the model, in a loop of one's own
    "reentrant": RARE,
    "files": RARE,  # of `torch.save`, in a loop of one's own
    "named": [""] * 40 + [*NAMED],  # what one line is about
}
SEVERAL = {"blocks": (BLOCKS, 4), "hooks": (["average", "thawing", "drawing"], 2), "options": (OPTIONS, 3)}


DEFAULTS = {name: values[0] for name, values in CHOICES.items()} | dict.fromkeys((*SEVERAL, "shares"), ())
FIELDS = [(name, object, field(default=value)) for name, value in DEFAULTS.items()]


class Program(make_dataclass("Fields", FIELDS, frozen=True)):
    """The choices of a program."""

    def __repr__(self):
        changed = [name for name, value in DEFAULTS.items() if getattr(self, name) != value]
        return f"Program({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    @property
    def plain(self):
        """Whether a plain loop of PyTorch computes the same, but for the rounding of several microbatches."""
        return (
            self.data in NUMBERED
            and self.loss == "mean"
            and not (self.clip or self.zero1 or self.hooks or self.critic or self.best or self.patience or self.calls)
            and self.precision == "32-true"
            and not {"loader: drop_last=True", "loader: collate_fn=collated", "fit: collate_fn=collated"}
            & {*self.options}
            and self.scheduler in ("none", "step", "cosine", "one cycle", "sequential")
            and not DRAWING & {*self.blocks}
            and (self.microbatches == 1 or not {*self.blocks} & {*NORMALISED, "sometimes", "counting", "bfloat16"})
            and (self.microbatches == 1 or (self.optimizer in ("sgd", "momentum") and not self.second))
        )


def allowed(p):
    """The nearest program that the documentation allows."""
    if p.named:  # a small program, of at least three steps of two microbatches
        kinds = {"data": DATA, "scheduler": SCHEDULERS, "hooks": HOOKS, "blocks": SIMPLE_BLOCKS | CLASS_BLOCKS}
        p = Program(
            named=p.named, samples=p.samples, batch=max(4, p.batch), microbatches=max(2, p.microbatches), epochs=3
        )
        for name in [name for name, table in kinds.items() if p.named in table][:1]:
            p = replace(p, **{name: (p.named,) if name in SEVERAL else p.named})
    changes = {"microbatches": min(p.microbatches, p.batch)}
    if p.loop == "own":
        kept = tuple(hook for hook in p.hooks if hook == "average")
        changes |= {"hooks": kept, "calls": "", "best": "", "patience": False, "evaluated": "", "steps": 0}
        if p.data in OF_LOADERS and p.data != "streams":
            changes["data"] = "noisy"
        if p.scheduler in ("epochs", "plateau"):
            changes["scheduler"] = "step"
        if p.files:
            changes["zero1"] = False
            changes["files"] = "counting" not in p.blocks  # its other buffer is not in a `state_dict`
    else:
        changes |= {"critic": False, "files": False}
    if p.data in ("streams", "iterable") or p.data.startswith("own "):
        changes["shuffle"] = False
    if p.loop != "own" and (p.best or p.patience):
        changes |= {"evaluated": p.evaluated or "classes", "best": p.best or '"loss"'}
    if p.critic:
        changes["zero1"] = False
    if changes.get("zero1", p.zero1):
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
    if "thawing" in p.hooks or p.calls == "freezing":  # the first layer, and something must be left to train: the last
        p = replace(p, hooks=tuple(h for h in p.hooks if h != "drawing"))
    if p.zero1 and p.calls == "freezing":
        p = replace(p, calls="")
    if "drop_last=True" in str(p.options):
        p = replace(p, samples=max(p.samples, p.batch))
    left_out = ["spares"] if p.zero1 or p.shares else []
    left_out += [] if p.data in ("tensors", "dict", "nested", "tensor dataset", "transformed") else ["cache="]
    left_out += [] if p.data == "streams" else ["exact_states"]
    p = replace(p, options=tuple(each for each in p.options if not any(word in each for word in left_out)))
    return p


def placed(p, *strategies):
    """The nearest program that each of the strategies takes."""
    if {*strategies} == {"replicate"}:
        return p
    changes = {"zero1": False, "shares": ()}
    if p.optimizer in NOT_ELEMENTWISE:
        changes["optimizer"] = "adam"
    hooks = [hook for hook in p.hooks if hook != "thawing"]  # what is trained is fixed
    refused = {"sometimes"}
    if {*strategies} - {"replicate", "zero1"}:
        hooks = []  # no rank has all parameters
    texts = " ".join(STRATEGIES[name][0] for name in strategies)
    if "Sharded" in texts:
        refused |= {"double", "bfloat16", "complex"}
        changes["optimizer"] = {"adam fused": "adam"}.get(changes.get("optimizer", p.optimizer), p.optimizer)
    if {"recomputing", "sharded halves"} & {*strategies}:
        refused |= NORMALISED
    blocks = [name for name in p.blocks if name not in refused]
    if "Pipeline" in texts:
        changes["loss"] = {"scalars": "mean"}.get(p.loss, p.loss)
        changes["data"] = {"streams": "noisy"}.get(p.data, p.data)  # of which one may have no samples left
        blocks += ["tanh"] * (2 - len(blocks))
    return allowed(replace(p, **changes, hooks=tuple(hooks), blocks=tuple(blocks)))


def even(p, microbatches):
    """Sizes by which no microbatch has a single sample."""
    batch = max(p.batch, 2 * microbatches)
    short = p.samples % batch
    samples = p.samples + (2 * microbatches - short if 0 < short < 2 * microbatches else 0)
    if p.data in ("streams", "iterable"):
        samples = batch * max(1, p.samples // batch)
    return {"batch": batch, "samples": samples}


def plainer(p):
    """The program without what a plain loop cannot do."""
    left_out, changes = DRAWING, {"microbatches": 1}
    if p.microbatches % 2 == 0:
        left_out = {*DRAWING, *NORMALISED, "sometimes", "counting", "bfloat16"}
        changes = {"optimizer": "momentum", "second": ""}
    simplest = "loss precision hooks options clip zero1 critic best patience calls named"
    return replace(
        p,
        blocks=tuple(block for block in p.blocks if block not in left_out),
        data=p.data if p.data in NUMBERED else "tensors",
        scheduler=DEFAULTS["scheduler"] if p.scheduler in HOOKS else p.scheduler,
        **{name: DEFAULTS[name] for name in simplest.split()},
        **changes,
    )


def programs():
    """Draws programs, of which a quarter can be written as a plain loop."""
    several = {
        name: st.lists(st.sampled_from(values), max_size=most, unique=name != "blocks").map(tuple)
        for name, (values, most) in SEVERAL.items()
    }
    shares = st.lists(st.integers(1, 4), min_size=4, max_size=4).map(tuple) | st.just(())
    choices = {name: st.sampled_from(values) for name, values in CHOICES.items()}
    drawn = st.builds(Program, **choices, **several, shares=shares)
    return st.one_of(drawn, drawn, drawn, drawn.map(plainer)).map(allowed)


def text(p):
    """The script of a program: its functions `train` and, if a plain loop can do it, `plain`."""
    blocks = [SIMPLE_BLOCKS.get(name) or _class_name(CLASS_BLOCKS[name]) + "()" for name in p.blocks]
    classes = [BLOCK] if "Block(" in str(blocks) else []
    classes += [CLASS_BLOCKS[name] for name in dict.fromkeys(p.blocks) if name in CLASS_BLOCKS]
    hooks = [*p.hooks, *([p.scheduler] if p.scheduler in HOOKS else [])]
    if p.loop == "own":
        hooks = []
    else:
        hooks += ["looking", "stopping"]
    inputs, target, whole = FORMS.get(p.data, ("batch[0]", "batch[1]", "(X, Y)"))
    arguments = "model, batch, counts" if p.loss == "counts" else "model, batch"
    helpers = [text.format(inputs=inputs) for name, text in HELPERS.items() if name in str(p.options)]
    parts = [
        _imports(),
        f"NUM_SAMPLES, BATCH, MICROBATCHES, EPOCHS, SEED = "
        f"{p.samples}, {p.batch}, {p.microbatches}, {p.epochs}, {p.seed}\n"
        + (f"REENTRANT = {p.reentrant}\n" if "recomputed" in p.blocks else "")
        + (f"SHARES = {list(p.shares)}\n" if p.shares else "")
        + "generator = torch.Generator().manual_seed(7)\n"
        "X = torch.randn(NUM_SAMPLES, 6, generator=generator)\n"
        "Y = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)\n"
        f"WHOLE = {whole}",
        *map(_dedent, classes),
        _dedent(DATASETS["samples"]),
        _dedent(DATASETS[DATA[p.data][0]]) if DATA[p.data][0] != "samples" else "",
        *map(_dedent, helpers),
        "def make_model():\n    return nn.Sequential(\n"
        + "".join(f"        {block},\n" for block in ["nn.Linear(6, 6)", *blocks, "nn.Linear(6, 3)"])
        + "    )",
        _optimizers(p),
        f"def loss_fn({arguments}):\n    x, y = {inputs}, {target}\n"
        + textwrap.indent(_dedent(LOSSES[p.loss]), "    "),
        f"def forward(model, batch):\n    return {METRICS.get(p.evaluated, ['{}'])[0].format(f'model({inputs})')}",
        "from torchmetrics import F1Score\n\n\n"
        f"def counted(metric, output, batch):\n    metric.update(output, {target})"
        if p.evaluated == "classes"
        else "",
        f"def rare(output, batch):\n    is_one = {target} == 1\n"
        "    return samestep.Mean(output.float()[is_one].sum(), is_one.sum())",
        _look(p),
        *map(_dedent, (HOOKS[name] for name in dict.fromkeys(hooks))),
        _shown(),
        _own_loop(p) if p.loop == "own" else _trainer(p),
        _plain(p) if p.plain else "",
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def _arguments(p, call, **defaults):
    """The arguments of a call: those among the options of a program, and defaults of others."""
    options = [option.removeprefix(f"{call}: ").split("=", 1) for option in p.options if option.startswith(f"{call}: ")]
    return "".join(f", {name}={value}" for name, value in (defaults | dict(options)).items())


def _look(p):
    batches = ", collate_fn=collated" if "collated" in str(p.options) else ""
    how = f'forward=forward, precision="{p.precision}", num_workers=0{batches}'
    return _dedent(f"""
        def look(run, model, step):
            outputs = run.predict(model, WHOLE, {how})
            run.evaluate(model, WHOLE, {{"rare": rare}}, {how})
            outputs = samestep.to_device(outputs, run.device, torch.float64, non_blocking=True)
            samestep.to_numpy(samestep.to_host(outputs))
            with run.main_first():
                run.print(run, run.is_main, run.ranges, run.communicator, step.loss_scale)
            run.barrier()
            assert len(run.gather(torch.ones(run.rank + 1))) == run.world_size
            step.check(), step.state_dict(), run.state_dict()
    """)


def _imports():
    return _dedent("""
        import math

        from torch import nn
        from torch.nn import functional
        from torch.nn.utils import parametrizations
        from torch.optim import lr_scheduler as schedules
        from torch.utils.checkpoint import checkpoint
        from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, IterableDataset, RandomSampler
        from torch.utils.data import Sampler, Subset, TensorDataset, WeightedRandomSampler, default_collate

        import samestep
    """)


def _shown():
    return _dedent("""
        def shown(value):
            return "nan" if math.isnan(value) else float(value).hex()


        def draws():
            return [torch.rand(()).item(), float(np.random.rand()), random.random()]


        def noted(result):
            batch, scalars = result.batch, {name: shown(value) for name, value in result.scalars.items()}
            result.check()
            data = batch.length, batch.epoch, batch.position, batch.ids and batch.ids().tolist()
            numbers = map(shown, (result.loss, result.grad_norm, result.total, result.count))
            return [*numbers, result.num_samples, result.skipped, scalars, *data]


        def rates(optimizer):
            optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
            return [float(group["lr"]) for each in optimizers for group in each.param_groups]


        def weights(model):
            whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
            return [number for parameter in whole for number in parameter.detach().flatten().tolist()]
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
    shares = {"shares": "SHARES[: communicator.world_size] if communicator else None"} if p.shares else {}
    scheduler = SCHEDULERS[p.scheduler]
    if p.second:
        scheduler = scheduler.replace("optimizer", "optimizer[0]")
    lines = [
        "run = samestep.Run(BATCH, MICROBATCHES, SEED, communicator=communicator"
        f"{_arguments(p, 'Run', **shares)}, **placing)",
        "model = make_model()",
        "optimizer = make_optimizer(model)",
        f"scheduler = {scheduler}" if scheduler else "",
    ]
    if p.named == "early":
        lines[:2] = ["torch.seed()", lines[1], lines[0]]
    return "\n".join(line for line in lines if line)


def _options(p):
    options = {"strategy": "strategy"} | ({"max_grad_norm": "0.3"} if p.clip else {})
    options |= {"precision": f'"{p.precision}"'}
    options |= {"on_nonfinite": '"skip"'} if p.loss == "sometimes nan" else {}
    options |= {"shard_optimizer": "True"} if p.zero1 else {}
    options |= {"scheduler": "scheduler"} if p.scheduler != "none" and p.scheduler not in HOOKS else {}
    target = FORMS.get(p.data, ("", "batch[1]"))[1]
    options |= {"counts_fn": f'lambda batch: {{"all": len({target})}}'} if p.loss == "counts" else {}
    return _arguments(p, "train_step", **options)


def _loader(p):
    if p.data == "streams":
        return f"run.loader(streams=stream{_arguments(p, 'loader')})"
    more = _arguments(p, "loader", shuffle=p.shuffle, num_workers="num_workers")
    return f"run.loader({DATA[p.data][1]}{more})"


def _trainer(p):
    hooks = [*("average" if h == "average" else f"{_class_name(HOOKS[h])}()" for h in p.hooks), "losses"]
    if p.scheduler in HOOKS:
        hooks.append(f"{_class_name(HOOKS[p.scheduler])}(scheduler)")
    goal = {"best": p.best} if p.best else {}
    goal |= {"patience": "1"} if p.patience else {}
    writing = {"checkpoint_steps": "every", "checkpoint_minutes": "None", "checkpoint_retries": "0", "keep": "1000"}
    made = f"run, model, optimizer, loss_fn, run_dir=folder, hooks=hooks{_options(p)}"
    made += _arguments(p, "Trainer", **writing, digest_every="1", **goal)
    how = {"shuffle": p.shuffle, "resume": "resume"} | ({} if p.data in OF_LOADERS else {"num_workers": "num_workers"})
    data = DATA[p.data][1]
    if p.data == "streams" or (p.data not in OF_LOADERS and "loader: " in str(p.options)):
        data = _loader(p)
    if p.evaluated:
        _, target, metrics = METRICS[p.evaluated]
        named = [
            f'"{index or "loss"}": samestep.metrics.{metric.strip()}' for index, metric in enumerate(metrics.split(";"))
        ]
        measured = FORMS.get(p.data, ("", "", "(X, Y)"))[2].replace("Y", target)
        how |= {"eval_data": measured, "metrics": f"{{{', '.join(named)}}}", "forward": "forward"}
    how |= {"max_steps": p.steps} if p.steps else {}
    fit = "trainer.fit(data, {}" + f"{_arguments(p, 'fit', **how)})"
    fits = fit.replace("{}", "EPOCHS", 1)
    if p.calls:
        between = "drawn = draws()" if p.calls == "drawing" else "model[0].requires_grad_(epoch % 2 == 1)"
        fits = f"for epoch in range(EPOCHS):\n    {fit.replace('{}', '1', 1)}\n    {between}"
    if "average" in p.hooks:
        fits += "\nwith average.applied(model):\n    averaged = weights(model)"
    if p.best:
        batches = ", collate_fn=collated" if "fit: collate_fn=collated" in p.options else ""
        measured = f"{how['eval_data']}, metrics={how['metrics']}, forward=forward{batches}"
        again = f"assert trainer.evaluate({measured}) == trainer.best.eval"
        fits += f"\nif folder and trainer.best:\n    with trainer.best_weights():\n        {again}"
    return _dedent("""
        class Losses(samestep.Hook):
            def __init__(self):
                self.steps = {}

            def on_step_end(self, trainer, result):
                self.steps[str(result.step)] = noted(result)
    """) + "\n\n\n" + "\n".join(line for line in [
        "def train(communicator=None, folder=None, resume=None, every=1, num_workers=0, looks=False, stops=None, "
        'strategy="replicate", **placing):',
        textwrap.indent(_run(p), "    "),
        f"    data, losses, drawn, averaged = {data}, Losses(), [], []",
        '    average = samestep.EMA(decay=0.9, name="average")' if "average" in p.hooks else "",
        "    other = nn.Linear(1, 1)" if "other" in str(p.options) else "",
        f"    hooks = [{', '.join(hooks)}, *([Looking()] if looks else []), "
        "*([Stopping(*stops)] if stops else [])]",
        f"    with samestep.Trainer({made}) as trainer:",
        textwrap.indent(fits, " " * 8),
        "        history = [(r.epoch, shown(r.train_loss), {k: shown(v) for k, v in (r.eval | r.scalars).items()}) "
        "for r in trainer.history]",
        "        return {",
        '            "digest": trainer.digest,',
        '            "losses": losses.steps,',
        '            "history": history,',
        '            "rates": rates(optimizer),',
        '            "scale": float(trainer.step.loss_scale),',
        '            "best": trainer.best and trainer.best.epoch,',
        '            "drawn": drawn,',
        '            "draws": draws(),',
        '            "weights": weights(model),',
        '            "averaged": averaged,',
        "        }",
    ] if line)  # fmt: skip


def _own_loop(p):
    inputs = FORMS.get(p.data, ("batch[0]",))[0]
    critic = [
        "    other = torch.optim.SGD(model[0].parameters(), lr=0.01)",
        f"    steps = [step, run.train_step(model, other, lambda model, batch: model({inputs}).square().mean())]",
    ]
    average = "average" in p.hooks
    optimizers = ("*optimizer" if p.second else "optimizer") + (", other" if p.critic else "")
    scheduler = ", scheduler" if p.scheduler != "none" else ""
    saved = f'run.save_checkpoint(f"{{folder}}/checkpoints", steps, loader, rest{_arguments(p, "save_checkpoint")})'
    loaded = [f"        rest = run.load_checkpoint(resume, steps, loader{_arguments(p, 'load_checkpoint')})"]
    if p.files:
        saved = "save(run, [*(part.state_dict() for part in parts), loader.state_dict()], rest, folder, step.num_steps)"
        loaded = [
            "        own, *states, place, rest = torch.load(resume)",
            "        for part, state in zip(parts, states, strict=True):",
            "            part.load_state_dict(state)",
            "        loader.load_state_dict(place)",
            f"        run.load_state_dict(own{_arguments(p, 'load_state_dict')})",
        ]
    saving = _dedent("""
        def save(run, states, rest, folder, done):
            if run.is_main:
                Path(f"{folder}/checkpoints").mkdir(parents=True, exist_ok=True)
                torch.save([run.state_dict(), *states, rest], f"{folder}/checkpoints/step-{done:08}")
    """)
    return (saving + "\n\n\n" if p.files else "") + "\n".join(line for line in [
        "def train(communicator=None, folder=None, resume=None, every=1, num_workers=0, looks=False, strategy="
        '"replicate", **placing):',
        textwrap.indent(_run(p), "    "),
        f"    step = run.train_step(model, optimizer, loss_fn{_options(p)})",
        *(critic if p.critic else ["    steps = [step]"]),
        f"    loader = {_loader(p)}",
        f"    parts = [model, {optimizers}{scheduler}, *steps]" if p.files else "",
        '    rest = {"losses": {}}',
        '    average = samestep.EMA(0.9)' if average else "",
        "    if resume is not None:",
        *loaded,
        '        average.load_state_dict(rest["average"])' if average else "",
        "    while loader.cursor.epoch < EPOCHS:",
        "        for batch in loader:",
        "            for each in steps:",
        "                result = each(batch)",
        '                rest["losses"][str(result.step)] = noted(result)',
        "            average.update(model)" if average else "",
        '            rest["average"] = average.state_dict()' if average else "",
        "            if folder is not None and step.num_steps % every == 0:",
        f"                {saved}",
        "            if run.stopping:",
        "                break",
        "            if looks:",
        "                look(run, model, step)",
        "                run.predict(model, loader, forward=forward)",
        '    averaged = [tensor.tolist() for tensor in average.weights.values()]' if average else "",
        '    return {"digest": samestep.state_digest(step), "losses": rest["losses"], "rates": rates(optimizer), '
        '"scale": float(step.loss_scale), "draws": draws(), "weights": weights(model)'
        + (', "averaged": averaged' if average else "") + "}",
    ] if line)  # fmt: skip


def _plain(p):
    rows = FORMS.get(p.data, ("", "", "(X, Y)"))[2].replace("X", "X[ids]").replace("Y", "Y[ids]")
    ending = [f"if count == {p.steps}:", "    break"] if p.steps else []
    return (
        "def plain(communicator=None, **placing):\n"
        + textwrap.indent(_run(replace(p, shares=())), "    ")
        + "\n    optimizers, count = optimizer if isinstance(optimizer, list) else [optimizer], 0\n"
        f"    loader = run.loader((X, Y), shuffle={p.shuffle})\n"
        "    for epoch in range(EPOCHS):\n"
        "        for start in range(0, NUM_SAMPLES, BATCH):\n"
        "            ids = torch.as_tensor(loader.ids(epoch, start, min(start + BATCH, NUM_SAMPLES)))\n"
        "            for each in optimizers:\n                each.zero_grad()\n"
        f"            loss_fn(model, {rows}).backward()\n"
        "            for each in optimizers:\n                each.step()\n"
        + ("            scheduler.step()\n" if p.scheduler != "none" else "")
        + "            count += 1\n"
        + "".join(f"{' ' * depth}{line}\n" for depth in (12, 8) for line in ending)
        + '    return {"digest": samestep.state_digest(model, optimizer), "weights": weights(model)}'
    )


def _class_name(source):
    return source.split("class ", 1)[1].split("(", 1)[0]


def _dedent(source):
    return textwrap.dedent(source).strip("\n")
