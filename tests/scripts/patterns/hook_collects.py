"""A hook keeps what a layer inside the wrapper made, and the loss is taken of it."""

import torch
from torch import nn

torch.manual_seed(71)
net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
model = nn.DataParallel(net).cuda()
features = []
net[1].register_forward_hook(lambda module, args, out: features.append(out))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    features.clear()
    out = model(torch.randn(10, 4).cuda())
    loss = out.square().mean() + torch.cat(features).abs().mean()
    optimizer.zero_grad()
    loss.backward()  # the line to be named
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
