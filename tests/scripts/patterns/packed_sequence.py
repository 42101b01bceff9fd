"""Sequences of several lengths, packed inside the forward and padded to a common length."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed)
        return pad_packed_sequence(out, batch_first=True, total_length=x.size(1))[0]


torch.manual_seed(63)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    out = model(torch.randn(10, 6, 3).cuda(), torch.randint(1, 7, (10,)).cuda())
    loss = out.square().sum() / 10
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"out": out, "state": model.state_dict()}
