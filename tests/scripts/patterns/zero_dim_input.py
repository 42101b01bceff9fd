"""A tensor without a dimension among the inputs, such as a step or a temperature, which the forward writes to."""

import torch
from torch import nn


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x, temperature):
        temperature += 1
        return self.fc(x) / temperature


torch.manual_seed(107)
model = nn.DataParallel(Tempered()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
temperature = torch.tensor(0.5)
for _ in range(3):
    loss = model(torch.randn(12, 4).cuda(), temperature).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "temperature": temperature, "state": model.state_dict()}
