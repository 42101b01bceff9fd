"""Programs for ranks that train a model which `parallelize_module` has divided, and the same training on one device."""

import os

import torch
from programs import whole_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from samestep.errors import NonFiniteError, PeerLostError, SamestepError
from samestep.run.run import Run

VOCABULARY, LENGTH, WIDTH, HEADS = 24, 8, 16, 4
FEED = {"feed_in": ColwiseParallel(), "feed_out": RowwiseParallel()}
ATTENTION = {**dict.fromkeys(("queries", "keys", "values"), ColwiseParallel()), "attention_out": RowwiseParallel()}
BY_POSITIONS = {
    "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "feed_in": ColwiseParallel(input_layouts=Shard(1)),
    "feed_out": RowwiseParallel(output_layouts=Shard(1)),
    "last_norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
PLANS = {
    "heads and features": {**ATTENTION, **FEED, "extra.0": ColwiseParallel(), "extra.2": RowwiseParallel()},
    "features": FEED,
    "tables": {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        **FEED,
    },
    "positions": {**BY_POSITIONS, "norm": SequenceParallel()},
    "norm left out": BY_POSITIONS,
    "columns alone": {"feed_in": ColwiseParallel()},
    "uneven": {"uneven": ColwiseParallel()},
    None: {},
}


class Net(nn.Module):
    """Texts `[N, T]` to scores of each next token `[N, T, VOCABULARY]`; one layer takes part by what is in a text."""

    def __init__(self, attention=True, p=0.1):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = attention
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.norm, self.last_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.feed_in, self.feed_out = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.extra = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH))
        self.uneven = nn.Linear(WIDTH, 9)
        self.dropout = nn.Dropout(p)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("highest", torch.zeros(()))
        self.notes_highest = False

    def forward(self, x):
        hidden = self.tokens(x)
        if self.attention:
            heads = (
                layer(hidden).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
                for layer in (self.queries, self.keys, self.values)
            )
            mixed = functional.scaled_dot_product_attention(*heads)
            hidden = hidden + self.dropout(self.attention_out(mixed.transpose(1, 2).flatten(2)))
            if int(x.sum()) % 2:
                hidden = hidden + self.extra(hidden)
        self.fed = functional.gelu(self.feed_in(self.norm(hidden)))
        if self.notes_highest:
            self.highest = self.fed.detach().max()
        hidden = hidden + self.dropout(self.feed_out(self.fed))
        return self.head(self.last_norm(hidden))


def texts(count):
    """Texts, and the numbers of the samples."""
    generator = torch.Generator().manual_seed(6)
    return torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator), torch.arange(count)


def loss(model, batch):
    """Of each next token; noise from the generators before and after the model."""
    scale = 1 + 0.1 * torch.rand((), device=batch[0].device)
    scores = model(batch[0]) * scale
    scores = scores + 0.01 * torch.rand(scores.shape, device=scores.device)
    return functional.cross_entropy(scores.flatten(0, -2), batch[0].roll(-1, 1).flatten())


def with_weights(model, batch):
    """Reads a parameter without its module."""
    return loss(model, batch) + (model.feed_in.weight * torch.ones(WIDTH, device=batch[0].device)).square().sum()


LOSSES = {
    "mean": loss,
    "infinite": lambda model, batch: loss(model, batch) / (0.0 if 0 in batch[1].tolist() else 1.0),
    "weights": with_weights,
    "hidden": lambda model, batch: loss(model, batch) + model.fed.abs().mean(),
}
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    # Where a gradient is 0 but for rounding, as that of a key's bias, Adam would make the rounding as large as any.
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "nadam": torch.optim.NAdam,
    "lbfgs": torch.optim.LBFGS,
}


