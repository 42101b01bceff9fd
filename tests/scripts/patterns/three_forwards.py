"""Three forwards a step, of different lengths: anchors, positives, negatives."""

import torch
from torch import nn

torch.manual_seed(15)
model = nn.DataParallel(nn.Linear(6, 3)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(3):
    anchor, positive, negative = model(torch.randn(8, 6).cuda()), model(torch.randn(8, 6).cuda()), None
    for _ in range(2):
        negative = model(torch.randn(5, 6).cuda())
    loss = nn.functional.triplet_margin_loss(anchor, positive, negative.mean(0, keepdim=True).expand(8, 3))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
RESULT = {"losses": losses, "state": model.state_dict()}
