"""The grammar of programs: from choices to the text of a script of the public interface."""

import re
import textwrap
from pathlib import Path
from typing import ClassVar

from hypothesis import strategies as st

TEMPLATE = Path(__file__).with_name("drawn_program.txt")


def table(text):
    """The entries of a text, each `name: expression`; a line that is indented goes on with the one before."""
    entries = re.split(r"\n(?! )", textwrap.dedent(text).strip("\n"))
    return dict(re.sub(r"\s*\n\s*", " ", entry).split(": ", 1) for entry in entries)


# Blocks [n, 6] -> [n, 6], of which a model is a row.
BLOCKS = table("""
    linear: nn.Linear(6, 6)
    tanh: nn.Tanh()
    relu: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))
    dropout: nn.Dropout(0.3)
    batch norm: nn.BatchNorm1d(6)
    cumulative: nn.BatchNorm1d(6, momentum=None)
    layer norm: nn.LayerNorm(6)
    group norm: nn.GroupNorm(2, 6)
    convolution: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3, padding=1), nn.Tanh(),
        nn.Conv1d(3, 1, 1), nn.Flatten())
    frozen: nn.Linear(6, 6).requires_grad_(False)
    weight norm: parametrizations.weight_norm(nn.Linear(6, 6))
    spectral norm: parametrizations.spectral_norm(nn.Linear(6, 6))
    orthogonal: parametrizations.orthogonal(nn.Linear(6, 6))
    embedding: Block(lambda self, x: x + self.table((2 * x).long().clamp(0, 7)).mean(1), table=nn.Embedding(8, 6))
    recurrent: Block(lambda self, x: self.cells(x.unflatten(1, (3, 2)))[0].flatten(1),
        cells=nn.LSTM(2, 2, batch_first=True))
    attention: Block(lambda self, x: x + self.heads(*[x.unflatten(1, (3, 2))] * 3, need_weights=False)[0].flatten(1),
        heads=nn.MultiheadAttention(2, 1, dropout=0.1, batch_first=True))
    tied: Block(lambda self, x: self.second(torch.tanh(self.first(x))), first=(layer := nn.Linear(6, 6)),
        second=Block(lambda self, x: functional.linear(x, self.weight), weight=layer.weight))
    twice: Block(lambda self, x: self.same(self.part(x).tanh()), part=(layer := nn.Linear(6, 6)), same=layer)
    recomputed: Block(lambda self, x: checkpoint(self.part, x, use_reentrant=REENTRANT),
        part=nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    double: Block(lambda self, x: x + self.part(x.double()).float(), part=nn.Linear(6, 6, dtype=torch.float64))
    bfloat16: Block(lambda self, x: x + self.part(x.bfloat16()).float(), part=nn.Linear(6, 6, dtype=torch.bfloat16))
    complex: Block(lambda self, x: (x * self.turn).real + (x * self.turn).imag,
        turn=nn.Parameter(torch.randn(6, dtype=torch.complex64)))
    sometimes: Block(lambda self, x: x + (self.one if x.detach().sum() > 0 else self.other)(x),
        one=nn.Linear(6, 6), other=nn.Linear(6, 6))
    counting: Counting()
    own draws: Block(lambda self, x: x + torch.rand(x.shape, generator=self.draws), draws=torch.Generator())
    unused: Block(lambda self, x: x, part=nn.Linear(6, 6))
    remembering: Remembering()
""")
NORMALISED = {"batch norm", "cumulative"}  # a microbatch has two samples or none
DRAWING = {"dropout", "attention"}
CLASSES = """
class Block(nn.Module):
    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)

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

class Remembering(nn.Module):
    last = 0.0

    def forward(self, x):
        before, self.last = self.last, x.detach().mean()
        return x + before

class Samples(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]

class Noisy(Samples):
    def __getitem__(self, index):
        return X[index] + 0.1 * torch.rand(()) + 0.1 * float(np.random.rand()) + 0.1 * random.random(), Y[index]
"""

