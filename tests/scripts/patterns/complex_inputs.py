"""Complex inputs, conjugated by a flag, and parameters of several dtypes; the input wants its gradient."""

import torch
from torch import nn


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, 8, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(8, dtype=torch.float64))

    def forward(self, x):
        return (x @ self.turn).abs() * self.scale, x * self.turn[:, 0]


torch.manual_seed(119)
model = nn.DataParallel(Waves()).cuda()
x = torch.randn(10, 4, dtype=torch.complex64, requires_grad=True)
size, turned = model(x.cuda().conj())
loss = size.mean() + turned.abs().mean() + turned.imag.sum()
loss.backward()
grads = [torch.view_as_real(g.resolve_conj()) for g in (model.module.turn.grad, x.grad)]
RESULT = {"loss": loss, "size": size, "grads": [*grads, model.module.scale.grad]}
