"""What the scripts of this folder share: a process group, a small dataset and a small model."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

BATCH = 12
EPOCHS = 3


def start(seed=0):
    """Joins the process group, seeds, and says who we are: (rank, world size)."""
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


def rank():
    return int(os.environ.get("RANK", "0"))


def world_size():
    return int(os.environ.get("WORLD_SIZE", "1"))


def samples(length=48, features=8, classes=4):
    """Features and labels that can be learned, the same in every process."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(length, features, generator=generator)
    y = (x @ torch.randn(features, classes, generator=generator)).argmax(dim=1)
    return x, y


def dataset(length=48):
    return TensorDataset(*samples(length))


class Augmented(Dataset):
    """A dataset whose samples pass a function."""

    def __init__(self, change, length=48):
        self.x, self.y = samples(length)
        self.change = change

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.change(self.x[index]), self.y[index]


def classifier(*extra):
    return nn.Sequential(nn.Linear(8, 16), *extra, nn.ReLU(), nn.Linear(16, 4))


def parallel(model):
    return DistributedDataParallel(model)


def loader(data, batch_size=None, shuffle=True, **options):
    """This rank's share of each global batch, in an order that is the same on any number of devices."""
    sampler = DistributedSampler(data, shuffle=shuffle, seed=5)
    return DataLoader(data, batch_size=batch_size or BATCH // world_size(), sampler=sampler, **options)


def train(model, batches, optimizer, loss_fn=nn.functional.cross_entropy):
    """The loop that everybody writes."""
    model.train()
    for epoch in range(EPOCHS):
        if hasattr(batches.sampler, "set_epoch"):
            batches.sampler.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()


def average_gradients(model):
    """What a script without DistributedDataParallel does by hand."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size()


def sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)