DATA = table("""
    tensors: (X, Y)
    dict: {"x": X, "y": Y}
    tensor dataset: TensorDataset(X, Y)
    subset: Subset(TensorDataset(X, Y), range(NUM_SAMPLES - 1, -1, -1))
    samples: Samples()
    noisy: Noisy()
    forked: Forked()
    rarely: Rarely()
    noisy subset: Subset(Noisy(), range(NUM_SAMPLES))
    nested: {"inputs": ((X,), [X]), "y": Y}
    joined: ConcatDataset([TensorDataset(X[:2], Y[:2]), Subset(Noisy(), range(2, NUM_SAMPLES))])
    transformed: samestep.TensorData((X, Y), transform=lambda batch: (batch[0] + 0.1 * torch.rand(()), batch[1]))
    iterable: Stream()
    streams: run.loader(streams=stream)
    own loader: DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=num_workers)
    own generator: DataLoader(Samples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(9))
    own drop last: DataLoader(Samples(), batch_size=BATCH, shuffle=True, drop_last=True)
    own sampler: DataLoader(TensorDataset(X, Y), batch_size=BATCH, sampler=Shuffled())
    own weighted: DataLoader(Noisy(), BATCH, worker_init_fn=random.seed,
        sampler=WeightedRandomSampler([1.0, 2.0] * (NUM_SAMPLES // 2), NUM_SAMPLES))
    own batches: DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(RandomSampler(X), BATCH, drop_last=False))
    numpy: OwnDraws()
""")
OF_LOADERS = {"streams", *(name for name in DATA if name.startswith("own "))}  # not for `run.loader(…)`
NUMBERED = {"tensors", "dict", "nested", "tensor dataset", "samples"}  # an id is a row, which a plain loop can read
PAIR = "batch[0]", "batch[1]", "(X, Y)"
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

