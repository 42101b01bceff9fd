"""Models and loops for sharded states: `program(communicator, …)`."""

from collections import Counter

import torch
from programs import bits, masked_loss
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from samestep.engine.observer import StepObserver
from samestep.engine.strategy_options import Sharded
from samestep.errors import SamestepError
from samestep.metrics import accuracy, cross_entropy
from samestep.run.run import Run


class Chain(nn.Module):
    """Blocks with residuals, dropout, BatchNorm, tied ends, and layers with fewer rows than there are ranks."""

    def __init__(self, width=16, norm=nn.BatchNorm1d):
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 33), nn.GELU(), nn.Dropout(0.1), nn.Linear(33, width)) for _ in range(3)
        )
        self.norm = norm(width)
        self.twice = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, 2)
        self.again = nn.Linear(width, width, bias=False)
        self.again.weight = self.twice.weight

    def forward(self, x):
        """[n, 5] -> [n, 2]."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.again(torch.tanh(self.twice(self.norm(x)))))


class Fickle(nn.Module):
    """Whether a bias inside a block takes part depends on the microbatch; another never does, and one is frozen."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.extra = nn.Parameter(torch.ones(8))
        self.unused = nn.Parameter(torch.ones(3, 4))
        self.fixed = nn.Linear(8, 8)
        self.fixed.requires_grad_(False)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        """[n, 5] -> [n, 2]."""
        x = self.fixed(torch.tanh(self.first(x)))
        if x.detach().sum() > 0:
            x = x + self.extra
        return self.last(x)


class Skipping(nn.Module):
    """Which of two equal blocks runs depends on the microbatch."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        """[n, 5] -> [n, 2]."""
        x = self.first(x)
        return self.last(self.blocks[int(x.detach().sum() > 0)](x))


class Looped(nn.Module):
    """Blocks that are called several times, one of them with what needs no gradient."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.block = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 8))
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        """[n, 5] -> [n, 2]."""
        x = self.first(x) + self.first(x * x)
        for _ in range(3):
            x = x + self.block(x)
        return self.last(x)


def layer_normed():
    """A chain for microbatches of a single sample."""
    return Chain(norm=nn.LayerNorm)


def table(num_samples):
    """Features and labels, drawn once and for all."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_samples, 5, generator=generator), torch.randint(0, 2, (num_samples,), generator=generator)


def classify(model, batch):
    """A mean over the microbatch."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def by_counts(model, batch, counts):
    """Its share of a loss with two denominators."""
    scores = model(batch[0])
    first = functional.cross_entropy(scores, batch[1], reduction="sum") / counts["all"]
    return first + scores[batch[1] == 1].square().sum() / counts["ones"]


def counted(batch):
    """The denominators of `by_counts`."""
    return {"all": len(batch[1]), "ones": 1 + (batch[1] == 1).sum()}


def twice(model, batch):
    """A loss that calls the model twice."""
    with torch.no_grad():
        teacher = model(batch[0])
    other = functional.mse_loss(model(-batch[0]), teacher)
    return classify(model, batch) + other


LOSSES = {"mean": classify, "masked": masked_loss, "twice": twice}


class Written(nn.Module):
    """Writes to what its modules give: to views, of which FSDP2 warns, since its hooks on them would get lost."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x):
        """[n, 5] -> [n, 2]."""
        x = self.first(torch.stack([x, -x, 2 * x], 1)).relu_()
        y = self.second(x)
        y += 0.5
        return self.last(y * x).mul_(2).sum(1)


class Gated(nn.Module):
    """Reads its argument several times."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.sigmoid(self.gate(x)) * self.up(x) + x.square()


class Reused(nn.Module):
    """Activations of several uses: in a module and beside it, in two modules, and as several arguments of one."""

    def __init__(self):
        super().__init__()
        self.first, self.gated, self.last = nn.Linear(5, 8), Gated(), nn.Linear(8, 2)
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x):
        """[n, 5] -> [n, 2]."""
        x = self.mixed(self.first(x))
        pairs = x.unflatten(1, (4, 2))
        pairs = pairs + self.attention(pairs, key=pairs, value=pairs, need_weights=False)[0]
        return self.last(pairs.flatten(1))

    def mixed(self, x):
        """[n, 8] -> [n, 8]."""
        return x + self.gated(x) + self.gated(x)


class Reentrant(Reused):
    """Runs a module that is sharded by itself anew within a backward of its own."""

    def mixed(self, x):
        """[n, 8] -> [n, 8]."""
        return checkpoint(super().mixed, x, use_reentrant=True)


