"""The gradient's norm, made of fixed blocks: the whole gradient of a small model, each parameter of a large one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.comm.buckets import Bucket, aligned_zeros, make_buckets
from samestep.comm.communicator import Communicator
from samestep.comm.transport import gather_parts
from samestep.data.batch import memory_border
from samestep.engine.losses import wide_dtype
from samestep.engine.sharded_state import Sharding, assembled, owners_of

# Fixed, so that the bits depend neither on the ranks, nor on the size of the buckets, nor on the sharding: one block a
# dtype up to this size (8 MiB of float32), above it one for each parameter.
NORM_ELEMENTS = 2**21
TRAVEL_BYTES = 64 * 2**20


def block_norm(flat: Tensor) -> Tensor:
    """The 2-norm of one block, of at least 32 bits."""
    # The squares of float16 overflow at 256.
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float32 if flat.element_size() < 4 else None)
    return norm


def finite_sum(flat: Tensor) -> Tensor:
    """A sum of the numbers of a gradient, real: not finite if one of them is not."""
    return (torch.view_as_real(flat) if flat.is_complex() else flat).sum()


def block_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, of at least 32 bits; they may be of several dtypes."""
    # One launch for all of them; it returns norms of the tensors' own dtype, too narrow for 16 bits.
    wide = [tensor for tensor in tensors if tensor.element_size() >= 4]
    of_wide = iter(torch._foreach_norm(wide) if wide else ())
    return [next(of_wide) if tensor.element_size() >= 4 else block_norm(tensor) for tensor in tensors]


def join_norms(norms: Sequence[Tensor]) -> Tensor:
    """The norm of everything, from the norms of its dtypes."""
    if len(norms) == 1:
        return norms[0]
    return block_norm(torch.stack([norm.to(norms[0].device, wide_dtype(norm.device)) for norm in norms]))


class ShardedNorm:
    """The norm of sharded tensors, to the bits of the unsharded tensors on one rank."""

    # A small model is gathered on every rank. Of a large one each sharded parameter is gathered on one rank, one after
    # another, which adds 1/D of the gradient to the bytes that a rank sends in a step.

    def __init__(
        self, communicator: Communicator, shardings: Sequence[Sharding], dtypes: Sequence[torch.dtype]
    ) -> None:
        self._communicator = communicator
        self._shardings = list(shardings)
        forms = [torch.empty(s.shape, dtype=d, device="meta") for s, d in zip(shardings, dtypes, strict=True)]
        self._buckets = make_buckets(forms, 2**62, 1)  # one a dtype, whatever travels in how many

    def of(self, parts: Sequence[Tensor]) -> Tensor:
        """The norm, 0-d, of at least 32 bits; the same on every rank."""
        blocks = [
            self._whole(bucket, parts) if bucket.length <= NORM_ELEMENTS else self._by_parameter(bucket, parts)
            for bucket in self._buckets
        ]
        return join_norms(blocks)

    def _whole(self, bucket: Bucket, parts: Sequence[Tensor]) -> Tensor:
        """The norm of a small model, gathered on every rank as one block."""
        communicator = self._communicator
        members = bucket.members
        ours = torch.cat([parts[index] for index in members])
        sizes = [sum(row) for row in zip(*(self._shardings[index].sizes for index in members), strict=True)]
        by_rank = gather_parts(communicator.transport, ours, sizes).wait().split(sizes)
        # The layout of a bucket of the replicated model, zeros in the gaps included: a norm adds up by position.
        flat = aligned_zeros(bucket.length, bucket.dtype, communicator.device)
        for rank, theirs in enumerate(by_rank):
            pieces = theirs.split([self._shardings[index].sizes[rank] for index in members])
            for index, offset, piece in zip(members, bucket.offsets, pieces, strict=True):
                start = offset + self._shardings[index].cuts[rank]
                flat[start : start + piece.numel()] = piece
        return block_norm(flat)

    def _by_parameter(self, bucket: Bucket, parts: Sequence[Tensor]) -> Tensor:
        """The norm of a large model: each parameter is a block, and is gathered on one rank."""
        communicator, members = self._communicator, bucket.members
        shardings = [self._shardings[index] for index in members]
        wide = torch.float32 if bucket.dtype.itemsize < 4 else bucket.dtype
        norms = torch.zeros(len(members), 1, dtype=wide, device=communicator.device)
        divided = [(parts[index], sharding) for index, sharding in zip(members, shardings, strict=True)]
        for k, whole in assembled(communicator, divided, TRAVEL_BYTES):
            norms[k, 0] = block_norms([_on_border(whole).view(shardings[k].shape)])[0]
        rows = communicator.gather_rows(norms, [len(members)] * communicator.world_size)
        owners = torch.tensor(owners_of(shardings, communicator.world_size), device=rows.device)
        own = rows.view(communicator.world_size, len(members))[owners, torch.arange(len(members), device=rows.device)]
        return block_norm(own)


def _on_border(flat: Tensor) -> Tensor:
    """A flat tensor where torch's allocator would let it begin: vectorised kernels look at that."""
    return flat if flat.data_ptr() % memory_border(flat.device) == 0 else flat.clone()
