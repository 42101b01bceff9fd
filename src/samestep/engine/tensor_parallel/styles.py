"""The styles: what happens at the borders of divided modules, by torch's `ParallelStyle`, and in some of our own."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from samestep.engine.leaving import writable
from samestep.engine.tensor_parallel.attention import DividedAttention
from samestep.engine.tensor_parallel.dropout import DividedDropout
from samestep.engine.tensor_parallel.plan import (
    COLWISE,
    DROPOUT,
    GATHERED,
    HEADS,
    PACKED,
    REGION,
    ROWWISE,
    SEQUENCE,
    Division,
)
from samestep.errors import LossError


def make_style(division: Division, module: nn.Module) -> ParallelStyle:
    """The style that divides a module."""
    style, number = division.style, division.number
    outside: Placement = Replicate() if division.sequence_dim is None else Shard(division.sequence_dim)
    if style == COLWISE:
        return ColwiseParallel(input_layouts=outside)
    if style == GATHERED:
        return ColwiseParallel(input_layouts=outside, output_layouts=outside)
    if style == PACKED:
        return PackedColwise(number, input_layouts=outside)
    if style == ROWWISE:
        inside = outside if isinstance(module, nn.Embedding) else Shard(-1)
        return RowwiseParallel(input_layouts=inside, output_layouts=outside)
    if style == HEADS:
        return Heads(outside)
    if style == DROPOUT:
        return DividedDropout(number)
    if style == SEQUENCE:
        assert division.sequence_dim is not None, "else the module is left as it is"
        return SequenceParallel(sequence_dim=division.sequence_dim, use_local_output=True)
    if style == REGION:
        return SequenceRegion(number)
    assert isinstance(style, ParallelStyle), "the plan has been read"
    return style


class PackedColwise(ColwiseParallel):
    """A linear layer that is several in one, such as queries, keys and values: each of them is cut by its outputs.

    Args:
        count: how many.
        input_layouts: how the input lies on the ranks.
    """

    def __init__(self, count: int, *, input_layouts: Placement) -> None:
        super().__init__(input_layouts=input_layouts)
        self.count = count

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for parameter in module.parameters(recurse=False):
            parameter.data = dealt(parameter.data, self.count, device_mesh.size())
        return super()._apply(module, device_mesh)


def dealt(whole: Tensor, count: int, size: int) -> Tensor:
    """The rows of several matrices in one, so that equal slices have each an equal part of every matrix."""
    parts = whole.view(count, size, -1, *whole.shape[1:])
    return parts.transpose(0, 1).reshape(whole.shape)


class Heads(ParallelStyle):
    """Attention, of which each rank has some heads.

    Args:
        outside: how input and output lie on the ranks.
    """

    def __init__(self, outside: Placement) -> None:
        super().__init__()
        self._outside = outside

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.MultiheadAttention), "the plan has been checked"
        for name in ("in_proj_weight", "in_proj_bias"):
            parameter = getattr(module, name)
            if parameter is not None:
                parameter.data = dealt(parameter.data, 3, device_mesh.size())
                _distribute(module, name, device_mesh, Shard(0))
        _distribute(module.out_proj, "weight", device_mesh, Shard(1))
        if module.out_proj.bias is not None:
            _distribute(module.out_proj, "bias", device_mesh, Replicate())
        module.forward = DividedAttention(module, device_mesh, self._outside)  # type: ignore[method-assign]
        return module


class SequenceRegion(ParallelStyle):
    """A module inside which each rank has a part of the positions; it takes and returns all of them.

    Args:
        dim: of the positions.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self._dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        part, whole = Shard(self._dim), Replicate()

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *others = inputs
            if x.shape[self._dim] % device_mesh.size():
                raise LossError(
                    f"the {x.shape[self._dim]} positions of a batch cannot be shared equally by {device_mesh.size()} "
                    'ranks along "tensor": pad them, or leave sequence=True out'
                )
            return moved(x, device_mesh, whole, part), *others

        def leave(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            return moved(output, device_mesh, part, whole)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


def moved(local: Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> Tensor:
    """This rank's part of a tensor that lies on the ranks in one way, as it lies in another; with its gradient."""
    whole = DTensor.from_local(local, mesh, [source], run_check=False)
    return writable(whole.redistribute(placements=[target]).to_local())


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replaces a parameter by a DTensor; all ranks have it, so nothing travels."""
    parameter = getattr(module, name)
    dtensor = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(dtensor, requires_grad=parameter.requires_grad))
