"""Wrapped only where there are several devices, as in the tutorial."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, input_size, output_size):
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, input):
        output = self.fc(input)
        print("\tIn Model: input size", input.size(), "output size", output.size())
        return output


torch.manual_seed(43)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = Model(5, 2)
if torch.cuda.device_count() > 1:
    print("Let's use", torch.cuda.device_count(), "GPUs!")
    model = nn.DataParallel(model)
model.to(device)
outputs = []
for rows in (30, 10):
    input = torch.randn(rows, 5).to(device)
    output = model(input)
    print("Outside: input size", input.size(), "output_size", output.size())
    outputs.append(output)
RESULT = {"outputs": outputs}
