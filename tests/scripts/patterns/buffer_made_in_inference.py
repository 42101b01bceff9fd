"""A buffer that takes its size from the first batch, which comes in inference mode; then there is training."""

import torch
from torch import nn


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x):
        if self.table.numel() != 8:
            self.table = torch.arange(1.0, 9.0, device=x.device)
        return self.fc(x) * self.table


torch.manual_seed(108)
model = nn.DataParallel(Positions()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
with torch.inference_mode():
    sample = model(torch.randn(8, 4).cuda()).sum().item()
for _ in range(2):
    loss = model(torch.randn(10, 4).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"sample": sample, "loss": loss, "state": model.state_dict()}
