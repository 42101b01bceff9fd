"""Two outputs of one forward, each with a backward of its own, one of them into a part of the parameters only."""

import torch
from torch import nn


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 6), nn.Linear(6, 1), nn.Linear(6, 2)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.left(h), self.right(h)


torch.manual_seed(79)
model = nn.DataParallel(Heads()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
norms = []
for _ in range(2):
    left, right = model(torch.randn(10, 4).cuda())
    optimizer.zero_grad()
    left.square().mean().backward(retain_graph=True)
    norms += [p.grad.norm() for p in model.parameters() if p.grad is not None]
    (part,) = torch.autograd.grad(right.abs().mean(), model.module.body.weight, retain_graph=True)
    right.square().mean().backward(inputs=list(model.module.right.parameters()))
    norms.append(part.norm())
    optimizer.step()
RESULT = {"norms": norms, "grads": [p.grad for p in model.parameters()], "state": model.state_dict()}