class ReentrantFirst(Reentrant):
    """Runs it outside of that as well, later in the forward and so earlier in the backward."""

    def mixed(self, x):
        """[n, 8] -> [n, 8]."""
        return self.gated(super().mixed(x))


class ReentrantLast(Reentrant):
    """Runs it outside of that as well, earlier in the forward and so later in the backward."""

    def mixed(self, x):
        """[n, 8] -> [n, 8]."""
        return super().mixed(self.gated(x))


MODELS = {
    "reused": Reused,
    "reentrant": Reentrant,
    "reentrant first": ReentrantFirst,
    "reentrant last": ReentrantLast,
    "written": Written,
    "chain": Chain,
    "looped": Looped,
    "fickle": Fickle,
    "skipping": Skipping,
    "layer normed": layer_normed,
}
STRATEGIES = {
    "replicate": "replicate",
    "sharded": Sharded(),
    "tiny groups": Sharded(wrap=40),
    "reused": Sharded(wrap=lambda module: isinstance(module, Gated | nn.MultiheadAttention)),
    "recomputed": Sharded(activation_checkpointing=True, wrap=lambda module: isinstance(module, nn.Sequential)),
    "offloaded": Sharded(cpu_offload=True),
    "half": Sharded(param_dtype="bf16"),
    "zero1": "zero1",
}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


class Counting(StepObserver):
    """Counts which microbatches a rank runs, by step."""

    def __init__(self, ran):
        self.ran = ran

    def on_microbatch(self, step, index, value):
        self.ran.update([(step, index)])


def train(communicator, strategy, options):
    """Trains a small model.

    Returns:
        Bits, losses and norms as hex, the microbatches that this rank ran by step, the scores, and the elements of
        optimizer state that this rank has.
    """
    defaults = {
        "model": "chain",
        "num_microbatches": 8,
        "batch": 32,
        "samples": 82,
        "optimizer": "adamw",
        "loss": "mean",
    }
    o = {**defaults, **options}
    run = Run(o["batch"], o["num_microbatches"], 3, communicator=communicator)
    model = MODELS[o["model"]]()
    groups = [{"params": list(model.parameters())[:3], "weight_decay": 0.1}, {"params": list(model.parameters())[3:]}]
    optimizer = OPTIMIZERS[o["optimizer"]](groups)
    step_options = {k: o[k] for k in ("max_grad_norm", "precision", "bucket_bytes", "overlap") if k in o}
    loss = by_counts if o["loss"] == "counts" else LOSSES[o["loss"]]
    if o["loss"] == "counts":
        step_options["counts_fn"] = counted
    if "gamma" in o:
        step_options["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, o["gamma"])
    ran = Counter()
    step_options.update(strategy=STRATEGIES[strategy], observers=[Counting(ran)])
    step = run.train_step(model, optimizer, loss, **step_options)
    loader = run.loader(table(o["samples"]), shuffle=True)
    steps = []
    for _ in range(o.get("epochs", 2)):
        for batch in loader:
            result = step(batch)
            steps.append((result.loss.hex(), result.grad_norm.hex()))
    scores = run.evaluate(model, table(o["samples"] + 1), {"accuracy": accuracy, "loss": cross_entropy})
    outputs = run.predict(model, table(21)[0])
    steps.append((step(loader_batch(o)).loss.hex(), "after evaluation"))
    state = sum(t.numel() for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    return bits(step), steps, dict(ran), (scores, outputs.tolist()), state


def loader_batch(options):
    """A global batch of the script's own."""
    return table(options["batch"])


def sentence(program, *args):
    """The sentence with which a step, or its making, is refused; else what the program returns."""
    try:
        return program(*args)
    except SamestepError as error:
        return f"{type(error).__name__}: {error}"


def refused(communicator, strategy, options):
    """The sentence with which a training is refused."""
    return sentence(train, communicator, strategy, options)


def frozen_later(communicator, strategy):
    """What a step says after a parameter of the model was frozen."""
    run = Run(8, 4, 1, communicator=communicator)
    model = Chain()
    step = run.train_step(model, OPTIMIZERS["momentum"](model.parameters()), classify, strategy=strategy)
    batches = list(run.loader(table(16)))
    step(batches[0])
    model.last.weight.requires_grad_(False)
    return sentence(lambda: step(batches[1]) and "went on")
