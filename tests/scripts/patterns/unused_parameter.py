"""Parameters that no sample uses, and some that only a few samples use."""

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.spare = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(x) if x[0, 0] > 5 else self.first(x)


torch.manual_seed(20)
model = nn.DataParallel(Experts()).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)
for _ in range(2):
    x = torch.randn(10, 4)
    x[3:6, 0] = 9.0
    loss = model(x.cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
grads = {name: p.grad for name, p in model.named_parameters()}
print([name for name, grad in grads.items() if grad is None])
RESULT = {"loss": loss, "grads": grads, "state": model.state_dict()}
