"""Meta-learning: the forward is called with other weights, which a gradient step has made of the module's own."""

import torch
from torch import nn
from torch.func import functional_call


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x):
        return nn.parallel.data_parallel(self.body, x)


torch.manual_seed(118)
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in (10, 1, 7):
    weights = dict(model.named_parameters())
    inner = model(torch.randn(6, 4).cuda()).square().mean()
    steps = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    fast = {name: weight - 0.1 * step for (name, weight), step in zip(weights.items(), steps, strict=True)}
    loss = functional_call(model, fast, (torch.randn(rows, 4).cuda(),)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
leaves = {name: (p * 2).detach().requires_grad_() for name, p in model.named_parameters()}
functional_call(model, leaves, (torch.randn(10, 4).cuda(),)).square().mean().backward()
RESULT = {"loss": loss, "grads": [leaf.grad for leaf in leaves.values()], "state": model.state_dict()}
