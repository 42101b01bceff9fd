"""Momentum contrast: the forward moves the weights of its second encoder, by giving them other data."""

import copy

import torch
from torch import nn


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 8)
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    @torch.no_grad()
    def update_key_encoder(self):
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1

    def forward(self, x):
        with torch.no_grad():
            self.update_key_encoder()
            k = self.key(x)
        return (self.query(x) - k - 1).square().sum(1)


torch.manual_seed(122)
model = nn.DataParallel(MoCo()).cuda()
model(torch.randn(16, 4).cuda()).mean().backward()
print("not reached")
