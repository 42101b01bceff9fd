"""A script as torchrun starts it, which the proof runs as logical devices.

It trains attention in bfloat16 over rows of 1,024 places, by what argv[2] names, "ddp" or "fsdp2", and rank 0 writes
the digest of its weights to argv[1].
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

PLACES, WIDTH, HEADS, ROWS, STEPS = 1024, 64, 2, 4, 6


class Attention(nn.Module):
    """Causal attention by torch's fused kernels: [N, T, WIDTH] to [N, T, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attends."""
        q, k, v = self.inward(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # [N, heads, T, width a head]
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores: Tensor = self.outward(attended.transpose(1, 2).flatten(2))
        return scores


def main() -> None:
    """Trains, and writes the digest."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(1)
    model: nn.Module = Attention().to(device)
    model = DistributedDataParallel(model) if sys.argv[2] == "ddp" else fully_shard(model)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 + rank)
    for _ in range(STEPS):
        x = torch.randn(ROWS, PLACES, WIDTH).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    if rank == 0:
        parts = [parameter.detach().cpu().numpy().tobytes() for parameter in whole]
        Path(sys.argv[1]).write_text(hashlib.sha256(b"".join(parts)).hexdigest(), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
