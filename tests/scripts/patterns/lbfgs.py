"""LBFGS: the optimizer calls a closure as often as it likes."""

import torch
from torch import nn

torch.manual_seed(35)
model = nn.DataParallel(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))).cuda()
x, y = torch.randn(10, 3).cuda(), torch.randn(10, 1).cuda()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")
num_calls = 0


def closure():
    global num_calls
    num_calls += 1
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for _ in range(2):
    loss = optimizer.step(closure)
print(f"{num_calls} calls")
RESULT = {"loss": loss, "calls": num_calls, "state": model.state_dict()}
