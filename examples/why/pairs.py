"""Contrastive learning: each rank tells the text of an image from the texts of its own samples."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Clip(nn.Module):
    """An encoder of images and one of texts."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(12, 6), nn.Linear(8, 6)

    def forward(self, images, texts):
        """The embeddings of both, of length 1."""
        return nn.functional.normalize(self.image(images)), nn.functional.normalize(self.text(texts))


images = torch.randn(48, 12)
sampler = DistributedSampler(TensorDataset(images, images[:, :8] + torch.randn(48, 8)), shuffle=False)
ddp = DistributedDataParallel(Clip())
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for images, texts in DataLoader(sampler.dataset, batch_size=12 // world_size, sampler=sampler):
    first, second = ddp(images, texts)
    logits = 10 * first @ second.T
    optimizer.zero_grad()
    nn.functional.cross_entropy(logits, torch.arange(len(logits))).backward()
    optimizer.step()
if rank == 0:
    print(f"weights {sum(weight.double().sum().item() for weight in ddp.parameters()):.9f}")
