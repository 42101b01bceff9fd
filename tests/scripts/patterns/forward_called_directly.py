"""model.forward(x) instead of model(x), and the module beside its wrapper."""

import torch
from torch import nn

torch.manual_seed(33)
model = nn.DataParallel(nn.Linear(4, 2)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(10, 4).cuda()
    loss = model.forward(x).square().mean() + 0.1 * model.module(x).mean() + 0.1 * model.module.forward(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
