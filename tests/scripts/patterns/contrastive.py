"""Contrastive loss: each sample is compared with all others of the batch."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(16)
model = nn.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(3):
    x = torch.randn(7, 6).cuda()
    views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
    z = F.normalize(model(views), dim=1)
    similarity = z @ z.t() / 0.5
    similarity.fill_diagonal_(-1e9)
    target = torch.arange(14).cuda().roll(7)
    loss = F.cross_entropy(similarity, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
RESULT = {"losses": losses, "state": model.state_dict()}
