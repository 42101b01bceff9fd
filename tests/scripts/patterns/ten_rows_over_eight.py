"""Ten rows over eight devices are five chunks of two; three rows are three chunks."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        print("chunk of", len(x))
        return self.fc(x)


torch.manual_seed(53)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in (10, 3, 17):
    loss = model(torch.randn(rows, 3).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
RESULT = {"loss": loss, "state": model.state_dict()}
