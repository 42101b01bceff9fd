"""The import edited by hand: samestep's own names in place of torch's."""

import torch
from torch import nn

from samestep import DataParallel, data_parallel

torch.manual_seed(70)
model = DataParallel(nn.Linear(4, 3), device_ids=[0, 1, 2, 3], output_device=0, dim=0).cuda()
head = nn.Linear(3, 1).cuda()
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
for _ in range(2):
    h = model(torch.randn(10, 4).cuda())
    loss = data_parallel(head, h, [0, 1, 2, 3]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(isinstance(model, nn.DataParallel), sorted(model.state_dict()))
RESULT = {"loss": loss, "state": model.state_dict(), "head": head.state_dict()}
