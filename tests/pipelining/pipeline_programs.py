"""Programs for ranks that train a model in stages, and the same training on one device."""

import gc
import weakref
from collections import Counter
from contextlib import nullcontext
from unittest import mock

import torch
from programs import bits
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from samestep.doctor.proof_programs import StagedGpt
from samestep.engine import gradients
from samestep.engine.pipelining import p2p, pipeline_strategy
from samestep.engine.pipelining.p2p import PointToPoint
from samestep.engine.pipelining.pipeline_strategy import PipelineStrategy
from samestep.engine.pipelining.stages import parts_of
from samestep.engine.strategy_options import Pipeline
from samestep.errors import NonFiniteError, SamestepError
from samestep.metrics import accuracy, cross_entropy
from samestep.run.run import Run

NUM_CLASSES = 10


def mlp():
    """Dropout in every part, a layer that no gradient reaches, and a frozen parameter."""
    layers = [nn.Flatten()]
    for inputs, outputs in ((64, 33), (33, 48), (48, 24), (24, 40)):
        layers.append(nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh(), nn.Dropout(0.2)))
    model = nn.Sequential(*layers, nn.Linear(40, NUM_CLASSES))
    model[3][0].bias.requires_grad_(False)
    return model


def convolutions():
    """BatchNorm in two stages, an activation that overwrites its input, strides that are not the usual ones."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, bias=False),
        Transposed(),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(288, NUM_CLASSES),
    )


class Transposed(nn.Module):
    """Gives its input back with its last two dimensions exchanged, in the same memory."""

    def forward(self, x):
        return x.transpose(2, 3)


class TwoStreams(nn.Module):
    """Parts that hand on tuples, one entry of which no later part uses, and one that needs no gradient."""

    def __init__(self):
        super().__init__()
        self.first = Fork()
        self.middle = nn.ModuleList([Mix(), Mix()])
        self.last = Join()

    def pipeline_stages(self):
        middle = [(f"middle.{number}", part) for number, part in enumerate(self.middle)]
        return [("first", self.first), *middle, ("last", self.last)]

    def forward(self, x):
        for _, part in self.pipeline_stages():
            x = part(x)
        return x


class Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(64, 16), nn.Linear(64, 16), nn.Linear(64, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.left(x), self.right(x).t(), self.unused(x), x.abs().mean(1, keepdim=True)


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 16), nn.Parameter(torch.rand(16))

    def forward(self, x):
        left, right, unused, size = x
        mixed = torch.tanh(self.linear(left) + right.t() * self.scale) * size
        return mixed + left, functional.dropout(right.t(), 0.2, self.training).t() * 0.5, unused, size


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, NUM_CLASSES)

    def forward(self, x):
        return self.linear(torch.cat([x[0], x[1].t()], 1))


def gpt():
    """Four blocks, dropout, and output weights of its own."""
    return StagedGpt(layers=4, width=16, heads=2, context=8, dropout=0.1, tied=False)


class Masked(nn.Module):
    """Makes its mask in its first forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mask", None)
        self.register_buffer("unused", None)

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.arange(16, device=x.device) % 3 != 0
        return torch.tanh(self.linear(x * self.mask))


