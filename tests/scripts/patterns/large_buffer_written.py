"""A buffer of more than a megabyte that evaluation leaves alone, and training writes to behind autograd's back."""

import torch
from torch import nn


class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(600, 512))

    def forward(self, x):
        if self.training:
            self.codes.data.mul_(0.9).add_(x.mean())
        return self.fc(x) * self.codes.mean()


torch.manual_seed(109)
model = nn.DataParallel(Codes()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.eval()
outs = [model(torch.randn(8, 4).cuda()).sum().item() for _ in range(4)]
model.train()
for _ in range(3):
    loss = model(torch.randn(8, 4).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
codes = model.module.codes
RESULT = {"outs": outs, "loss": loss, "codes": [codes.sum(), codes[::100, ::100]], "weight": model.module.fc.weight}