LOSSES = table("""
    mean: functional.cross_entropy(model(x), y)
    per sample: functional.cross_entropy(model(x), y, reduction="none")
    weighted: samestep.Mean(total, (y > 0).sum())
    scalars: losses, {"largest": losses.detach().square(), "ones": samestep.Mean((y == 1).sum().float(), len(y))}
    counts: functional.cross_entropy(model(x), y, reduction="sum") / counts["all"]
    noise: functional.cross_entropy(model(x + 0.1 * torch.randn_like(x)) + float(np.random.rand()), y)
    sometimes nan: functional.cross_entropy(model(x), y) * torch.where(bad, float("nan"), 1.0)
""")
OPTIMIZERS = table("""
    sgd: SGD({}, lr=0.1)
    momentum: SGD({}, lr=0.1, momentum=0.9, nesterov=True)
    adam: Adam({}, lr=0.02)
    adamw amsgrad: AdamW({}, lr=0.02, amsgrad=True)
    adam fused: Adam({}, lr=0.02, fused=True)
    adam foreach: Adam({}, lr=0.02, foreach=True)
    rmsprop: RMSprop({}, lr=0.01, centered=True, momentum=0.5)
    adagrad: Adagrad({}, lr=0.05)
    adadelta: Adadelta({}, lr=0.5)
    adamax: Adamax({}, lr=0.02)
    nadam: NAdam({}, lr=0.02)
    radam: RAdam({}, lr=0.02)
    asgd: ASGD({}, lr=0.05)
    sgd decay: SGD({}, lr=0.1, weight_decay=0.1, maximize=True, foreach=True)
    rprop: Rprop({}, lr=0.01)
    adafactor: Adafactor({}, lr=0.05)
""")
NOT_ELEMENTWISE = {"nadam", "radam", "adafactor"}
NOT_COMPLEX = {"adamax", "nadam", "rprop", "adafactor", "adam fused", "asgd", "radam"}
SCHEDULERS = table("""
    none: None
    step: schedules.StepLR(optimizer, 2, gamma=0.7)
    cosine: schedules.CosineAnnealingLR(optimizer, 5)
    one cycle: schedules.OneCycleLR(optimizer, 0.1, total_steps=40, cycle_momentum=False)
    sequential: schedules.SequentialLR(optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.StepLR(optimizer, 2)], [3])
    epochs: schedules.ExponentialLR(optimizer, 0.5)
    plateau: schedules.ReduceLROnPlateau(optimizer, patience=0)
    forgotten: schedules.ExponentialLR(optimizer, 0.5)
""")
BY_HOOK = {"epochs", "plateau", "forgotten"}  # steps at the end of an epoch
HOOKS = table("""
    average: average
    thawing: Thawing()
    drawing: Drawing()
    forgetful: Forgetful()
""")
NAMED = table("""
    remembering: last: written in the forward
    own draws: draws (Generator): drawn from while microbatches run
    unused: parameters got no gradient in the first 3 steps, such as
    numpy: the dataset keeps a generator of its own (Generator)
    forgetful: the hook Forgetful has total (Tensor)
    forgotten: the hook Scheduling has scheduler (ExponentialLR)
    early: drawn before samestep.Run
""")  # a block, dataset, hook or scheduler whose bits another number of ranks or a resume may change: the line
# Further arguments of calls; one thread a rank, since OpenMP has a number of its own in each rank's thread.
OPTIONS = """
    Run: num_threads=1; timeout_seconds=60.0;
        spares=int(communicator is not None and communicator.world_size > 1)
    train_step: late_check=False; overlap=False; bucket_bytes=64; on_nonfinite="raise"; strategy="replicate";
        observers=[Watching()]; audit=2; audit=1;
        audit="2:warn"; audit="1:exclude"; audit="1:stop"
    loader: drop_last=True; collate_fn=collated; cache="device"; multiprocessing_context="fork"; exact_states=True
    Trainer: loggers=[Log()]; contract={"note": 1};
        checkpoint_minutes=1e-9; keep=2; digest_every=2;
        state={"other": other}
    fit: eval_every=2; collate_fn=collated; allow_contract_change=True
    save_checkpoint: keep=2
    load_checkpoint: allow_contract_change=True
    load_state_dict: allow_contract_change=True
"""
OPTIONS = [f"{call}: {each}" for call, options in table(OPTIONS).items() for each in options.split("; ")]
STRATEGIES = {  # by which a step may be placed on the ranks
    "replicate": '"replicate"',
    "zero1": '"zero1"',
    "sharded": "samestep.Sharded()",
    "kept": "samestep.Sharded(wrap=1, reshard_after_forward=False)",
    "wrapped": "samestep.Sharded(wrap=lambda module: isinstance(module, nn.Linear), cpu_offload=True)",
    "recomputing": "samestep.Sharded(activation_checkpointing=True)",
    "sharded halves": 'samestep.Sharded(param_dtype="bf16")',
}
OF_TIERS = {"sharded halves"}  # with bits of their own, on all numbers of ranks

RARE = [False, False, False, True]
CHOICES = {  # of each field of a program; the first one is the simplest, to which hypothesis shrinks
    "data": [*(name for name in DATA if name not in NAMED), *["streams"] * 4],  # of which each has much of its own
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
    "precision": ["32-true", "32-true", "32-true", "bf16-mixed", "16-mixed"],
    "loop": ["trainer", "trainer", "own"],
    "zero1": RARE,
    "shuffle": [False, True],
    "best": ["", "", "", '"loss"', '("loss", "min")', '("loss", "max")'],  # the argument
    "patience": RARE,
    "evaluated": ["", "", "", *METRICS],  # by which metrics
    "steps": [0, 0, 0, 1, 3, 5],  # `max_steps`
    "critic": RARE,  # a second step over the model, in a loop of one's own
    "reentrant": RARE,
    "files": RARE,  # of `torch.save`, in a loop of one's own
    "named": [""] * 40 + [*NAMED],  # what one line is about
}
SEVERAL = {
    "blocks": ([name for name in BLOCKS if name not in NAMED], 4),
    "hooks": ([name for name in HOOKS if name not in NAMED], 2),
    "options": (OPTIONS, 3),
}


