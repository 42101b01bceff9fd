"""Output device: the outputs are wanted on the second device, and the targets follow them."""

import torch
from torch import nn

torch.manual_seed(6)
model = nn.DataParallel(nn.Linear(3, 2), device_ids=[0, 1, 2, 3], output_device=1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    out = model(x.cuda())
    print(out.device)
    loss = (out - y.to(out.device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(model.module.weight.grad.device)
RESULT = {"loss": loss, "state": model.state_dict()}
