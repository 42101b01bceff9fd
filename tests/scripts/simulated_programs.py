"""Helpers for the tests of simulated devices."""

from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from samestep.comm.communicator import Communicator
from samestep.comm.transport import LocalTransport
from samestep.patch import Patch, applied
from samestep.scripts.shared_script import SharedScript, num_visible
from samestep.scripts.simulated.cuda import mark
from samestep.scripts.simulated.devices import simulated_devices


def alone(num_devices=4, num_microbatches=None, device="cpu", **fields):
    """The state of one process that plays several devices."""
    transport = LocalTransport()
    communicator = Communicator(torch.device(device), transport, transport, "ordered")
    return SharedScript(communicator, num_microbatches, num_devices, **fields)


@contextmanager
def devices(num_devices=4, num_microbatches=None):
    """Simulated devices for the time of a block; the script."""
    script = alone(num_devices, num_microbatches)
    with simulated_devices(partial(num_visible, script), script.notice), applied([Patch(script, "mark", mark)]):
        yield script


def lenet():
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 5), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(4), nn.Dropout(0.3)),
        *(nn.Flatten(), nn.Linear(36, 10)),
    )


def trained(device, optimizer=torch.optim.SGD, steps=3, **options):
    """Losses and parameters of a small training, written for a device."""
    torch.manual_seed(5)
    model = lenet().to(device)
    update = optimizer(model.parameters(), lr=0.05, **options)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(12, 1, 16, 16).to(device), torch.randint(10, (12,)).to(device)
        update.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses, [value.detach().cpu() for value in model.state_dict().values()]
