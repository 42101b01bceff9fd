"""Weights tied inside the wrapped model, and once more outside of it."""

import torch
from torch import nn


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.body = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 12)
        self.decode.weight = self.embed.weight

    def forward(self, ids):
        h = torch.tanh(self.body(self.embed(ids)))
        return h, self.decode(h)


torch.manual_seed(19)
model = nn.DataParallel(LanguageModel()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    ids = torch.randint(12, (10, 5)).cuda()
    h, logits = model(ids)
    again = h @ model.module.embed.weight.t()
    loss = nn.functional.cross_entropy((logits + again).flatten(0, 1), ids.roll(-1, 1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "grad": model.module.embed.weight.grad, "state": model.state_dict()}
