"""The whole wrapped model is saved with its class, loaded, and trained on."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x).tanh()


def train(model, num_steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        loss = model(torch.randn(10, 4).cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


torch.manual_seed(37)
model = nn.DataParallel(Net()).cuda()
first = train(model, 2)
torch.save(model, "whole.pt")
del model
model = torch.load("whole.pt", weights_only=False)
print(type(model).__name__, type(model.module).__name__)
second = train(model, 2)
RESULT = {"losses": [first, second], "state": model.state_dict()}
