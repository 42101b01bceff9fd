"""Evaluation without gradients between the epochs; accuracy through numpy."""

import numpy as np
import torch
from torch import nn

torch.manual_seed(27)
model = nn.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x, y = torch.randn(22, 6), torch.randint(3, (22,))
scores = []
for epoch in range(2):
    model.train()
    loss = nn.functional.cross_entropy(model(x[:12].cuda()), y[:12].cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for start in (12, 17):
            out = model(x[start : start + 5].cuda())
            assert not out.requires_grad
            correct += int(np.sum(out.argmax(1).cpu().numpy() == y[start : start + 5].numpy()))
    with torch.inference_mode():
        confidence = model(x[12:].cuda()).softmax(1).amax(1).mean().item()
    scores.append([loss.item(), correct, confidence])
    print(f"epoch {epoch}: {correct} of 10 right")
RESULT = {"scores": scores, "state": model.state_dict()}
