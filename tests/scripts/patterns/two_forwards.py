"""Two forwards a step: a siamese network."""

import torch
from torch import nn

torch.manual_seed(14)
model = nn.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(3):
    a, b = torch.randn(10, 6).cuda(), torch.randn(10, 6).cuda()
    same = torch.randint(2, (10,)).float().cuda()
    distance = nn.functional.pairwise_distance(model(a), model(b))
    loss = (same * distance.square() + (1 - same) * (1.0 - distance).clamp(min=0).square()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
RESULT = {"losses": losses, "state": model.state_dict()}
