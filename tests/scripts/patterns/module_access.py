"""Access to .module: methods, attributes and the keys of a saved state_dict."""

import torch
from torch import nn


class Net(nn.Module):
    kind = "net"

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.temperature = 2.0

    def forward(self, x):
        return self.fc(x) / self.temperature

    def decay(self):
        return self.fc.weight.abs().sum()


torch.manual_seed(7)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.module.fc.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.randn(6, 4).cuda()).square().mean() + 0.01 * model.module.decay()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.module.temperature *= 1.5
torch.save(model.state_dict(), "net.pth")
saved = torch.load("net.pth")
print(sorted(saved), model.module.kind, isinstance(model, nn.DataParallel))
plain = Net().cuda()
plain.load_state_dict({key.replace("module.", "", 1): value for key, value in saved.items()})
wrapped = nn.DataParallel(Net().cuda())
wrapped.load_state_dict(saved)
RESULT = {"loss": loss, "state": saved, "plain": plain.fc.weight, "again": wrapped(torch.ones(4, 4).cuda())}
