"""Data parallelism by hand: a LeNet that is a list of tensors, copied to every device and kept equal by SGD.

Each batch is cut into a microbatch a device; every device computes the gradients of its microbatch; allreduce sums
them; every device takes the same step. A batch that the devices do not divide is cut unevenly, so no sample is dropped.

A process may hold all devices, or some of them: the lists below have an entry for each device of this process.

    python examples/from_scratch.py
    samestep run --devices cpu:2 examples/from_scratch.py
"""

import argparse
import math
import time

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from samestep.data.named import image_data
from samestep.tutorial import allreduce, replicate_params, split_and_load

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", metavar="DIR", help="a folder of IDX files, such as MNIST; else scanned digits")
parser.add_argument("--num-devices", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--lr", type=float, default=0.2)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--samples", type=int, help="train and test on this many pictures only")
parser.add_argument("--save", metavar="FILE", help="save the trained parameters to this file")
args = parser.parse_args()


def new_params():
    """Weights and biases: two convolutions, two linear layers."""
    params = []
    for shape in ((20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)):
        num_inputs = math.prod(shape[1:])
        params += [torch.randn(shape) * num_inputs**-0.5, torch.zeros(shape[0])]
    return params


def lenet(params, x):
    """`[N, 1, 28, 28]` -> `[N, 10]`."""
    w1, b1, w2, b2, w3, b3, w4, b4 = params
    x = F.avg_pool2d(F.relu(F.conv2d(x, w1, b1)), 2)
    x = F.avg_pool2d(F.relu(F.conv2d(x, w2, b2)), 2)
    x = F.relu(F.linear(x.flatten(1), w3, b3))
    return F.linear(x, w4, b4)


def sgd(params, lr, batch_size):
    """One step against the gradients, which are sums over the batch."""
    with torch.no_grad():
        for param in params:
            param -= lr * param.grad / batch_size
            param.grad = None


def train_batch(params, batch, devices, lr):
    """One step on all devices; the sum of the batch's losses."""
    microbatches = split_and_load(batch, devices, even_split=False)
    losses = [
        F.cross_entropy(lenet(mine, x), y, reduction="sum") for mine, (x, y) in zip(params, microbatches, strict=True)
    ]
    for loss in losses:
        loss.backward()
    allreduce([[param.grad for param in mine] for mine in params])
    for mine in params:
        sgd(mine, lr, len(batch[0]))
    totals = [loss.detach() for loss in losses]
    allreduce(totals)
    return totals[0].item()


def accuracy(params, x, y):
    """The share of the pictures whose class is found."""
    with torch.no_grad():
        scores = lenet(params, x.to(params[0].device))
    return (scores.argmax(1).cpu() == y).float().mean().item()


def train(num_devices, batch_size, lr):
    """Trains on the digits; the trained parameters."""
    torch.manual_seed(0)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    devices = [torch.device(kind, index) for index in range(num_devices)]
    (train_x, train_y), (test_x, test_y) = (
        (part.tensors[0][: args.samples] / 127.5 - 1, part.tensors[1][: args.samples])
        for part in image_data(args.data)[:2]
    )
    loader = DataLoader(TensorDataset(train_x, train_y), batch_size, shuffle=True)
    params = replicate_params(new_params(), devices)
    for epoch in range(1, args.epochs + 1):
        start, total = time.perf_counter(), 0.0
        for batch in loader:
            total += train_batch(params, batch, devices, lr)
        seconds, found = time.perf_counter() - start, accuracy(params[0], test_x, test_y)
        print(f"epoch {epoch:2}: loss {total / len(train_x):.4f}, test accuracy {found:.3f}, {seconds:.1f} s")
    return params[0]


params = train(num_devices=args.num_devices, batch_size=args.batch_size, lr=args.lr)
if args.save:
    torch.save([param.detach().cpu() for param in params], args.save)
