"""Attention by heads: the forward of an `nn.MultiheadAttention` of which each rank has some heads."""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from samestep.engine.leaving import writable
from samestep.engine.tensor_parallel.dropout import kept_part
from samestep.errors import LossError


class DividedAttention:
    """Takes the place of the forward of an `nn.MultiheadAttention`.

    Args:
        module: with its parameters divided.
        mesh: of the ranks that share it.
        outside: how input and output lie on these.
    """

    def __init__(self, module: nn.MultiheadAttention, mesh: DeviceMesh, outside: Placement) -> None:
        self._module, self._mesh, self._outside = module, mesh, outside
        self._heads = module.num_heads // mesh.size()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """What `nn.MultiheadAttention.forward` says, but for the weights.

        Raises:
            LossError: the weights are asked for, or the inputs have no batch dimension, or keys are not the queries in
                a region by positions.
        """
        module = self._module
        if need_weights:
            raise LossError("attention that is divided by heads has no rank with all weights: use need_weights=False")
        if query.ndim != 3:
            raise LossError("attention that is divided by heads needs inputs with a batch dimension")
        if isinstance(self._outside, Shard) and key is not query:
            raise LossError(
                "attention to something else within a sequence_region: each rank has a part of the queries' positions, "
                "and whether of the others is not known; leave sequence=True out, or this module out of the region"
            )
        wholes = {id(x): self._whole(x) for x in (query, key, value)}
        inputs = [wholes[id(x)] for x in (query, key, value)]
        weights = _local(module.in_proj_weight).chunk(3)
        biases = (None,) * 3 if module.in_proj_bias is None else _local(module.in_proj_bias).chunk(3)
        q, k, v = (
            functional.linear(x, w, b).unflatten(-1, (self._heads, -1)).permute(1, 2, 0, 3)
            for x, w, b in zip(inputs, weights, biases, strict=True)
        )
        mask = self._mask(attn_mask, key_padding_mask, q, is_causal)
        mixed = self._mix(q, k, v, mask).permute(2, 0, 1, 3).flatten(2)
        part = functional.linear(mixed, _local(module.out_proj.weight))
        output = DTensor.from_local(part, self._mesh, [Partial()], run_check=False)
        output = output.redistribute(placements=[self._turned(self._outside)])
        if module.out_proj.bias is not None:
            output = cast(DTensor, output + module.out_proj.bias)
        local = writable(output.to_local())
        return local.transpose(0, 1) if module.batch_first else local, None

    def _turned(self, placement: Placement) -> Placement:
        """A placement, of a tensor whose first dimension is that of the positions: as torch computes attention."""
        return Shard(1 - placement.dim) if isinstance(placement, Shard) and self._module.batch_first else placement

    def _whole(self, x: Tensor) -> Tensor:
        """An input, whole on every rank, [positions, N, features]; its gradients of all ranks are added up."""
        turned = x.transpose(0, 1) if self._module.batch_first else x
        whole = DTensor.from_local(turned, self._mesh, [self._turned(self._outside)], run_check=False)
        result: Tensor = whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return result

    def _mask(self, mask: Tensor | None, padding: Tensor | None, q: Tensor, is_causal: bool) -> Tensor | None:
        """What is added to the scores of this rank's heads: [N or 1, heads or 1, targets, sources]."""
        if is_causal and mask is None:
            raise LossError("is_causal=True is a hint about attn_mask; give attn_mask, too")
        added = None
        if mask is not None:
            mask = _as_added(mask, q.dtype)
            if mask.ndim == 3:
                first = self._heads * self._mesh.get_local_rank()
                mask = mask.unflatten(0, (q.shape[0], -1))[:, first : first + self._heads]
            added = mask
        if padding is not None:
            kept = _as_added(padding, q.dtype)[:, None, None, :]
            added = kept if added is None else added + kept
        return added

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The values, weighted: [N, heads, targets, features]."""
        p = self._module.dropout if self._module.training else 0.0
        if p == 0.0:
            return functional.scaled_dot_product_attention(q, k, v, mask)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return weights * kept_part(weights, 1, p, self._mesh) @ v


def _local(parameter: Tensor) -> Tensor:
    """This rank's part of a divided parameter, with its gradient."""
    assert isinstance(parameter, DTensor), "the module is divided"
    local: Tensor = parameter.to_local()
    return local


def _as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores: where a bool is true nothing is looked at."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
