"""Embeddings, with a padding index, and bags of them with offsets of their own a chunk."""

import torch
from torch import nn


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 4, padding_idx=0)
        self.bag = nn.EmbeddingBag(20, 4, mode="mean")
        self.fc = nn.Linear(4, 3)

    def forward(self, ids):
        return self.fc(self.embed(ids).mean(1) + self.bag(ids))


torch.manual_seed(59)
model = nn.DataParallel(Text()).cuda()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
for _ in range(3):
    loss = nn.functional.cross_entropy(model(torch.randint(20, (10, 6)).cuda()), torch.randint(3, (10,)).cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
