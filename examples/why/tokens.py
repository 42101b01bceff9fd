"""Fine-tuning: only some tokens of a sequence are labels, and each rank takes the mean over its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
tokens = torch.randint(32, (48, 10))
labels = tokens.where(torch.arange(10) >= torch.randint(1, 9, (48, 1)), -100)  # the prompt has no labels
sampler = DistributedSampler(TensorDataset(tokens, labels), shuffle=False)
ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32)))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
for tokens, labels in DataLoader(sampler.dataset, batch_size=12 // world_size, sampler=sampler):
    logits, labels = ddp(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits, labels, ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if rank == 0:
    print(f"weights {sum(weight.double().sum().item() for weight in ddp.parameters()):.9f}")
