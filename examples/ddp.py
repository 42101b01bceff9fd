"""DistributedDataParallel, as its users write it: samestep starts the processes and leaves the rest to the script.

The script reads the variables that torchrun sets, so it runs under torchrun, under samestep, and, as one process, under
python. DDP keeps the processes equal to each other; its numbers do depend on how many there are.

    python examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py
    samestep run --devices cpu:2 examples/ddp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def read_data(samples):
    """The training and the test set: scanned digits, 64 numbers each."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    return TensorDataset(x[:-360][:samples], y[:-360][:samples]), TensorDataset(x[-360:][:samples], y[-360:][:samples])


def total_over_processes(values, device, distributed):
    """The sums of some numbers over all processes."""
    totals = torch.tensor(values, dtype=torch.float64, device=device)
    if distributed:
        dist.all_reduce(totals)
    return totals.tolist()


def main():
    """Trains, and prints a line an epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--samples", type=int, help="train and test on this many digits only")
    parser.add_argument("--save", metavar="FILE", help="save the trained parameters to this file")
    args = parser.parse_args()

    distributed = "LOCAL_RANK" in os.environ
    rank, world_size, device = 0, 1, torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if distributed:
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    train_set, test_set = read_data(args.samples)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True, seed=0)
    loader = DataLoader(train_set, batch_size=args.batch_size // world_size, sampler=sampler)
    test_x, test_y = (part[rank::world_size].to(device) for part in test_set.tensors)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    if distributed:
        model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            x = x + 0.1 * torch.randn_like(x)  # augmentation: other noise in every step
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        with torch.no_grad():
            found = (model(test_x).argmax(1) == test_y).sum().item()
        total, found = total_over_processes([total, found], device, distributed)
        if rank == 0:
            loss, accuracy = total / len(sampler) / world_size, found / len(test_set)
            print(f"epoch {epoch}: loss {loss:.4f}, test accuracy {accuracy:.3f}, processes {world_size}")

    if args.save and rank == 0:
        torch.save((model.module if distributed else model).state_dict(), args.save)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
