"""A forward that asks the module's parameters for their type and device."""

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    def forward(self, ids, mask):
        bias = (1.0 - mask.to(dtype=self.dtype)) * torch.finfo(self.dtype).min
        steps = torch.arange(4, device=next(self.parameters()).device)
        return torch.softmax(self.fc(ids.to(self.dtype) + steps) + bias, dim=-1)


torch.manual_seed(22)
model = nn.DataParallel(Encoder()).cuda()
ids, mask = torch.randint(5, (10, 4)).cuda(), torch.randint(2, (10, 4)).cuda()
out = model(ids, mask)
out[:, 0].sum().backward()
print(out.dtype)
RESULT = {"out": out, "grad": model.module.fc.weight.grad}
