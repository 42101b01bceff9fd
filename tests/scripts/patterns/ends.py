"""A training that ends before its time, in the way that its argument names."""

import sys

import torch
from torch import nn

how = sys.argv[1]


class Strict(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x):
        if (x > 99).any():
            if how == "exit in a chunk":
                print("bad input, stopping")
                sys.exit(7)
            raise ValueError(f"a pixel of {x.max().item():.0f} in these {len(x)} rows")
        return self.fc(x)


torch.manual_seed(44)
model = nn.DataParallel(Strict()).cuda()
x = torch.randn(10, 3)
for step in range(3):
    if step == 1 and "chunk" in how:
        x[9, 0] = 100.0
    loss = model(x.cuda()).square().mean()  # fails
    loss.backward()
    print("step", step)
if how == "exit":
    RESULT = {"loss": loss}
    sys.exit(3)
try:
    raise KeyboardInterrupt
except KeyboardInterrupt:
    torch.save(model.state_dict(), "interrupted.pt")
    RESULT = {"loss": loss, "state": torch.load("interrupted.pt")}
raise KeyboardInterrupt
