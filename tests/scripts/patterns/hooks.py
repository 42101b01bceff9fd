"""Hooks: on modules inside the wrapper, forward and backward, on the wrapper, on parameters and on outputs."""

import torch
from torch import nn

torch.manual_seed(30)
net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
model = nn.DataParallel(net).cuda()
net[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
net[0].register_forward_hook(lambda module, args, out: print("hidden", tuple(out.shape)))
net[1].register_forward_hook(lambda module, args, out: out + 1)
net[2].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
model.register_forward_hook(lambda module, args, out: print("all", tuple(out.shape)))
net[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    out = model(torch.randn(10, 4).cuda())
    out.register_hook(lambda grad: grad * 2)
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "grads": [p.grad for p in model.parameters()], "state": model.state_dict()}
