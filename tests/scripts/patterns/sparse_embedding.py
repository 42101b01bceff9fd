"""An embedding with sparse gradients, and the optimizer for them."""

import torch
from torch import nn

torch.manual_seed(75)
model = nn.DataParallel(nn.Embedding(20, 4, sparse=True)).cuda()
optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
for _ in range(3):
    loss = model(torch.randint(20, (10, 3)).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(model.module.weight.grad.layout)
RESULT = {"loss": loss, "state": model.state_dict()}
