"""Buffers and attributes that the forward writes: those of the first chunk stay."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from usual import case, results, rows, train, wrap


class Net(nn.Module):
    """One layer with buffers; `change` makes the result of it."""

    def __init__(self, change, **buffers):
        super().__init__()
        self.fc, self.change = nn.Linear(4, 4), change
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.change(self, x)


@case
def written_in_place():
    def change(net, x):
        h = net.fc(x - net.centre) * net.fixed
        if net.training:
            net.count += 1
            with torch.no_grad():
                net.centre.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return h

    fixed = torch.ones(4)
    model = wrap(Net(change, count=torch.zeros((), dtype=torch.long), centre=torch.zeros(4), fixed=fixed))
    trained = train(model, rows(10, 4))
    print("count", int(model.module.count))
    return trained


@case
def used_after_it_was_written():
    """The backward needs what each chunk saw."""

    def change(net, x):
        with torch.no_grad():
            net.scale.mul_(0.5).add_(x.abs().mean(0))
        return net.fc(x) * net.scale

    return train(wrap(Net(change, scale=torch.ones(4))), rows(10, 4))


@case
def replaced():
    def change(net, x):
        net.count = net.count + 1
        net.centre = 0.9 * net.centre + 0.1 * x.mean(0).detach()
        return net.fc(x - net.centre)

    return train(wrap(Net(change, count=torch.zeros(()), centre=torch.zeros(4))), rows(10, 4))


@case
def made_at_first_need():
    def change(net, x):
        if not hasattr(net, "angles"):
            net.register_buffer("angles", torch.arange(4.0, device=x.device).cos(), persistent=False)
            net.register_buffer("level", torch.zeros(4, device=x.device))
        net.level += x.detach().mean(0)
        return net.fc(x) * net.angles + net.level

    return train(wrap(Net(change)), rows(10, 4))


@case
def large():
    """More than a megabyte, that evaluation leaves alone, and training writes to behind autograd's back."""

    def change(net, x):
        if net.training:
            net.codes.data.mul_(0.9).add_(x.mean())
        return net.fc(x) * net.codes.mean()

    model = wrap(Net(change, codes=torch.randn(600, 512)))
    model.eval()
    outs = [model(torch.randn(8, 4).cuda()).sum().item() for _ in range(4)]
    model.train()
    trained = train(model, rows(8, 4))
    codes = model.module.codes
    return outs, trained["loss"], codes.sum(), codes[::100, ::100], model.module.fc.weight


@case
def attributes_written():
    def change(net, x):
        net.num_calls = getattr(net, "num_calls", 0) + 1
        net.last_mean = x.mean().item()
        return net.fc(x)

    return train(wrap(Net(change)), rows(10, 4))


@case
def checkpointed():
    """Activation checkpointing: parts of the forward run again in the backward, and must leave the statistics alone."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)
            self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])

        def body(self, x):
            return x + self.fc(self.norm(x)).relu()

        def forward(self, x):
            h = checkpoint(self.body, checkpoint(self.body, x, use_reentrant=False), use_reentrant=False)
            h = checkpoint(lambda h: self.norms[0](h).relu(), h, use_reentrant=False)
            return checkpoint(self.norms[1], h, use_reentrant=False, determinism_check="none")

    model = wrap(nn.Linear(4, 8), Block(), nn.Linear(8, 2))
    trained = train(model, rows(12, 4))
    model.eval()
    return {**trained, "out": model(torch.randn(4, 4).cuda())}


@case
def checkpointed_nested_wrap():
    """A part that is checkpointed and wrapped as well: the second run must not be shared out again."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 8)
            self.inner = nn.DataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)))

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=False)

    return train(wrap(Outer()), rows(12, 4))


RESULT = results()
