"""A frozen backbone, of another type of numbers, under no_grad inside the forward; then it thaws."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(5, 6).double()
        self.head = nn.Linear(6, 2)
        self.thawed = False

    def forward(self, x):
        with torch.set_grad_enabled(self.thawed and torch.is_grad_enabled()):
            h = self.backbone(x.double()).float()
        return self.head(h.relu())


torch.manual_seed(67)
model = nn.DataParallel(Net()).cuda()
model.module.backbone.requires_grad_(False)
optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1)
for step in range(4):
    if step == 2:
        model.module.thawed = True
        model.module.backbone.requires_grad_(True)
        optimizer.add_param_group({"params": model.module.backbone.parameters()})
    loss = model(torch.randn(10, 5).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
