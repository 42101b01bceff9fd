"""Exceptions whose constructors take something else than a text, raised in some chunks and caught by the loop."""

import torch
from torch import nn


class BadBatch(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


class BadRow(Exception):
    def __init__(self, number, why):
        super().__init__(f"row {number} is {why}")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        if (x > 90).any():
            raise BadRow(int(x.argmax()) // 4, "too bright")
        if (x < -90).any():
            raise BadBatch(3)
        return self.fc(x)


torch.manual_seed(112)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
skipped, losses = [], []
for spoilt, value in ((None, 0), (0, 100), (11, 100), (5, -100), (11, -100), (None, 0)):
    x = torch.randn(12, 4)
    if spoilt is not None:
        x[spoilt, 0] = value
    try:
        loss = model(x.cuda()).square().mean()
    except BadBatch as error:
        skipped.append([str(error), error.code])
    except BadRow as error:
        skipped.append([str(error), error.args[0]])
    else:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(skipped)
RESULT = {"skipped": skipped, "losses": losses, "state": model.state_dict()}
