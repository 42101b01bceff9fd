"""Accelerate's loop, with accumulation, clipping, a scheduler, gathered metrics, and a state to go on from."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from data import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2
is_exact = "exact" in sys.argv  # whole numbers, whose sums are exact in every order

accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(7, device_specific=not is_exact)
accelerator.print(accelerator.distributed_type, accelerator.num_processes, "processes")

x, y = load_digits()
x, y = torch.tensor(x, dtype=torch.float64 if is_exact else torch.float32), torch.tensor(y)
train_loader = DataLoader(TensorDataset(x[:456], y[:456]), batch_size=8, shuffle=True)
test_loader = DataLoader(TensorDataset(x[456:600], y[456:600]), batch_size=16)


def hinge(scores, wanted):
    return torch.relu(1 + scores - scores.gather(1, wanted[:, None])).sum()


if is_exact:
    model, loss_function = nn.Linear(64, 10, dtype=x.dtype), hinge
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
else:
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    loss_function = nn.functional.cross_entropy
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4 * len(train_loader), gamma=0.5)
model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, test_loader, scheduler
)

first = 0
if os.path.exists("state"):
    accelerator.load_state("state")
    first = 1
for epoch in range(first, EPOCHS):
    model.train()
    for inputs, labels in train_loader:
        with accelerator.accumulate(model):
            loss = loss_function(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients and not is_exact:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    found, wanted = [], []
    for inputs, labels in test_loader:
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        found.append(predictions)
        wanted.append(labels)
    found, wanted = torch.cat(found), torch.cat(wanted)
    losses = accelerator.gather(loss.detach().reshape(1))
    total = accelerator.reduce(loss.detach(), reduction="mean")
    accelerator.print(epoch, len(found), (found == wanted).double().mean().item(), losses.tolist(), total.item().hex())
    if epoch == 0:
        accelerator.save_state("state")
accelerator.wait_for_everyone()
accelerator.save_model(model, "model")
accelerator.end_training()
