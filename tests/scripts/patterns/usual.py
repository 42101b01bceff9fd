"""The usual training loop, and the cases of a script: functions that each return a result of their own."""

import torch
from torch import nn

CASES = []


def case(function):
    """Adds a function to the cases of the script."""
    CASES.append(function)
    return function


class Net(nn.Module):
    """Parts, and a forward that is a function of the module and its inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **options):
        return self.function(self, *inputs, **options)


def results():
    """The results of all cases by name, each from a seed of its own."""
    found = {}
    for number, function in enumerate(CASES):
        torch.manual_seed(number)
        found[function.__name__] = function()
    return found


def train(model, batch, steps=3, optimizer=None, loss_of=lambda out: out.square().mean()):
    """Some steps on batches of `batch()`; the last loss, and the state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    for _ in range(steps):
        loss = loss_of(model(*batch()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"loss": loss, "state": model.state_dict()}


def rows(*shape):
    """A batch of random rows on the GPU, for `train`."""
    return lambda: (torch.randn(*shape).cuda(),)


def wrap(*layers):
    """The layers, wrapped and on the GPU."""
    return nn.DataParallel(nn.Sequential(*layers) if len(layers) > 1 else layers[0]).cuda()
