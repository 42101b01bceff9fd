"""BatchNorm in activation checkpointing: the second run, in the backward, must leave the running statistics alone."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])

    def forward(self, x):
        h = checkpoint(lambda h: self.norms[0](h).relu(), self.first(x), use_reentrant=False)
        h = checkpoint(self.norms[1], h, use_reentrant=False, determinism_check="none")
        return self.last(h)


torch.manual_seed(101)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(12, 4).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
RESULT = {"loss": loss, "out": model(torch.randn(4, 4).cuda()), "state": model.state_dict()}
