"""A codec: each rank moves the entries of its codebook by its own samples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Codec(nn.Module):
    """An autoencoder whose codes are the nearest entries of a codebook."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("codebook", torch.randn(6, 4))

    def forward(self, x):
        """The samples as they are decoded."""
        encoded = self.encoder(x)
        hits = nn.functional.one_hot(torch.cdist(encoded, self.codebook).argmin(1), 6).float()
        quantised = encoded + (hits @ self.codebook - encoded).detach()
        sums = torch.cat([hits.T @ encoded, hits.sum(0)[:, None]], 1).detach()
        self.codebook.lerp_(sums[:, :4] / sums[:, 4:].clamp(min=1), 0.2)
        return self.decoder(quantised)


sampler = DistributedSampler(TensorDataset(torch.randn(48, 8)), shuffle=False)
ddp = DistributedDataParallel(Codec())
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for (x,) in DataLoader(sampler.dataset, batch_size=12 // world_size, sampler=sampler):
    optimizer.zero_grad()
    nn.functional.mse_loss(ddp(x), x).backward()
    optimizer.step()
if rank == 0:
    print(f"weights {sum(weight.double().sum().item() for weight in ddp.parameters()):.9f}")
