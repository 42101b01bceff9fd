"""Programs that train on the ordered process group, by DistributedDataParallel and by sharding."""

import hashlib
import os
import signal
import warnings

import torch
import torch.distributed as dist
from group_programs import group_of, plain_tree
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from worlds import device_of

from samestep.logical import collectives


def digest_of(model):
    """A digest of the parameters' bits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Net(torch.nn.Module):
    """Layers of several shapes, a normalisation with buffers, and a layer that only some forwards use."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 40)
        self.norm = torch.nn.BatchNorm1d(40)
        self.second = torch.nn.Linear(40, 30)
        self.unused = torch.nn.Linear(30, 30)
        self.last = torch.nn.Linear(30, 2)

    def forward(self, inputs, use=True):
        hidden = torch.tanh(self.second(self.norm(self.first(inputs))))
        return self.last(self.unused(hidden) if use else hidden)


def batch_of(rank, step):
    """The batch of a rank."""
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train_by_hand(ranks, divide=lambda gradient, ranks: gradient * (1 / ranks), steps=3):
    """What DistributedDataParallel is to do, on one process: gradients divided, then added along the tree."""
    models = []
    for _ in range(ranks):
        torch.manual_seed(0)
        models.append(Net())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(steps):
        for model in models[1:]:  # the buffers of rank 0 win
            model.load_state_dict({**model.state_dict(), **dict(models[0].named_buffers())})
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            model(batch_of(rank, step)).square().sum().backward()
        for parameters in zip(*[model.parameters() for model in models], strict=True):
            total = plain_tree([divide(parameter.grad, ranks) for parameter in parameters], torch.add)
            for parameter in parameters:
                parameter.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
    return digest_of(models[0])


DDP_VARIANTS = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 0.001},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused looked for": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "hook": {"hook": default_hooks.allreduce_hook},
    "builtin hook": {"hook": dist.BuiltinCommHookType.ALLREDUCE},
}


def train_ddp(rank, ranks, variant, steps=3):
    """Trains by DistributedDataParallel; the digest of the parameters."""
    options = dict(DDP_VARIANTS[variant])
    hook = options.pop("hook", None)
    torch.manual_seed(rank)  # rank 0's parameters are broadcast
    if rank == 0:
        torch.manual_seed(0)
    device = device_of(rank)
    model = DistributedDataParallel(Net().to(device), **options)
    if callable(hook):
        model.register_comm_hook(None, hook)
    elif hook is not None:
        model._register_builtin_comm_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch_of(rank, step).to(device)).square().sum().backward()
        optimizer.step()
    return digest_of(model.module)


def train_unevenly(rank, ranks):
    """Accumulation without synchronisation, a layer that is not used, half-precision gradients, join; digests."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            model(batch_of(rank, step), use=False).square().sum().backward()
        model(batch_of(rank, step + 10), use=step % 2 == 0).square().sum().backward()
        optimizer.step()
    digests = [digest_of(model.module)]
    torch.manual_seed(0)
    joined = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(3, 1)))
    optimizer = torch.optim.SGD(joined.parameters(), lr=0.01)
    with warnings.catch_warnings(), Join([joined]):  # which sets a filter for good
        for step in range(2 + rank):
            optimizer.zero_grad()
            joined(batch_of(rank, step)).sum().backward()
            optimizer.step()
    return [*digests, digest_of(joined.module)]


def train_joined(rank, ranks):
    """Gradients of ranks with 2, 3, … steps that are divided by how many are left: those of the last step."""
    model, gradients = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False)), []
    for by_all in (True, False):
        with warnings.catch_warnings(), model.join(divide_by_initial_world_size=by_all):
            for _ in range(2 + rank):
                model.zero_grad()
                model(torch.full((1, 1), 6.0)).sum().backward()
        gradients.append(float(model.module.weight.grad))
    return gradients


def train_in_rank_order(rank, ranks):
    """The twin: sums go from left to right."""
    real = collectives.tree_sum
    collectives.tree_sum = left_fold
    try:
        return train_ddp(rank, ranks, "plain")
    finally:
        collectives.tree_sum = real


def left_fold(values, add):
    """The sum from left to right."""
    total = values[0]
    for value in values[1:]:
        total = add(total, value)
    return total


def die_in_training(rank, world_size, path, pipe):
    """A process that trains by DistributedDataParallel, until the last rank dies; the error of its backward."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.alarm(100)
    with group_of(rank, world_size, path):
        model = DistributedDataParallel(Net())
        model(batch_of(rank, 0)).sum().backward()
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(batch_of(rank, 1)).sum().backward()
        except Exception as error:
            pipe.send(str(error))
