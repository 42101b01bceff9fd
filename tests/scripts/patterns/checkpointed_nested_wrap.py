"""A wrapped model that checkpoints a part which is wrapped as well: the second run must not be shared out again."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.inner = nn.DataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)))

    def forward(self, x):
        return checkpoint(self.inner, self.first(x), use_reentrant=False)


torch.manual_seed(104)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(12, 4).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
