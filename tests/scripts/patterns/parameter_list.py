"""A ParameterList, a ParameterDict and a ModuleList inside."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(3)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(4)), "shift": nn.Parameter(torch.zeros(4))})
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        for layer in self.layers:
            x = layer(x)
        return x * self.named["scale"] + self.named["shift"] + self.weights[-1].mean() * len(self.weights)


torch.manual_seed(21)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(9, 4).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
