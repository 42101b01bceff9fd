"""A forward that seeds and draws by itself, and batches with fewer rows than devices."""

import torch
from torch import nn


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        torch.manual_seed(5)
        mask = torch.rand(3, device=x.device) > 0.3
        generator = torch.Generator().manual_seed(6)
        return self.fc(x * mask) + torch.rand(3, generator=generator).to(x.device)


torch.manual_seed(73)
model = nn.DataParallel(Noisy()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draws = []
for rows in (10, 1, 2, 10):
    loss = model(torch.randn(rows, 3).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    draws.append(torch.rand(1).item())
RESULT = {"loss": loss, "draws": draws, "state": model.state_dict()}
