"""Complex outputs that are conjugates by a flag only; the last batch is one row."""

import torch
from torch import nn


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, x):
        return torch.fft.fft(self.fc(x)).conj()


torch.manual_seed(106)
model = nn.DataParallel(Spectrum()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outs = []
for rows in (12, 10, 1):
    out = model(torch.randn(rows, 4).cuda())
    loss = out.abs().mean() + out.imag.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    outs.append(torch.view_as_real(out.resolve_conj()))
RESULT = {"loss": loss, "outs": outs, "state": model.state_dict()}
