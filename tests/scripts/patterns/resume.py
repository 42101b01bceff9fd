"""A checkpoint of the script's own, and a fresh model that goes on from it; then the whole model, saved and loaded."""

import os
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn


def make():
    model = nn.DataParallel(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))).cuda()
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    for step in steps:
        loss = model(torch.randn(10, 4).cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        os.makedirs("checkpoints", exist_ok=True)
        state = {"step": step + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, os.path.join("checkpoints", "last.pth.tar"))
    return loss


torch.manual_seed(38)
if os.path.isfile("checkpoints/last.pth.tar"):
    raise SystemExit("=> a checkpoint is here already")
train(*make(), range(2))
model, optimizer = make()
path = "checkpoints/last.pth.tar"
if os.path.isfile(path):
    print(f"=> loading checkpoint '{path}'")
    checkpoint = torch.load(path, map_location="cuda:0")
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    print(f"=> loaded checkpoint '{path}' (step {checkpoint['step']})")
loss = train(model, optimizer, range(checkpoint["step"], 4))
torch.save(model, "whole.pt")
grads = [p.grad for p in model.parameters()]
torch.save([grads, model.state_dict(), loss.detach()], "parts.pt")
model = torch.load("whole.pt", weights_only=False)
print(type(model).__name__, type(model.module).__name__)
RESULT = {
    "losses": [loss, train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))],
    "optimizer": optimizer.state_dict(),
    "grads": grads,
    "bytes": [g.untyped_storage().nbytes() for g in grads],
    "saved": sha256(Path("parts.pt").read_bytes()).hexdigest(),
}
