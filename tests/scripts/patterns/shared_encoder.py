"""One encoder in two wrapped models, and alone."""

import torch
from torch import nn

torch.manual_seed(81)
encoder = nn.Linear(4, 6)
first = nn.DataParallel(nn.Sequential(encoder, nn.ReLU(), nn.Linear(6, 1))).cuda()
second = nn.DataParallel(nn.Sequential(encoder, nn.Tanh(), nn.Linear(6, 2))).cuda()
parameters = {*first.parameters(), *second.parameters()}
optimizer = torch.optim.SGD(sorted(parameters, key=lambda p: p.numel()), lr=0.1)
for _ in range(3):
    x = torch.randn(10, 4).cuda()
    loss = first(x).square().mean() + second(x).abs().mean() + encoder(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "first": first.state_dict(), "second": second.state_dict()}
