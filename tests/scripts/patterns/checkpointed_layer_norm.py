"""LayerNorm in activation checkpointing, by a function that refers to the module."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, 6)

    def body(self, x):
        return x + self.fc(self.norm(x)).relu()

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


torch.manual_seed(102)
model = nn.DataParallel(nn.Sequential(nn.Linear(4, 6), Block(), Block())).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(12, 4).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
