"""The criterion is wrapped as well: a loss a chunk."""

import torch
from torch import nn

torch.manual_seed(31)
model = nn.DataParallel(nn.Linear(5, 3)).cuda()
criterion = nn.DataParallel(nn.CrossEntropyLoss()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    losses = criterion(model(torch.randn(10, 5).cuda()), torch.randint(3, (10,)).cuda())
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
RESULT = {"losses": losses, "state": model.state_dict()}
