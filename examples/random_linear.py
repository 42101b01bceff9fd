"""Data parallelism in one line: who gets how many rows of a batch?

A random dataset goes through one linear layer. Its forward prints the sizes it sees, the loop prints those of the whole
batch: with several devices the forward gets a slice for each of them, and the loop never notices.

    python examples/random_linear.py
    samestep run --devices cpu:4 examples/random_linear.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--samples", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=30)
parser.add_argument("--save", metavar="FILE", help="save all outputs to this file")
args = parser.parse_args()

NUM_INPUTS, NUM_OUTPUTS = 5, 2


class RandomDataset(Dataset):
    """Rows of random numbers."""

    def __init__(self, num_rows, num_columns):
        self.rows = torch.randn(num_rows, num_columns)

    def __getitem__(self, index):
        return self.rows[index]

    def __len__(self):
        return len(self.rows)


class Model(nn.Module):
    """A linear layer that says what it is given."""

    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs)

    def forward(self, x):
        """`[rows, inputs]` -> `[rows, outputs]`."""
        output = self.linear(x)
        print("  inside the model: input", x.size(), "output", output.size())
        return output


torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
loader = DataLoader(RandomDataset(args.samples, NUM_INPUTS), batch_size=args.batch_size, shuffle=True)

model = Model(NUM_INPUTS, NUM_OUTPUTS)
if torch.cuda.device_count() > 1:
    print("sharing the batches out over", torch.cuda.device_count(), "devices")
    model = nn.DataParallel(model)
model.to(device)

outputs = []
for batch in loader:
    batch = batch.to(device)
    output = model(batch)
    print("outside: input", batch.size(), "output", output.size())
    outputs.append(output.detach().cpu())

if args.save:
    torch.save(torch.cat(outputs), args.save)
