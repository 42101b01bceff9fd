"""A subclass with a forward and a scatter of its own, which makes a batch of a list on each device; with dropout."""

import torch
from torch import nn


class Batch:
    def __init__(self, rows):
        self.x = torch.stack(rows)

    def to(self, device):
        self.x = self.x.to(device)
        return self


class Lists(nn.DataParallel):
    def forward(self, rows):
        inputs = self.scatter(rows, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        return self.gather(self.parallel_apply(replicas, inputs, None), self.output_device)

    def scatter(self, rows, device_ids):
        size = -(-len(rows) // len(device_ids))
        return [
            Batch(rows[k * size : (k + 1) * size]).to(f"cuda:{d}") for k, d in enumerate(device_ids) if rows[k * size :]
        ]


class Net(nn.Sequential):
    def forward(self, batch):
        return super().forward(batch.x)


torch.manual_seed(5)
model = Lists(
    Net(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Dropout(), nn.Linear(40, 40), nn.Dropout(), nn.Linear(40, 1))
)
model = model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for step in range(4):
    rows = [torch.randn(3) for _ in range(6 if step == 2 else 14)]
    loss = model(rows).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(len(set(losses)), "losses")
RESULT = {"losses": losses, "state": model.state_dict(), "next": torch.rand(1)}
