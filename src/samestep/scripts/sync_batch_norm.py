"""SyncBatchNorm of tensors on the CPU, which torch has for GPUs alone: by the statistics over the samples of all ranks.

Ranks may have different numbers of samples. The gradients of weight and bias are for a rank's own samples, as
under torch: DistributedDataParallel averages them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.patch import Patch


class SummedOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks of a group; so is its gradient, since every rank's result depends on it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        """The sum, of the same shape."""
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The sum of the gradients."""
        return SummedOverRanks.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]  # torch's own


def synchronised(norm: Any, x: Tensor) -> Any:
    """x [N, C, …] normalised by the statistics of all ranks, by which the running ones of `norm` move."""
    dims, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))  # all but the channels; of a number a channel
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    count = values.new_tensor([x.numel() // x.size(1)])
    summed: Any = SummedOverRanks.apply
    sums = summed(torch.cat([values.sum(dims), count]), norm.process_group)
    mean, total = sums[:-1] / sums[-1], sums[-1].detach()
    # A second sum, of squares of what is centred: a difference of means of squares would cancel.
    centred = values - mean.view(shape)
    variance = summed(centred.square().sum(dims), norm.process_group) / total
    if norm.track_running_stats:
        norm.num_batches_tracked += 1
        weight = 1 / norm.num_batches_tracked.item() if norm.momentum is None else norm.momentum
        # The running variance is the unbiased one, as torch has it.
        for running, now in (norm.running_mean, mean), (norm.running_var, variance * total / (total - 1)):
            running.lerp_(now.detach().to(running.dtype), weight)
    out = centred * (variance + norm.eps).rsqrt().view(shape)
    out = out if norm.weight is None else out * norm.weight.view(shape)
    return (out if norm.bias is None else out + norm.bias.view(shape)).to(x.dtype)


def patches(distributed: Any) -> list[Patch]:
    """The patches of torch.nn.parallel.distributed and SyncBatchNorm; tensors of a GPU are left to torch."""
    inner = nn.modules.batchnorm.SyncBatchNorm.forward

    def forward(norm: Any, x: Tensor) -> Any:
        with torch._C.DisableTorchFunction():  # simulated GPUs are the CPU
            is_synchronised = x.device.type == "cpu" and norm.training and dist.is_initialized()
        if not is_synchronised:
            return inner(norm, x)
        if x.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {x.dim()}D input)")
        is_alone = dist.get_world_size(norm.process_group) == 1
        return nn.BatchNorm1d.forward(norm, x) if is_alone else synchronised(norm, x)

    check = "_passing_sync_batchnorm_handle"  # does nothing but refuse models on a CPU
    unchecked = Patch(distributed.DistributedDataParallel, check, lambda ddp, module: None)
    return [Patch(nn.modules.batchnorm.SyncBatchNorm, "forward", forward), unchecked]
