"""State that a forward keeps in plain attributes and changes in place: a tensor and a list that no module knows of."""

import torch
from torch import nn


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.level = torch.zeros(4)
        self.history = []

    def forward(self, x):
        self.level += x.detach().mean(0).cpu()
        self.history.append(len(x))
        return self.fc(x) + self.level.to(x.device) * len(self.history)


torch.manual_seed(72)
model = nn.DataParallel(Memory()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(10, 4).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
