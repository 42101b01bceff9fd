"""A backward on another thread, whose failure the script hears of; after it, a step as usual."""

import threading

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        print("rows", len(x))
        return self.fc(x)


def backward(loss):
    try:
        loss.backward()
    except Exception as error:
        failures.append(f"{type(error).__name__}: {error}")


torch.manual_seed(131)
failures = []
model = nn.DataParallel(Net()).cuda()
loss = model(torch.randn(8, 4).cuda()).mean()
thread = threading.Thread(target=backward, args=(loss,), name="second")
thread.start()
thread.join()
model.zero_grad()
again = model(torch.randn(8, 4).cuda()).square().mean()
again.backward()
RESULT = {"failures": failures, "loss": again, "state": model.state_dict(), "grad": model.module.fc.weight.grad}
