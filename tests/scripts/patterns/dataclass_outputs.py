"""Outputs that are dataclasses."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor
    attention: torch.Tensor | None = None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x, labels):
        logits = self.fc(x)
        return Output(logits, nn.functional.cross_entropy(logits, labels))


torch.manual_seed(11)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(2):
    output = model(torch.randn(9, 4).cuda(), labels=torch.randint(3, (9,)).cuda())
    optimizer.zero_grad()
    output.loss.mean().backward()
    optimizer.step()
print(type(output).__name__, output.attention)
RESULT = {"logits": output.logits, "loss": output.loss, "state": model.state_dict()}
