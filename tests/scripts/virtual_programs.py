"""What the tests of virtual devices have in common, and programs for real processes."""

from contextlib import contextmanager

import torch
from torch import nn

from samestep.comm.communicator import Communicator
from samestep.comm.transport import LocalTransport
from samestep.scripts.adoption import Adoption
from samestep.scripts.virtual.devices import virtual_devices


def alone(num_devices=4, num_microbatches=None):
    """An adoption of one process that plays several devices."""
    transport = LocalTransport()
    communicator = Communicator(torch.device("cpu"), transport, transport, "ordered")
    return Adoption(communicator, num_microbatches=num_microbatches, num_devices=num_devices)


@contextmanager
def devices(num_devices=4, num_microbatches=None):
    """Virtual devices for the time of a block; the adoption."""
    adoption = alone(num_devices, num_microbatches)
    with virtual_devices(adoption):
        yield adoption


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


def distributed(communicator):
    """A script that uses DistributedDataParallel itself, on virtual devices; its parameters after two steps."""
    adoption = Adoption(communicator, num_devices=communicator.world_size)
    with virtual_devices(adoption):
        torch.manual_seed(3)
        torch.cuda.set_device(communicator.rank)
        model = nn.Linear(4, 2).cuda()
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[communicator.rank])
        update = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        rows = torch.randn(8, 4)
        for _ in range(2):
            update.zero_grad()
            wrapped(rows[communicator.rank :: communicator.world_size].cuda()).square().mean().backward()
            update.step()
        place = str(next(model.parameters()).device)
        return place, [parameter.detach().cpu().numpy() for parameter in model.parameters()]
