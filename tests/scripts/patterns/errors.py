"""Forwards and backwards that fail in some chunks; the loop skips the batch and goes on."""

import torch
from torch import nn
from usual import case, results, wrap


class BadBatch(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


class BadRow(Exception):
    def __init__(self, number, why):
        super().__init__(f"row {number} is {why}")


class Strict(nn.Module):
    """Leaves something behind on every module that it has, before it may fail: the next chunk finds none of it."""

    def __init__(self):
        super().__init__()
        self.fc, self.num_calls, self.scratch = nn.Linear(4, 2), 0, 1

    def forward(self, x):
        self.num_calls += 1
        self.fc.last, self.extra = x, nn.Identity()
        self.fc.register_buffer("table", torch.ones(1))
        del self.scratch
        if (x > 90).any():
            raise BadRow(int(x.argmax()) // 4, "too bright")
        if (x < -90).any():
            raise BadBatch(3)
        return self.fc(x) * self.num_calls


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return torch.sqrt(self.fc(x).square() * x[:, :1].abs())


def step(model, optimizer, x, losses):
    loss = model(x.cuda()).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


@case
def exceptions_of_its_own():
    """Exceptions whose constructors take something else than a text."""
    model, skipped, losses = wrap(Strict()), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for spoilt, value in ((None, 0), (0, 100), (11, 100), (5, -100), (11, -100), (None, 0)):
        x = torch.randn(12, 4)
        if spoilt is not None:
            x[spoilt, 0] = value
        try:
            step(model, optimizer, x, losses)
        except BadBatch as error:
            skipped.append([str(error), error.code])
        except BadRow as error:
            skipped.append([str(error), error.args[0]])
    return {"skipped": skipped, "losses": losses, "state": model.state_dict()}


@case
def anomaly_detected():
    """Anomaly detection: the backward of the last or the first chunk raises."""
    model, losses = wrap(Root()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch.autograd.detect_anomaly():
        for zero_row in (None, 11, 0, None):
            x = torch.rand(12, 4)
            if zero_row is not None:
                x[zero_row] = 0
            try:
                step(model, optimizer, x, losses)
            except RuntimeError as error:
                print("skipped:", str(error).split()[0])
    return {"losses": losses, "state": model.state_dict()}


RESULT = results()