class Choices:
    """The choices of a program or script, as attributes; those left out are the simplest."""

    simplest: ClassVar = {}

    def __init__(self, **choices):
        assert choices.keys() <= self.simplest.keys()
        vars(self).update(self.simplest | choices)

    def __repr__(self):
        changed = [f"{name}={value!r}" for name, value in vars(self).items() if value != self.simplest[name]]
        return f"{type(self).__name__}({', '.join(changed)})"

    def but(self, **choices):
        """The same with other choices."""
        return type(self)(**vars(self) | choices)


class Program(Choices):
    """The choices of a program."""

    simplest: ClassVar = {name: values[0] for name, values in CHOICES.items()} | dict.fromkeys((*SEVERAL, "shares"), ())

    @property
    def is_plain(self):
        """Whether a plain loop of PyTorch computes the same, but for the rounding of several microbatches."""
        return (
            self.data in NUMBERED
            and self.loss == "mean"
            and not (self.clip or self.zero1 or self.hooks or self.critic or self.best or self.patience)
            and self.precision == "32-true"
            and not any("drop_last" in option or "collated" in option for option in self.options)
            and self.scheduler not in BY_HOOK
            and not DRAWING & {*self.blocks}
            and (self.microbatches == 1 or not {*self.blocks} & {*NORMALISED, "sometimes", "counting", "bfloat16"})
            and (self.microbatches == 1 or (self.optimizer in ("sgd", "momentum") and not self.second))
        )


