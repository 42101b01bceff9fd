"""Dropout of activations that are divided: every rank draws for the whole, and uses what belongs to its part."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional


class DividedDropout(ParallelStyle):
    """Dropout of activations that are divided: the same entries of the whole are dropped as on one device.

    Args:
        dim: along which they are divided.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self._dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Dropout), "the plan has been checked"

        module.forward = DroppedPart(module, self._dim, device_mesh)  # type: ignore[method-assign, assignment]
        return module


class DroppedPart:
    """Takes the place of the forward of an `nn.Dropout`; a copy of the module has a copy, which asks the copy's mode.

    Args:
        module: whose `p`, `inplace` and `training` count.
        dim: along which the activations are divided.
        mesh: of the ranks that have the parts.
    """

    def __init__(self, module: nn.Dropout, dim: int, mesh: DeviceMesh) -> None:
        self._module, self._dim, self._mesh = module, dim, mesh

    def __call__(self, x: Tensor) -> Tensor:
        """The activations, some of them dropped."""
        module = self._module
        if not module.training or module.p == 0:
            return x
        kept = kept_part(x, self._dim, module.p, self._mesh)
        return x.mul_(kept) if module.inplace else x * kept


def kept_part(like: Tensor, dim: int, p: float, mesh: DeviceMesh) -> Tensor:
    """This rank's part of what a dropout multiplies the whole with.

    Kernels draw in the order in which a tensor lies in memory, so the whole is laid out as the part is.

    Args:
        like: this rank's part of the activations.
        dim: along which they are divided into equal parts.
        p: how likely an entry is dropped.
        mesh: of the ranks that have the parts.
    """
    size = like.shape[dim]
    shape = list(like.shape)
    shape[dim] = size * mesh.size()
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    ones = torch.ones([shape[d] for d in order], dtype=like.dtype, device=like.device)
    whole = functional.dropout(ones.permute([order.index(d) for d in range(like.ndim)]), p)
    return whole.narrow(dim, size * mesh.get_local_rank(), size)
