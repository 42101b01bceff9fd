"""An interrupted loop: the script catches Ctrl-C, saves and says so; a second one ends it."""

import torch
from torch import nn

torch.manual_seed(47)
model = nn.DataParallel(nn.Linear(3, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(100):
        loss = model(torch.randn(10, 3).cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 2:
            raise KeyboardInterrupt
except KeyboardInterrupt:
    print("Exiting from training early")
    torch.save(model.state_dict(), "interrupted.pt")
RESULT = {"loss": loss, "state": torch.load("interrupted.pt")}
raise KeyboardInterrupt
