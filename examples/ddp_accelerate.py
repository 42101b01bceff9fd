"""Accelerate, as its documentation writes it: samestep starts the processes, and can fix how many the script sees.

The batch size is that of a process, so the training depends on their number, as under `accelerate launch`. With
--logical-devices 4 there are always four, and the bits are the same on any number of devices.

    python examples/ddp_accelerate.py
    accelerate launch --multi_gpu --num_processes 2 examples/ddp_accelerate.py    # two GPUs
    samestep run --devices cpu:2 examples/ddp_accelerate.py
    samestep run --devices cpu:2 --logical-devices 4 examples/ddp_accelerate.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def read_data(samples):
    """The training and the test set: scanned digits, 64 numbers each."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    return TensorDataset(x[:-360][:samples], y[:-360][:samples]), TensorDataset(x[-360:][:samples], y[-360:][:samples])


def main():
    """Trains, and prints a line an epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="of each process")
    parser.add_argument("--samples", type=int, help="train and test on this many digits only")
    parser.add_argument("--save", metavar="FILE", help="save the trained parameters to this file")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    train_set, test_set = read_data(args.samples)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=60)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        model.eval()
        found = 0
        for x, y in test_loader:
            with torch.no_grad():
                digits = model(x).argmax(1)
            digits, y = accelerator.gather_for_metrics((digits, y))
            found += (digits == y).sum().item()
        loss = accelerator.reduce(total / len(train_loader), reduction="mean").item()
        accuracy, processes = found / len(test_set), accelerator.num_processes
        accelerator.print(f"epoch {epoch}: loss {loss:.4f}, test accuracy {accuracy:.3f}, processes {processes}")

    if args.save:
        accelerator.save(accelerator.unwrap_model(model).state_dict(), args.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
