"""Lightning Fabric, as its documentation converts a loop: setup, setup_dataloaders, backward."""

import os
import sys

import digits
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "fixed" in sys.argv


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(42)
    data = TensorDataset(*digits.load(0, 47 if "filled" in sys.argv else 61))
    batch_size = 24 // fabric.world_size
    with fabric.init_module():
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    dataloader = DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=FIXED)
    dataloader = fabric.setup_dataloaders(dataloader)
    for _ in range(2):
        for x, y in dataloader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
        fabric.print(f"loss {fabric.all_reduce(loss.detach()).item():.4f}")


if __name__ == "__main__":
    main()
