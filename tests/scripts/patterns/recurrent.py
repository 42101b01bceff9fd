"""Recurrent networks, batch first: an LSTM, a GRU and a plain one, that return their states as well."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)
        self.gru = nn.GRU(4, 4, batch_first=True, bidirectional=True)
        self.rnn = nn.RNN(8, 3, batch_first=True)

    def forward(self, x):
        self.lstm.flatten_parameters()
        x, (h, c) = self.lstm(x)
        x, _ = self.gru(x)
        x, _ = self.rnn(x)
        return x[:, -1], h.transpose(0, 1), c.transpose(0, 1)


torch.manual_seed(62)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    out, h, c = model(torch.randn(10, 5, 3).cuda())
    loss = out.square().mean() + (h * c).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "h": h, "state": model.state_dict()}
