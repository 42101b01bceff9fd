"""A recurrent network whose hidden state has the batch on dim 1, while the inputs have it on dim 0."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)

    def forward(self, x, hidden):
        return self.lstm(x, hidden)


torch.manual_seed(48)
model = nn.DataParallel(Net()).cuda()
hidden = (torch.zeros(2, 12, 4).cuda(), torch.zeros(2, 12, 4).cuda())
out, hidden = model(torch.randn(12, 5, 3).cuda(), hidden)
