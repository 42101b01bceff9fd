"""A subclass with a forward of its own, whose losses are computed in the chunks, and a gather of its own."""

import torch
from torch import nn


class Losses(nn.DataParallel):
    def forward(self, x, *, target):
        inputs, kwargs = self.scatter((x,), {"target": target}, self.device_ids)
        outputs = self.parallel_apply(self.replicate(self.module, self.device_ids[: len(inputs)]), inputs, kwargs)
        return self.gather(outputs, self.output_device)

    def gather(self, outputs, output_device):
        losses, longest = zip(*outputs, strict=True)
        return torch.stack([loss.to(output_device) for loss in losses]).mean(), [rows.shape[0] for rows in longest]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x, target):
        error = self.fc(x) - target
        return error.square().sum(), x[x.sum(1) > 0]  # as many rows as there are


torch.manual_seed(4)
model = Losses(Net()).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for _ in range(3):
    x = torch.randn(10, 3).cuda()
    loss, lengths = model(x, target=x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "lengths": lengths, "state": model.state_dict()}
