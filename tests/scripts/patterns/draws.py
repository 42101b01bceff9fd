"""Forwards that draw random numbers, or leave something open that the reference does otherwise."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from usual import Net, case, results, rows, train, wrap

import samestep


@case
def dropout():
    """Dropout inside, and the script's own draws around it."""

    def forward(net, x):
        x = F.dropout(net.drop(torch.relu(net.a(x))), 0.25, net.training)
        return net.b(x) + 0.1 * torch.randn(len(x), 1, device=x.device) * np.random.rand() * random.random()

    np.random.seed(26)
    random.seed(26)
    model, draws = wrap(Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 2), drop=nn.Dropout(0.5))), []
    for count in (10, 1, 2, 10):
        draws.append([train(model, rows(count, 6), 1)["loss"], torch.rand(1), np.random.rand(), random.random()])
    return draws, model.state_dict()


@case
def seeds_inside():
    class Noisy(nn.Linear):
        def forward(self, x):
            torch.manual_seed(5)
            mask = torch.rand(3, device=x.device) > 0.3
            generator = torch.Generator().manual_seed(6)
            return super().forward(x * mask) + torch.rand(3, generator=generator).to(x.device)

    return train(wrap(Noisy(3, 3)), rows(10, 3)), torch.rand(1)


@case
def own_generators():
    """Generators that the module holds itself, of NumPy, Python and PyTorch: each chunk draws something else."""

    def forward(net, x):
        drawn = torch.from_numpy(net.rng.random((len(x), 3))).float()
        return drawn + torch.rand(len(x), 3, generator=net.noise) + net.coin.random()

    generators = {"rng": np.random.default_rng(0), "coin": random.Random(1), "noise": torch.Generator().manual_seed(2)}
    model, drawn, outside = nn.DataParallel(Net(forward, **generators)), [], []
    for _ in range(3):
        drawn.append(model(torch.randn(12, 4).cuda()))
        outside.append(model.module.coin.random())
    return {"drawn": drawn, "outside": outside}


@case
def single_normals():
    """Single normal numbers of NumPy, which draws them in pairs, between forwards; then of another generator."""
    np.random.seed(7)
    model, lengths = wrap(nn.Linear(3, 2)), []
    before = np.random.get_bit_generator()
    for step in range(6):
        if step == 3:
            np.random.set_bit_generator(np.random.PCG64(5))
        lengths.append(np.random.normal(35, 5))
        model(torch.randn(8, 3).cuda())
    np.random.set_bit_generator(before)
    return lengths


@case
def checkpointed_dropout():
    """The backward must draw what the forward drew."""

    block = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5))
    forward = lambda net, x: net.last(checkpoint(net.block, x, use_reentrant=False))  # noqa: E731
    model = wrap(Net(forward, block=block, last=nn.Linear(8, 1)))
    model(torch.randn(10, 6).cuda()).sum().backward()
    # The gradient of the last layer is the sum of its inputs, which the forward saw; that of the bias below it is made
    # by the second run: what dropout let through there must be what it let through in the forward.
    used, again = model.module.last.weight.grad[0] != 0, model.module.block[0].bias.grad != 0
    print("the same draws:", bool((used == again).all()))
    return [p.grad for p in model.parameters()], torch.rand(2)


@case
def checkpoint_outside():
    """The wrapped model inside activation checkpointing, also with batches of fewer rows than devices."""
    model, losses = wrap(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), []
    for count in (10, 1, 2, 5, 12):
        x = torch.randn(count, 4).cuda()
        loss = checkpoint(model, x, use_reentrant=False).square().mean() + model(x).abs().mean()
        loss.backward()
        losses.append([loss.item(), torch.rand(1).item()])
    return losses, [p.grad for p in model.parameters()]


@case
def scatters_lists():
    """A subclass with a forward and a scatter of its own, which makes a batch of a list on each device."""

    class Batch:
        def __init__(self, rows, device):
            self.x = torch.stack(rows).to(device)

    class Lists(nn.DataParallel):
        def forward(self, rows):
            inputs = self.scatter(rows, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
            return self.gather(self.parallel_apply(replicas, inputs, None), self.output_device)

        def scatter(self, rows, device_ids):
            size = -(-len(rows) // len(device_ids))
            parts = [(rows[k * size : (k + 1) * size], f"cuda:{d}") for k, d in enumerate(device_ids)]
            return [Batch(part, device) for part, device in parts if part]

    class Net(nn.Sequential):
        def forward(self, batch):
            return super().forward(batch.x)

    model = Lists(Net(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Dropout(), nn.Linear(40, 1))).cuda()
    found = [train(model, lambda n=n: ([torch.randn(3) for _ in range(n)],), 1)["loss"] for n in (14, 14, 6, 14)]
    return found, model.state_dict(), torch.rand(1)


@case
def exact_derivatives():
    """Of whole numbers, whose sums are exact: first and second derivatives are those of the whole batch in one piece.

    A parameter and an input have no dims, a parameter is not used.
    """

    def forward(net, x, scale):
        hidden = (x @ net.weight + net.offset) * scale
        return hidden * hidden * x[:, :2], (hidden * hidden).sum()

    def derivatives(call):
        rows, power = call(x, scale)
        total = (rows * unrelated).sum() + 3 * power.sum()
        first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        penalty = sum(gradient.square().sum() for gradient in first if gradient is not None)
        return [total, *first, *torch.autograd.grad(penalty, leaves, allow_unused=True)]

    whole = lambda *shape: torch.randint(-3, 4, shape).double().cuda()  # noqa: E731
    parts = {name: nn.Parameter(whole(*shape)) for name, shape in (("weight", (4, 2)), ("offset", ()), ("spare", (3,)))}
    model, found = wrap(Net(forward, **parts)), []
    for count in (13, 2, 1):
        x, scale, unrelated = whole(count, 4).requires_grad_(), (whole() + 4).requires_grad_(), whole(count, 2)
        leaves = [x, scale, *model.parameters()]
        split, in_one = derivatives(model), derivatives(model.module)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(split, in_one, strict=True))
        found.append([gradient for gradient in split if gradient is not None])
    return found


@case
def zero_dim_input():
    """A tensor without a dimension among the inputs, which the forward writes to."""

    class Tempered(nn.Linear):
        def forward(self, x, temperature):
            temperature += 1
            return super().forward(x) / temperature

    temperature = torch.tensor(0.5)
    trained = train(wrap(Tempered(4, 3)), lambda: (torch.randn(12, 4).cuda(), temperature))
    return {**trained, "temperature": temperature}


@case
def buffer_made_in_inference():
    """A buffer that takes its size from the first batch, which comes in inference mode; then there is training."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 8)
            self.register_buffer("table", torch.zeros(1))

        def forward(self, x):
            if self.table.numel() != 8:
                self.table = torch.arange(1.0, 9.0, device=x.device)
            return self.fc(x) * self.table

    model = wrap(Positions())
    with torch.inference_mode():
        sample = model(torch.randn(8, 4).cuda()).sum().item()
    return sample, train(model, rows(10, 4))


@case
def edited_import():
    """samestep's own names in place of torch's."""
    model = samestep.DataParallel(nn.Linear(4, 3), device_ids=[0, 1, 2, 3], output_device=0, dim=0).cuda()
    head = nn.Linear(3, 1).cuda()
    loss = nn.parallel.data_parallel(head, model(torch.randn(10, 4).cuda()), [0, 1, 2, 3]).square().mean()
    loss.backward()
    print(isinstance(model, nn.DataParallel), sorted(model.state_dict()))
    return loss, model.module.weight.grad, head.weight.grad


RESULT = results()
