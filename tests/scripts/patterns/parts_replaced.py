"""Between the steps layers are added, parameters replaced, frozen, and given other data; under autocast."""

import torch
from torch import nn

torch.manual_seed(117)
model = nn.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Tanh())).cuda()
losses, grads = [], []
for step in range(4):
    if step == 1:
        model.module.append(nn.Linear(4, 2).cuda())
    if step == 2:
        model.module[0].weight = nn.Parameter(model.module[0].weight * 2)
    if step == 3:
        model.module[0].weight.data = torch.randn(4, 4).cuda()
        model.module[0].bias.requires_grad_(False)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(torch.randn(6, 4).cuda()).float().square().mean()
    model.zero_grad()
    loss.backward()
    losses.append(loss.item())
    grads.append({name: p.grad for name, p in model.named_parameters()})
RESULT = {"losses": losses, "grads": grads}