def masked():
    """Buffers of several stages that are there from the first forward on."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), Masked(), Masked(), Masked(), nn.Linear(16, NUM_CLASSES))


MODELS = {"mlp": mlp, "convolutions": convolutions, "two streams": TwoStreams, "gpt": gpt, "masked": masked}


def images(count):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 1, 8, 8, generator=generator)
    return x, torch.randint(0, NUM_CLASSES, (count,), generator=generator)


def texts(count):
    generator = torch.Generator().manual_seed(6)
    x = torch.randint(0, 256, (count, 8), generator=generator)
    return x, x.roll(-1, 1)


def loss(model, batch):
    """Noise on what is real, drawn before the model is called, and more of it afterwards."""
    x = batch[0]
    if x.is_floating_point():
        x = x + 0.1 * torch.rand(x.shape, device=x.device)
    scores = model(x)
    scores = scores + 0.01 * torch.rand(scores.shape, device=scores.device)
    return functional.cross_entropy(scores.flatten(0, -2), batch[1].flatten())


def make_optimizer(model, kind):
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    if kind == "fused adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    if kind == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=0.02)
    if kind == "adam with state":
        earlier, optimizer = (torch.optim.Adam(model.parameters(), lr=0.01) for _ in range(2))
        for parameter in model.parameters():
            parameter.grad = parameter.detach().square() + 0.1
        earlier.step()
        optimizer.load_state_dict(earlier.state_dict())
        return optimizer
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


class LeftFold:
    """Adds leaves from left to right, as a plain accumulation of gradients does, in the place of a `TreeSum`."""

    def __init__(self, add):
        self._add, self.sums, self.blocks = add, (), ()

    def push(self, block, value):
        self.sums = (self._add(self.sums[0], value) if self.sums else value,)
        self.blocks = (block,)

    def pop_sibling(self, block):
        """None: no sum takes the gradient of a leaf by itself."""

    def root(self):
        return self.sums[0] if self.sums else None


def unpacked_alone(generators, tensors, note):
    """The value of a message; each stage draws on from its own state."""
    with generators.preserved():
        return p2p.unpacked(generators, tensors, note)


BREAKERS = {
    None: nullcontext,
    "randomness": lambda: mock.patch.object(pipeline_strategy, "unpacked", unpacked_alone),
    "order": lambda: mock.patch.object(gradients, "TreeSum", LeftFold),
}


def train(communicator, name, options):
    """Trains a model, in stages where there is a mesh.

    Returns:
        The digest, losses and norms by step, scores and outputs, how often this rank ran each part by step, the parts
        of its stages, and how many numbers its parameters hold.
    """
    o = {"num_microbatches": 8, "batch": 24, "samples": 70, "optimizer": "sgd", "epochs": 1, **options}
    run = Run(o["batch"], o["num_microbatches"], 3, communicator=communicator, mesh=o.get("mesh"))
    model = MODELS[name]()
    optimizer = make_optimizer(model, o["optimizer"])
    ran = Counter()

    def count(part):
        part[1].register_forward_hook(lambda *_: ran.update([(part[0], step.num_steps)] * model.training))

    for part in parts_of(model):
        count(part)
    strategy = Pipeline(**o.get("pipeline", {})) if o.get("mesh") else "replicate"
    keys = ("max_grad_norm", "precision", "counts_fn", "bucket_bytes", "late_check")
    extra = {key: o[key] for key in keys if key in o}
    step = run.train_step(model, optimizer, o.get("loss", loss), strategy=strategy, **extra)
    data = texts(o["samples"]) if name == "gpt" else images(o["samples"])
    loader = run.loader(data, shuffle=True)
    with BREAKERS[o.get("breaker")]():
        results = [step(batch) for _ in range(o["epochs"]) for batch in loader]
    scores = {} if name == "gpt" else run.evaluate(model, data, {"accuracy": accuracy, "loss": cross_entropy})
    placed = step.strategy
    pipelined = placed.pipelined if isinstance(placed, PipelineStrategy) else None
    return {
        "digest": bits(step),
        "steps": [(result.loss.hex(), result.grad_norm.hex(), result.num_samples) for result in results],
        "scores": scores,
        "outputs": run.predict(model, data).numpy(force=True).tobytes(),
        "ran": dict(ran),
        "parts": () if pipelined is None else pipelined.stages[pipelined.p2p.rank].names,
        "held": sum(parameter.numel() for parameter in model.parameters()),
    }


def most_on_their_way(communicator, schedule):
    """The most messages that this rank held at once because they may not have arrived."""
    seen, send = [], PointToPoint.send

    def noted(self, *arguments):
        sent = send(self, *arguments)
        seen.append(len(self._under_way))
        return sent

    with mock.patch.object(PointToPoint, "send", noted):
        train(communicator, "mlp", {"mesh": {"pipe": 2}, "pipeline": {"schedule": schedule}, "num_microbatches": 24})
    return max(seen)


def left_of_a_step(communicator, schedule):
    """What one step leaves in memory of its batch, counts and messages, and how many of these were written to.

    Returns:
        How many tensors of the batch and its counts, and of what was sent, there were; how many of each are still
        there after the step; how many of those that were sent held something else in the end than when they were sent.
    """
    given, sent, held, send = [], [], [], PointToPoint.send

    def noted(self, target, tensors, note=b""):
        held.extend((tensor.detach(), tensor.detach().clone()) for tensor in tensors if tensor is not None)
        on_their_way = send(self, target, tensors, note)
        sent.extend(weakref.ref(raw) for _, raw in on_their_way)
        return on_their_way

    def noting_loss(model, batch, counts):
        given.extend(weakref.ref(tensor) for tensor in (*batch, counts))
        return counted_loss(model, batch, counts)

    run = Run(24, 8, 3, communicator=communicator, mesh={"pipe": communicator.world_size})
    model = mlp()
    strategy = Pipeline(schedule=schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = run.train_step(model, optimizer, noting_loss, strategy=strategy, counts_fn=counts_of)
    with mock.patch.object(PointToPoint, "send", noted):
        step(images(24))
    gc.collect()
    written_to = sum(not torch.equal(tensor, before) for tensor, before in held)
    alive = [sum(ref() is not None for ref in refs) for refs in (given, sent)]
    return len(given), len(sent), alive, written_to


def counts_of(batch):
    """How many of a microbatch's labels are below five."""
    return (batch[1] < 5).sum()


