"""Loss inside the forward: a number a chunk comes back, and the script takes their mean."""

import torch
from torch import nn


class WithLoss(nn.Module):
    def __init__(self, net, criterion):
        super().__init__()
        self.net, self.criterion = net, criterion

    def forward(self, x, y):
        return self.criterion(self.net(x), y)


torch.manual_seed(9)
model = nn.DataParallel(WithLoss(nn.Linear(5, 3), nn.CrossEntropyLoss())).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    losses = model(torch.randn(10, 5).cuda(), torch.randint(3, (10,)).cuda())
    print(tuple(losses.shape))
    loss = losses.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"losses": losses, "state": model.state_dict()}
