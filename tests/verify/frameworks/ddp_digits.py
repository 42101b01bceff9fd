"""A trainer class over DistributedDataParallel, for torchrun; with `fixed`, its global batch is one and the same."""

import os
import sys

import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FIXED = "fixed" in sys.argv
BATCH_SIZE = 24


class Trainer:
    def __init__(self, model, train_data, optimizer, accumulate):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.model = DDP(model)
        self.train_data = train_data
        self.optimizer = optimizer
        self.accumulate = accumulate

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for number, (source, targets) in enumerate(self.train_data, 1):
            if number % self.accumulate:
                with self.model.no_sync():
                    self._backward(source, targets)
            else:
                self._backward(source, targets)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def _backward(self, source, targets):
        loss = nn.functional.cross_entropy(self.model(source), targets) / self.accumulate
        loss.backward()

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def make_model():
    # BatchNorm over the batch of a device, or over the channels of a sample
    norm = nn.GroupNorm(4, 32) if FIXED else nn.BatchNorm1d(32)
    return nn.Sequential(nn.Linear(64, 32), norm, nn.ReLU(), nn.Linear(32, 10))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(*digits.load(0, 480))
    world_size = dist.get_world_size()
    batch_size, lr = (BATCH_SIZE // world_size, 0.1) if FIXED else (BATCH_SIZE, 0.1 * world_size)
    train_data = DataLoader(data, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(data))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    Trainer(model, train_data, optimizer, accumulate=2).train(max_epochs=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
