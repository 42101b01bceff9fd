"""The last batch of an epoch has one sample."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(25)
dataset = TensorDataset(torch.randn(21, 4), torch.randn(21, 1))
loader = DataLoader(dataset, batch_size=10, shuffle=True)
model = nn.DataParallel(nn.Linear(4, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range(2):
    for x, y in loader:
        out = model(x.cuda())
        loss = nn.functional.mse_loss(out, y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((len(x), loss.item()))
    print("epoch", epoch, [size for size, _ in losses])
RESULT = {"losses": losses, "state": model.state_dict()}
