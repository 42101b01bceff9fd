"""Outputs of many kinds: some chunks detach theirs, some have no gradient at all; parameters of five dtypes."""

import torch
from torch import nn


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.low = nn.Linear(4, 8), nn.Linear(4, 8).bfloat16()
        self.wide = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.spare = nn.Parameter(torch.randn(3).half())

    def forward(self, x):
        h = self.fc(x)
        if x.sum() > 0:
            h = h.detach()
        return h, self.low(x.bfloat16()).float() * self.wide, h * self.turn, x.argmax(1), x > 0, h.sum()


torch.manual_seed(120)
model = nn.DataParallel(Mixed()).cuda()
x = torch.randn(4, 10).t().cuda().requires_grad_()
h, wide, turned, best, signs, total = model(x)
print("detached chunks:", sum(bool(part.sum() > 0) for part in x.chunk(4)), "of 4")
loss = h.sum() + wide.mean() + turned.abs().mean() + total.mean() + (wide.sum(1, keepdim=True) * signs).sum()
loss.backward()
grads = {name: p.grad for name, p in model.named_parameters()}
grads["module.turn"] = torch.view_as_real(grads["module.turn"])
RESULT = {"loss": loss, "grads": grads, "input": x.grad, "outs": [h, wide, best, signs, total]}
