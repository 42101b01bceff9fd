"""Programs for ranks of which each has a part of every matrix, and the same training on one device."""

import copy
import os
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from tensor_models import LENGTH, MODELS, NUM_CLASSES, PADDING, PLANS, VOCABULARY
from torch import nn
from torch.nn import functional

from samestep.comm.pieces import Piece
from samestep.engine.strategies import TensorParallel
from samestep.engine.tensor_parallel import attention, dropout
from samestep.errors import NonFiniteError, PeerLostError, SamestepError
from samestep.train.metrics import accuracy
from samestep.train.run import Run


def texts(count):
    """Texts with padding at the end, the numbers of the samples, and targets."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (count, 1), generator=generator)
    x[torch.arange(LENGTH) >= lengths] = PADDING
    return x, torch.arange(count), torch.randint(0, NUM_CLASSES, (count,), generator=generator)


def loss(model, batch):
    """Of each next token, or of the class; noise from the generators before and after the model."""
    x, _, labels = batch
    scale = 1 + 0.1 * torch.rand(())
    scores = model(x) * scale
    scores = scores + 0.01 * torch.rand(scores.shape)
    return functional.cross_entropy(scores.flatten(0, -2), labels if scores.ndim == 2 else x.roll(-1, 1).flatten())


def counts_of(batch):
    """How many of a microbatch's labels are below five."""
    return (batch[2] < 5).sum()


def counted_loss(model, batch, counts):
    """A share of the loss over the labels below five of the whole batch."""
    losses = functional.cross_entropy(model(batch[0]), batch[2], reduction="none")
    return (losses * (batch[2] < 5)).sum() / counts


def infinite(model, batch):
    """Is no number where the first sample is."""
    total = loss(model, batch)
    return total / (0.0 if 0 in batch[1].tolist() else 1.0)


def with_weights(model, batch):
    """Reads the parameters."""
    return loss(model, batch) + sum(parameter.square().sum() for parameter in model.parameters())


def with_hidden(model, batch):
    """Reads what a hidden layer gave."""
    seen = []
    handle = model[3].register_forward_hook(lambda _, __, output: seen.append(output))
    total = loss(model, batch)
    handle.remove()
    return total + seen[0].abs().mean()


def of_scores(model, batch):
    """Of as many scores as there are."""
    return model(batch[0]).square().mean()


LOSSES = {
    "hidden": with_hidden,
    "mean of scores": of_scores,
    "mean": loss,
    "counts": counted_loss,
    "infinite": infinite,
    "weights": with_weights,
}
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    # Where a gradient is 0 but for rounding, as that of a key's bias, Adam would make the rounding as large as any.
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "nadam": torch.optim.NAdam,
    "lbfgs": torch.optim.LBFGS,
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
}


def dropped_by_the_part(like, dim, p, mesh):
    """Draws for the part that this rank has."""
    return functional.dropout(torch.ones_like(like), p)


def dropped_elsewhere(like, dim, p, mesh):
    """Draws for the whole, and takes what belongs to the first rank."""
    shape = list(like.shape)
    shape[dim] *= mesh.size()
    return functional.dropout(torch.ones(shape), p).narrow(dim, 0, like.shape[dim])


@contextmanager
def dropping(function):
    """Has divided dropout draw otherwise."""
    with mock.patch.object(dropout, "kept_part", function), mock.patch.object(attention, "kept_part", function):
        yield


BREAKERS = {
    None: nullcontext,
    "by the part": lambda: dropping(dropped_by_the_part),
    "of the first part": lambda: dropping(dropped_elsewhere),
}


def strategy_of(options):
    """The strategy: with a mesh the model is divided."""
    if "strategy" in options or not options.get("mesh"):
        return options.get("strategy", "replicate")
    return TensorParallel(PLANS.get(options.get("plan")), options.get("sequence", False))


def whole_state(step):
    """Parameters, buffers and optimizer state, of those of all ranks if they are spread, by name, in NumPy."""
    spread = step.spread
    named = dict(step.model.named_parameters()) if spread is None else dict(spread.parameters())
    state = dict(named)
    for number, optimizer in enumerate(step.optimizers):
        if spread is None:
            of = {name: optimizer.state[p] for name, p in named.items() if p in optimizer.state}
        else:
            of = spread.state_of(optimizer)
        state |= {f"{name} {key} {number}": v for name, values in of.items() for key, v in sorted(values.items())}
    state |= dict(step.model.named_buffers())
    return {
        name: torch.as_tensor(v.gather(step.spread_over) if isinstance(v, Piece) else v).detach().clone().numpy()
        for name, v in state.items()
    }