def counted_loss(model, batch, counts):
    """A share of the loss over the labels below five of the whole batch."""
    losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * (batch[1] < 5)).sum() / counts


def twice(model, batch):
    """Calls the model twice."""
    return functional.cross_entropy(model(batch[0]) + model(-batch[0]), batch[1])


def with_scalars(model, batch):
    """Returns a scalar beside the loss."""
    return functional.cross_entropy(model(batch[0]), batch[1]), {"one": 1.0}


def infinite(model, batch):
    """Is no number."""
    return functional.cross_entropy(model(batch[0]), batch[1]) * float("inf")


def never(model, batch):
    """Does not call the model."""
    return batch[0].sum()


def by_two(model, batch):
    """Gives the model two values."""
    return model(batch[0], batch[1]).sum()


def with_weights(model, batch):
    """Reads a parameter."""
    return functional.cross_entropy(model(batch[0]), batch[1]) + sum(p.square().sum() for p in model.parameters())


class Recurrent(nn.Module):
    """Says nothing of what it applies one after another."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, NUM_CLASSES)

    def forward(self, x):
        return self.linear(x.flatten(1))


class Leftover(nn.Module):
    """Has a parameter in none of its parts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, NUM_CLASSES))
        self.shift = nn.Parameter(torch.zeros(1))

    def pipeline_stages(self):
        return list(self.layers.named_children())


class Recomputed(nn.Module):
    """Runs its forward anew in the backward, with a BatchNorm in it."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


def recomputed():
    """Statistics that a backward changes."""
    middle = Recomputed(nn.Linear(16, 16), nn.BatchNorm1d(16))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), middle, nn.Linear(16, NUM_CLASSES))


class Gain(nn.Module):
    """Multiplies by one number."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.gain * x


def scaled():
    """Has a parameter of no dimension."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Gain(), nn.Linear(8, NUM_CLASSES))


def tied_gpt():
    """Output weights that are the embedding's."""
    model = StagedGpt(layers=2, width=16, heads=2, context=8, dropout=0.0, tied=False)
    model.head.weight = model.byte_embedding.weight
    return model


MODELS |= {"recurrent": Recurrent, "leftover": Leftover, "tied": tied_gpt, "recomputed": recomputed, "scaled": scaled}


def refusal(communicator, name, options):
    """What a rank says of a training that cannot be."""
    try:
        spares = options.get("spares", 0)
        run = Run(24, 8, 3, communicator=communicator, mesh=options.get("mesh"), spares=spares)
        model = MODELS[name]()
        optimizer = options.get("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
        strategy = options.get("strategy", Pipeline(**options.get("pipeline", {})))
        before = [parameter.detach().cpu().clone() for parameter in model.parameters()]
        step = run.train_step(model, optimizer, options.get("loss", loss), strategy=strategy, **options.get("more", {}))
        for batch in run.loader(images(24)):
            step(batch)
    except SamestepError as error:
        if type(error) is NonFiniteError:
            left = [parameter.cpu() for parameter in model.parameters() if parameter.numel()]
            assert all(any(torch.equal(parameter, start) for start in before) for parameter in left)
        return f"{type(error).__name__}: {error}"
    return "nothing"
