"""Inputs and outputs of many kinds."""

from collections import OrderedDict, namedtuple
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import data_parallel
from usual import Net, case, results, train, wrap


class Batch(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


@case
def list_of_tensors():
    """Lists, tuples, dicts and named tuples of tensors."""

    def forward(net, pair, batch, extra):
        assert isinstance(pair, list), type(pair)
        assert isinstance(batch, Batch), type(batch)
        h = net.fc(pair[0]) + net.fc(pair[1]) + extra["bias"]["value"] * extra["weights"][0]
        return nn.functional.cross_entropy(h + batch.images, batch.labels, reduction="none")

    def batch():
        pair = [torch.randn(10, 4).cuda(), torch.randn(10, 4).cuda()]
        extra = {"bias": {"value": torch.randn(10, 1).cuda()}, "weights": (torch.rand(10, 3).cuda(), 3)}
        return pair, Batch(torch.randn(10, 3).cuda(), torch.randint(3, (10,)).cuda()), extra

    return train(wrap(Net(forward, fc=nn.Linear(4, 3))), batch, loss_of=lambda losses: losses.mean())


@case
def none_and_keywords():
    """None, keywords, numbers, strings and flags."""

    def forward(net, x, mask=None, *, scale=1.0, mode="sum", shift=None, residual=False):
        h = net.fc(x) * scale
        h = h if mask is None else h.masked_fill(mask[:, None], 0.0)
        h = h if shift is None else h + shift
        h = h + x[:, :3] if residual else h
        return h.sum(1) if mode == "sum" else h.mean(1)

    model, x, mask = wrap(Net(forward, fc=nn.Linear(4, 3))), torch.randn(8, 4).cuda(), torch.arange(8).cuda() % 3 == 0
    outs = [
        model(x, None, scale=2.0),
        model(x, mask, mode="mean", residual=True),
        model(x=x, mask=mask, shift=torch.randn(8, 1).cuda()),
        data_parallel(model.module, x) + data_parallel(model.module, x, None, module_kwargs={"scale": 0.5}),
    ]
    sum(out.square().sum() for out in outs).backward()
    return outs, model.module.fc.weight.grad


@case
def inputs_of_all_kinds():
    """From the host, expanded, transposed and sliced ones, some that a chunk does not use, some shorter ones."""

    def forward(net, x, bias, table, names):
        h = net.fc(x) + bias
        return h if x[0, 0] > 0 else h + table.sum() + len(names)

    model, x = wrap(Net(forward, fc=nn.Linear(4, 3))), torch.linspace(-1, 1, 80).view(8, 10).t()[:, ::2]
    table, prompt = torch.randn(7, 2, requires_grad=True), nn.Parameter(torch.randn(1, 3))
    out = model(x, prompt.expand(10, 3), table, ["a", "b"])
    out.square().sum().backward()
    print(x.device, out.device, table.grad.device)
    return out, table.grad, prompt.grad, model.module.fc.weight.grad


@case
def nested_outputs():
    """Tuples, lists, dicts and named tuples in one another, with a None among them."""

    def forward(net, x):
        h = net.fc(x)
        stats = namedtuple("Stats", "mean largest")(h.mean(), h.amax(1))  # of a class that is not found by its name
        return h, {"parts": [h[:, :3], h[:, 3:].long()], "stats": stats}, None, OrderedDict(last=(h * 2,))

    model = wrap(Net(forward, fc=nn.Linear(4, 6)))
    h, table, nothing, ordered = model(torch.randn(10, 4).cuda())
    print(type(table).__name__, type(table["stats"]).__name__, nothing, type(ordered).__name__, type(ordered["last"]))
    loss = h.square().mean() + table["parts"][0].sum() + table["stats"].mean.mean() + ordered["last"][0].mean()
    loss.backward()
    return h, table, list(table["stats"]), ordered, model.module.fc.weight.grad


@case
def outputs_changed():
    """Written to in place, returned twice, as they came in, or without a gradient from some chunks."""

    def forward(net, x):
        h = net.fc(x)
        extra = h.mean(1) if x[0, 0] > 0 else torch.zeros(len(x), device=x.device)
        return h, h, x, extra, x[:, 0] > 0, h.detach().double(), h.to(torch.bfloat16), torch.complex(h, h)

    model, x = wrap(Net(forward, fc=nn.Linear(4, 3))), torch.linspace(-1, 1, 40).view(10, 4).cuda()
    first, second, same, extra, positive, double, half, complicated = model(x)
    first.mul_(2)
    second[:, 0] = 0
    same += 1
    loss = first.square().mean() + second.abs().mean() + (extra * positive).sum() + half.float().mean()
    (loss + complicated.abs().mean()).backward()
    return x, first, second, same, extra, positive, double, half, [p.grad for p in model.parameters()]


@case
def partly_detached():
    """Some chunks detach theirs, some have no gradient at all; parameters of five dtypes."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.low = nn.Linear(4, 8), nn.Linear(4, 8).bfloat16()
            self.wide = nn.Parameter(torch.randn(8, dtype=torch.float64))
            self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
            self.spare = nn.Parameter(torch.randn(3).half())

        def forward(self, x):
            h = self.fc(x)
            h = h.detach() if x.sum() > 0 else h
            return h, self.low(x.bfloat16()).float() * self.wide, h * self.turn, x.argmax(1), x > 0, h.sum()

    model, x = wrap(Mixed()), torch.randn(4, 10).t().cuda().requires_grad_()
    h, wide, turned, best, signs, total = model(x)
    print("detached chunks:", sum(bool(part.sum() > 0) for part in x.chunk(4)), "of 4")
    loss = h.sum() + wide.mean() + turned.abs().mean() + total.mean() + (wide.sum(1, keepdim=True) * signs).sum()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if name != "module.turn"}
    return grads, torch.view_as_real(model.module.turn.grad), x.grad, h, wide, best, signs, total


@case
def conjugates():
    """Complex inputs and outputs that are conjugates by a flag only; the last batch is one row."""

    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            self.turn = nn.Parameter(torch.randn(4, 8, dtype=torch.complex64))
            self.scale = nn.Parameter(torch.randn(8, dtype=torch.float64))

        def forward(self, x):
            return (x @ self.turn).abs() * self.scale, torch.fft.fft(x * self.turn[:, 0]).conj()

    model, found = wrap(Waves()), []
    for count in (12, 10, 1):
        x = torch.randn(count, 4, dtype=torch.complex64, requires_grad=True)
        size, turned = model(x.cuda().conj())
        model.zero_grad()
        (size.mean() + turned.abs().mean() + turned.imag.sum()).backward()
        found.append([torch.view_as_real(g.resolve_conj()) for g in (model.module.turn.grad, x.grad, turned)])
    return found, size, model.module.scale.grad


@case
def no_inputs():
    """A forward without inputs: one chunk."""

    weight = nn.Parameter(torch.randn(4, 3))
    prototypes = wrap(Net(lambda net: nn.functional.normalize(net.weight, dim=1), weight=weight))
    model = wrap(nn.Linear(5, 3))
    out = model(torch.randn(10, 5).cuda()) @ prototypes().t()
    out.square().mean().backward()
    return out, prototypes.module.weight.grad, model.module.weight.grad


@case
def few_rows():
    """Fewer rows than devices make fewer chunks; the criterion, with parameters, is wrapped twice by accident."""

    def distances(net, features, labels):
        return (features - net.centres[labels]).square().sum(1)

    centres = Net(distances, centres=nn.Parameter(torch.randn(3, 2)))
    model, criterion, found = wrap(nn.Linear(5, 2)), nn.DataParallel(wrap(centres)), []
    for count in (10, 1, 3, 2):
        losses = criterion(model(torch.randn(count, 5).cuda()), torch.randint(3, (count,)).cuda())
        losses.mean().backward()
        found.append(losses)
    return found, [p.grad for p in (*model.parameters(), *criterion.parameters())]


RESULT = results()
