"""A forward that writes to its input in place: the caller's tensor stays as it was."""

import torch
from torch import nn

torch.manual_seed(57)
first = nn.Linear(4, 6).cuda()
model = nn.DataParallel(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 2))).cuda()
optimizer = torch.optim.SGD([*first.parameters(), *model.parameters()], lr=0.1)
for _ in range(3):
    h = first(torch.randn(10, 4).cuda())
    loss = model(h).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("negative entries left:", int((h < 0).sum()) > 0)
RESULT = {"loss": loss, "h": h, "first": first.state_dict(), "state": model.state_dict()}