def allowed(p):
    """The nearest program that the documentation allows."""
    if p.named:  # a small program, of at least three steps of two microbatches
        p = Program(
            named=p.named, samples=p.samples, batch=max(4, p.batch), microbatches=max(2, p.microbatches), epochs=3
        )
        for name, known in {"data": DATA, "scheduler": SCHEDULERS, "hooks": HOOKS, "blocks": BLOCKS}.items():
            if p.named in known:
                p = p.but(**{name: (p.named,) if name in SEVERAL else p.named})
    p = p.but(microbatches=min(p.microbatches, p.batch))
    if p.loop == "own":
        p.hooks = tuple(hook for hook in p.hooks if hook == "average")
        p.best, p.patience, p.evaluated, p.steps = "", False, "", 0
        if p.data in OF_LOADERS and p.data != "streams":
            p.data = "noisy"
        if p.scheduler in BY_HOOK:
            p.scheduler = "step"
        p.files &= "counting" not in p.blocks  # its other buffer is not in a `state_dict`
    else:
        p.critic = p.files = False
        if p.best or p.patience:
            p.evaluated, p.best = p.evaluated or "classes", p.best or '"loss"'
    if p.data == "iterable" or p.data in OF_LOADERS:
        p.shuffle = False
    if p.data in OF_LOADERS and p.data != "streams":  # whose checkpoints are written between epochs
        p.steps = 0
    if p.critic or p.files:
        p.zero1 = False
    if p.zero1:
        p.second = ""
        if p.optimizer in NOT_ELEMENTWISE:
            p.optimizer = "adam"
        p.hooks = tuple(hook for hook in p.hooks if hook != "thawing")
    if "complex" in p.blocks:
        p.optimizer = "adam" if p.optimizer in NOT_COMPLEX else p.optimizer
        p.second = "sgd" if p.second in NOT_COMPLEX else p.second
    p.groups &= not p.second
    if p.loss == "sometimes nan" and p.seed % 2:
        p.precision = "16-mixed"  # whose scale changes by it
    if {"double", "bfloat16", "complex", "orthogonal"} & {*p.blocks}:
        p.precision = "32-true"
    if "recurrent" in p.blocks and p.precision == "16-mixed":  # torch has no LSTM of float16 on some CPUs
        p.precision = "bf16-mixed"
    if NORMALISED & {*p.blocks}:  # no microbatch has a single sample
        p.batch = max(p.batch, 2 * p.microbatches)
        short = p.samples % p.batch
        p.samples += 2 * p.microbatches - short if 0 < short < 2 * p.microbatches else 0
        if p.data in ("streams", "iterable"):
            p.samples = p.batch * max(1, p.samples // p.batch)
    if "thawing" in p.hooks:  # the first layer, and something must be left to train: the last
        p.hooks = tuple(hook for hook in p.hooks if hook != "drawing")
    if "drop_last=True" in str(p.options) or p.data == "own drop last":
        p.samples = max(p.samples, p.batch)
    left_out = ["spares"] if p.zero1 or p.shares else []
    left_out += [] if p.data in ("tensors", "dict", "nested", "tensor dataset", "transformed") else ["cache="]
    left_out += ["audit="] if p.data == "streams" else ["exact_states"]
    p.options = tuple(each for each in p.options if not any(word in each for word in left_out))
    if p.data == "streams" and p.seed % 2:
        p.options = tuple(dict.fromkeys((*p.options, "loader: exact_states=True")))
    return p


def placed(p, *strategies):
    """The nearest program that each of the strategies takes."""
    if {*strategies} == {"replicate"}:
        return p
    p = p.but(zero1=False, shares=())
    if p.optimizer in NOT_ELEMENTWISE:
        p.optimizer = "adam"
    p.hooks = tuple(hook for hook in p.hooks if hook != "thawing")  # what is trained is fixed
    refused = {"sometimes"}
    if {*strategies} - {"replicate", "zero1"}:
        p.hooks = ()  # no rank has all parameters
        p.options = tuple(each for each in p.options if "audit=" not in each)
        refused |= {"double", "bfloat16", "complex"}
        p.optimizer = "adam" if p.optimizer == "adam fused" else p.optimizer
    if {"recomputing", "sharded halves"} & {*strategies}:
        refused |= NORMALISED
    p.blocks = tuple(name for name in p.blocks if name not in refused)
    return allowed(p)


def plainer(p):
    """The program without what a plain loop cannot do."""
    names = ["loss", "precision", "hooks", "options", "clip", "zero1", "critic", "best", "patience", "named"]
    p = p.but(**{name: p.simplest[name] for name in names})
    blocks = DRAWING
    if p.microbatches % 2 == 0:
        blocks = {*DRAWING, *NORMALISED, "sometimes", "counting", "bfloat16"}
        p.optimizer, p.second = "momentum", ""
    else:
        p.microbatches = 1
    p.blocks = tuple(block for block in p.blocks if block not in blocks)
    p.data = p.data if p.data in NUMBERED else "tensors"
    p.scheduler = "none" if p.scheduler in BY_HOOK else p.scheduler
    return p


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


def text(p, own="train", processes=False):
    """The script of a program: its functions `train` and, if a plain loop can do it, `plain`."""
    inputs, target, whole = FORMS.get(p.data, PAIR)

    def given(call, **defaults):
        """The arguments of a call: those among the options of the program, and defaults of others."""
        options = [option.split(": ", 1)[1].split("=", 1) for option in p.options if option.startswith(f"{call}: ")]
        return "".join(f", {name}={value}" for name, value in (defaults | dict(options)).items())

    optimizer = [OPTIMIZERS[p.optimizer].format("trained[::2]" if p.second else "model.parameters()")]
    if p.groups:
        optimizer = [OPTIMIZERS[p.optimizer].format('[{"params": trained[:2], "lr": 0.01}, {"params": trained[2:]}]')]
    optimizer += [OPTIMIZERS[p.second].format("trained[1::2]")] if p.second else []
    optimizers = ", ".join(f"torch.optim.{each}" for each in optimizer)
    step = {"strategy": "strategy"} | ({"max_grad_norm": "0.3"} if p.clip else {}) | {"precision": f'"{p.precision}"'}
    step |= {"on_nonfinite": '"skip"'} if p.loss == "sometimes nan" else {}
    step |= {"strategy": '"zero1"'} if p.zero1 else {}
    step |= {"scheduler": "scheduler"} if p.scheduler != "none" and p.scheduler not in BY_HOOK else {}
    step |= {"counts_fn": f'lambda batch: {{"all": len({target})}}'} if p.loss == "counts" else {}
    writing = {"checkpoint_steps": "every", "checkpoint_minutes": "None", "keep": "1000"}
    writing |= {"digest_every": "1"} | ({"best": p.best} if p.best else {}) | ({"patience": "1"} if p.patience else {})
    form, of_target, metrics = METRICS.get(p.evaluated, ("{}", "Y", "none"))
    named = [f'"{n or "loss"}": samestep.metrics.{each.strip()}' for n, each in enumerate(metrics.split(";"))]
    metrics, measured = f"{{{', '.join(named)}}}", whole.replace("Y", of_target)
    fit = {"shuffle": p.shuffle, "resume": "resume"} | ({} if p.data in OF_LOADERS else {"num_workers": "num_workers"})
    fit |= {"eval_data": measured, "metrics": metrics, "forward": "forward"} if p.evaluated else {}
    fit |= {"max_steps": p.steps} if p.steps else {}
    loader = {"shuffle": p.shuffle, "num_workers": "num_workers"}
    loader = f"run.loader({DATA[p.data]}{given('loader', **loader)})"
    if p.data == "streams":
        loader = f"run.loader(streams={'Kept' if 'exact_states' in str(p.options) else 'stream'}{given('loader')})"
    is_made = p.data == "streams" or (p.data not in OF_LOADERS and "loader: " in str(p.options))
    collation = ", collate_fn=collated" if "collated" in str(p.options) else ""
    shares = {"shares": "SHARES[: communicator.world_size] if communicator else None"} if p.shares else {}
    names = dict(
        **vars(p),
        LOSSES=LOSSES,
        CLASSES=CLASSES.strip(),
        inputs=inputs,
        target=target,
        whole=whole,
        given=given,
        own=own,
        processes=processes,
        plain=p.is_plain,
        layers="\n".join(f"{BLOCKS[name]}," for name in p.blocks),
        optimizers=f"[{optimizers}]" if p.second else optimizers,
        scheduled=SCHEDULERS[p.scheduler].replace("optimizer", "optimizer[0]" if p.second else "optimizer"),
        outputs=form.format(f"model({inputs})"),
        metrics=metrics,
        measured=measured,
        predicting=f'forward=forward, precision="{p.precision}", num_workers=0{collation}',
        loader=loader,
        data_of_fit=loader if is_made else DATA[p.data],
        hooks_made=[HOOKS[name] for name in p.hooks] + ["Scheduling(scheduler)"] * (p.scheduler in BY_HOOK),
        run=given("Run", **shares),
        step=given("train_step", **step),
        trainer=given("Trainer", **writing),
        fit=given("fit", **fit),
    )
    return rendered(TEMPLATE.read_text(), names, {"train", "plain", own})


def rendered(template, names, wanted=()):
    """A template filled in: `<<…>>` is an expression, and `#?` the condition of a line and those indented below it."""
    lines, left_out, gap = [], None, ""
    for before, line in re.findall("(\n*)(.+)", template):
        line, _, condition = line.partition("  #? ")
        margin = len(line) - len(line.lstrip())
        if left_out is not None and margin > left_out:
            continue
        left_out = margin if condition and not eval(condition, dict(names)) else None
        filled = re.sub("<<(.*?)>>", lambda found: str(eval(found[1], dict(names))), line) if left_out is None else ""
        gap = max(gap, before)
        if filled.strip():
            lines.append(gap + filled.replace("\n", "\n" + " " * margin))
            gap = ""
    text = re.sub(r"\n+(?=class |def )|(?<=\n)\n(?=\S)", "\n\n\n", "".join(lines))
    return used(text, wanted)


def used(text, wanted):
    """A text without the functions and classes that nothing uses, but those that are wanted."""
    parts = [part.strip("\n") for part in re.split(r"\n{3,}", text)]
    while True:
        words = [{*re.findall(r"\w+", part)} for part in parts]
        names = [re.match(r"(?:@.*\n)?(?:def|class) (\w+)|", part)[1] for part in parts]
        others = [set().union(wanted, *words[:n], *words[n + 1 :]) for n in range(len(parts))]
        kept = [part for part, name, known in zip(parts, names, others, strict=True) if not name or name in known]
        if kept == parts:
            return "\n\n\n".join(parts) + "\n"
        parts = kept
