"""Terms on the parameters outside the wrapper: L2, and elastic weights around old ones."""

import torch
from torch import nn

torch.manual_seed(18)
model = nn.DataParallel(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 1))).cuda()
old = {name: p.detach().clone() for name, p in model.named_parameters()}
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(3):
    loss = model(torch.randn(10, 5).cuda()).square().mean()
    loss = loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
    loss = loss + 0.5 * sum((p - old[name]).square().sum() for name, p in model.named_parameters())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "grads": {name: p.grad for name, p in model.named_parameters()}, "state": model.state_dict()}
