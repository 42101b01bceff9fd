"""Gradients, outputs and states are saved: the files are the same to the byte, with no memory that is not theirs."""

from hashlib import sha256
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(115)
model = nn.DataParallel(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(12, 5).cuda().requires_grad_()
out = model(x)
out.square().mean().backward()
optimizer.step()
grads = [p.grad for p in model.parameters()]
saved = {
    "grads": grads,
    "out": out.detach(),
    "input_grad": x.grad,
    "state": model.state_dict(),
    "optimizer": optimizer.state_dict(),
}
digests = {}
for name, value in saved.items():
    torch.save(value, f"{name}.pt")
    digests[name] = sha256(Path(f"{name}.pt").read_bytes()).hexdigest()
RESULT = {"digests": digests, "bytes": [g.untyped_storage().nbytes() for g in grads], "grads": grads}