def make(communicator, options):
    """A run, the step of a model, and the samples of each microbatch that this rank executed, by step."""
    o = {"num_microbatches": 5, "batch": 12, "optimizer": "momentum", "plan": "heads and features", **options}
    run = Run(o["batch"], o["num_microbatches"], o.get("seed", 3), communicator=communicator, mesh=o.get("mesh"))
    model = Net(o.get("attention", True), o.get("p", 0.1))
    model.notes_highest = o.get("notes_highest", False)
    if o.get("frozen"):
        model.feed_in.requires_grad_(False)
    mesh = None if o["plan"] is None else run.mesh["tensor"]
    if o.get("own_mesh"):
        mesh = init_device_mesh(communicator.device.type, (communicator.world_size,))
    optimizer = OPTIMIZERS[o["optimizer"]](model.parameters())
    if mesh is not None:
        parallelize_module(model, mesh, PLANS[o["plan"]])
    if not o.get("optimizer_first"):
        optimizer = OPTIMIZERS[o["optimizer"]](model.parameters())
    seen = []

    def noted(model, batch):
        seen.append((step.num_steps, tuple(batch[1].tolist())))
        return LOSSES[o.get("loss", "mean")](model, batch)

    extra = ("max_grad_norm", "precision", "bucket_bytes", "compile", "shard_optimizer", "strategy")
    step = run.train_step(model, optimizer, noted, **{key: o[key] for key in extra if key in o})
    return run, step, seen


def train(communicator, options):
    """Losses and norms by step, the whole state, what was executed, sizes of what is held, scores and outputs."""
    run, step, seen = make(communicator, options)
    data = texts(27)
    loader = run.loader(data, shuffle=True)
    results = [step(batch) for _ in range(options.get("epochs", 1)) for batch in loader]
    held = dict(step.model.named_parameters()) if step.sharded_state is None else step.sharded_state.parts
    outputs = run.predict(step.model, data, forward=lambda model, batch: model(batch[0]).mean(1))
    scored = run.evaluate(step.model, data, {"hits": hits})
    return {
        "steps": [(result.loss, result.grad_norm, result.num_samples) for result in results],
        "state": whole_state(step),
        "ran": seen,
        "held": {key: part.numel() for key, part in held.items()},
        "scores": scored,
        "outputs": outputs.numpy(force=True),
    }


def hits(output, batch):
    """For each sample whether the highest score of its last token is that of its first."""
    return (output[:, -1].argmax(1) == batch[0][:, 0]).float()


def unfrozen(communicator, mesh):
    """The state after one layer was unfrozen, and another frozen, in the middle of a training."""
    run, step, _ = make(communicator, {"mesh": mesh, "frozen": True, **({} if mesh else {"plan": None})})
    for number, batch in enumerate(run.loader(texts(27))):
        if number == 1:
            step.model.feed_in.requires_grad_(True)
            step.model.attention_out.requires_grad_(False)
        step(batch)
    return whole_state(step)


def said(communicator, options):
    """The sentence of a training that cannot be."""
    step = None
    try:
        run, step, _ = make(communicator, options)
        before = {
            key: part.detach().clone() for key, part in (step.sharded_state.parts if step.sharded_state else {}).items()
        }
        for batch in run.loader(texts(24)):
            step(batch)
        if options.get("twice"):
            run.train_step(step.model, torch.optim.SGD(step.model.parameters()), loss)
    except SamestepError as error:
        if type(error) is NonFiniteError and step.sharded_state:
            assert all(torch.equal(part, before[key]) for key, part in step.sharded_state.parts.items())
            assert step.num_steps == 0
        return f"{type(error).__name__}: {error}"
    return "nothing"


def loses_rank_1(communicator, options):
    """The sentence of a rank when rank 1 ends in the middle of its second microbatch."""
    try:
        run, step, _ = make(communicator, options)
        forwards = []

        def on_forward(*_):
            forwards.append(1)
            if len(forwards) == 2 and communicator.rank == 1:
                os._exit(7)

        step.model.feed_in.register_forward_hook(on_forward)
        for batch in run.loader(texts(12)):
            step(batch)
    except PeerLostError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def mesh_of(communicator, mesh):
    """The axes of a run's mesh, its ranks, and those of the slice along "tensor"."""
    run = Run(12, 6, communicator=communicator, mesh=mesh)
    assert run.mesh is run.mesh
    return run.mesh.mesh_dim_names, run.mesh.mesh.tolist(), run.mesh["tensor"].mesh.tolist()
