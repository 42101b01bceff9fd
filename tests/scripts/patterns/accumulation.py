"""Gradients of several batches added up, clipped, with a schedule and groups of parameters."""

import torch
from torch import nn

torch.manual_seed(66)
model = nn.DataParallel(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))).cuda()
groups = [{"params": model.module[0].parameters(), "lr": 0.05}, {"params": model.module[2].parameters()}]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
norms = []
for step in range(6):
    loss = model(torch.randn(10, 5).cuda()).square().mean() / 3
    loss.backward(retain_graph=step == 4)
    if step == 4:
        loss.backward()
    if (step + 1) % 3 == 0:
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        scheduler.step()
RESULT = {"norms": norms, "grads": [p.grad for p in model.parameters()], "state": model.state_dict()}
