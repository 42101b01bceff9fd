"""Part wrap: only the features of a network are wrapped, its classifier is not."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x):
        x = self.features(x)
        return self.classifier(x.view(x.size(0), -1))


torch.manual_seed(1)
model = Net()
model.features = torch.nn.DataParallel(model.features)
model.cuda()
criterion = nn.CrossEntropyLoss().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for _ in range(3):
    images = torch.randn(9, 1, 8, 8).cuda(non_blocking=True)
    target = torch.randint(3, (9,)).cuda(non_blocking=True)
    loss = criterion(model(images), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
RESULT = {"losses": losses, "state": model.state_dict()}
