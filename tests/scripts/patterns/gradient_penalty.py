"""Gradient penalty: the gradient of the critic with respect to its input is itself differentiated."""

import torch
from torch import nn

torch.manual_seed(17)
critic = nn.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))).cuda()
optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-2)
penalties = []
for _ in range(3):
    real, fake = torch.randn(10, 4).cuda(), torch.randn(10, 4).cuda()
    alpha = torch.rand(10, 1).cuda()
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(mixed)
    (gradient,) = torch.autograd.grad(
        outputs=scores, inputs=mixed, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True
    )
    penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    penalties.append(penalty.item())
RESULT = {"penalties": penalties, "gradient": gradient, "state": critic.state_dict()}