def make(communicator, name, options):
    """A run, and the step of a model."""
    o = {"num_microbatches": 5, "batch": 12, "optimizer": "momentum", **options}
    run = Run(o["batch"], o["num_microbatches"], o.get("seed", 3), communicator=communicator, mesh=o.get("mesh"))
    model = MODELS[name]()
    optimizer = OPTIMIZERS[o["optimizer"]](model.parameters())
    extra = {
        key: o[key] for key in ("max_grad_norm", "precision", "bucket_bytes", "compile", "shard_optimizer") if key in o
    }
    if o.get("loss") == "counts":
        extra["counts_fn"] = counts_of
    chosen = LOSSES[o.get("loss", "mean")]
    seen = []

    def noted(model, batch, *counts):
        seen.append((step.num_steps, tuple(batch[1].tolist())))
        return chosen(model, batch, *counts)

    step = run.train_step(model, optimizer, noted, strategy=strategy_of(o), **extra)
    return run, step, seen


def train(communicator, name, options):
    """Trains a model, divided where there is a mesh.

    Returns:
        Losses and norms by step, the whole state, the samples of the microbatches that this rank executed by step, how
        many numbers it has of each parameter and how many there are, scores and outputs.
    """
    run, step, seen = make(communicator, name, options)
    data = texts(options.get("samples", 27))
    loader = run.loader(data, shuffle=True)
    with BREAKERS[options.get("breaker")]():
        results = [step(batch) for _ in range(options.get("epochs", 1)) for batch in loader]
    held = dict(step.model.named_parameters()) if step.spread is None else step.spread.parts
    scores = {}
    if "gpt" not in name:
        scores = run.evaluate(step.model, data, {"accuracy": accuracy})
    outputs = run.predict(step.model, data)
    return {
        "steps": [(result.loss, result.grad_norm, result.num_samples) for result in results],
        "state": whole_state(step),
        "ran": seen,
        "held": {key: part.numel() for key, part in held.items()},
        "scores": scores,
        "outputs": outputs.numpy(),
    }


def in_two_dtypes(communicator, mesh):
    """Losses and norms of a model of which some is in half precision, and where its parameters end, in Python."""
    options = {"mesh": mesh, "plan": "mixed", "sequence": True, "optimizer": "plain", "max_grad_norm": 0.5}
    run, step, _ = make(communicator, "mixed", options)
    steps = [(result.loss, result.grad_norm) for result in map(step, run.loader(texts(27)))]
    state = dict(step.model.named_parameters() if step.spread is None else step.spread.parts)
    return steps, {name: state[name].tolist() for name in ("region.1.bias", "region.3.weight", "region.6.bias")}


def said(communicator, name, options):
    """What a rank says of a training that cannot be, and whether that has changed the model."""
    step = None
    try:
        run, step, _ = make(communicator, name, options)
        before = {key: part.detach().clone() for key, part in (step.spread.parts if step.spread else {}).items()}
        for batch in run.loader(texts(options.get("samples", 12))):
            step(batch)
    except SamestepError as error:
        if type(error) is NonFiniteError and step.spread:
            assert all(torch.equal(part, before[key]) for key, part in step.spread.parts.items())
            assert step.num_steps == 0
        return f"{type(error).__name__}: {error}"
    return "nothing"


def second_step(communicator, name, options):
    """What a rank says of a second training step over a model."""
    run, step, _ = make(communicator, name, options)
    try:
        run.train_step(step.model, torch.optim.SGD(step.model.parameters()), step.loss_fn)
    except SamestepError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def loses_rank_1(communicator, name, options):
    """What a rank says when rank 1 ends in the middle of its second microbatch."""
    try:
        run, step, _ = make(communicator, name, options)
        forwards = []

        def on_forward(*_):
            forwards.append(1)
            if len(forwards) == 2 and communicator.rank == 1:
                os._exit(7)

        next(module for module in step.model.modules() if isinstance(module, nn.Linear)).register_forward_hook(
            on_forward
        )
        for batch in run.loader(texts(12)):
            step(batch)
    except PeerLostError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def unfrozen(communicator, mesh):
    """The state after a first layer was unfrozen, and another frozen, in the middle of a training."""
    run, step, _ = make(communicator, "chain", {"mesh": mesh, "optimizer": "plain"})
    step.model[2].requires_grad_(False)
    for number, batch in enumerate(run.loader(texts(27))):
        if number == 1:
            step.model[2].requires_grad_(True)
            step.model[5].requires_grad_(False)
        step(batch)
    return whole_state(step)


def frozen(communicator, mesh):
    """Which parameters of a model with a frozen norm are trained, and the state after some steps."""
    options = {"mesh": mesh, "plan": "norm", "sequence": True, "optimizer": "plain"}
    run, step, _ = make(communicator, "frozen norm", options)
    for batch in run.loader(texts(27)):
        step(batch)
    return [name for name, leaf in step.model.named_parameters() if leaf.requires_grad], whole_state(step)


def copied(communicator, mesh):
    """What a copy of a model that does not train gives, while the model does."""
    _, step, _ = make(communicator, "encoder", {"mesh": mesh})
    average = copy.deepcopy(step.model).eval()
    step.model.train()
    with torch.no_grad():
        return average(texts(4)[0]).numpy()
