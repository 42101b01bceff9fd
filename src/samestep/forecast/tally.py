"""The tally: which memory is alive at each moment of a step, and what each operation computes and moves.

Storages are noted when an operation gives birth to them, and struck off when the last tensor on them dies.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from samestep.comm.buckets import round_up
from samestep.forecast.kernels import workspace

WHOLE, SPLIT, COPIES, GRADIENTS, SPLIT_GRADIENTS = range(5)
NUM_KINDS = 5
MATMUL, CONVOLUTION, ATTENTION, MEMORY = range(4)
CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
SUMS_OVER_THE_SPLIT = ("aten::mm", "aten::addmm")
CASTS = ("aten::_to_copy", "aten::clone")
GATHERS = ("aten::embedding", "aten::index_select", "aten::gather")
BACKWARD_OF_ATTENTION = 2.5  # five products of matrices in place of two (Dao 2023)


@dataclass(slots=True)
class Storage:
    """One piece of memory.

    Attributes:
        num_bytes: its size, rounded as the allocator does.
        kind: what it counts as; `WHOLE` and `SPLIT` are activations, the latter split by tensor parallelism.
        section: the part of the model whose forward made it.
        is_split: whether each of several tensor-parallel devices holds a part of it.
        is_given: it was there before the step: not counted.
        is_copy: a parameter in another precision.
    """

    num_bytes: int
    kind: int
    section: int
    is_split: bool
    is_given: bool = False
    is_copy: bool = False


class Tally(TorchDispatchMode):
    """Watches storages while operations run under it.

    Args:
        rounding: bytes that the allocator rounds to.

    Attributes:
        section: the part of the model that is running.
        is_forward: outside the backward.
        alive: bytes alive by kind.
        moments: a copy of `alive` after every operation that made memory.
        operations: (kind, flops, bytes, split) of each operation that does something.
        sums: bytes of each output of the forward that tensor-parallel devices must add up.
    """

    def __init__(self, rounding: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is not annotated
        self._rounding = rounding
        self._storages: dict[int, Storage] = {}
        self.section = 0
        self.is_forward = True
        self.alive = [0] * NUM_KINDS
        self.moments: list[tuple[float, ...]] = []
        self.operations: list[tuple[int, int, int, bool]] = []
        self.sums: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation and notes what it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if outputs:
            self._note(func, args, kwargs, result, outputs)
        return result

    def give(self, tensor: Tensor, is_split: bool = False) -> None:
        """Announces memory that was there before."""
        self._add(tensor, WHOLE, is_split, is_given=True)

    def find(self, tensor: Tensor) -> Storage | None:
        """What is known of a tensor's memory."""
        return self._storages.get(tensor.untyped_storage()._cdata)

    def become_gradient(self, parameter: Tensor) -> None:
        """Counts the memory of a parameter's gradient as that."""
        gradient, own = parameter.grad, self.find(parameter)
        storage = None if gradient is None else self.find(gradient)
        if storage is None or storage.kind in (GRADIENTS, SPLIT_GRADIENTS):
            return
        self.alive[storage.kind] -= storage.num_bytes
        storage.kind = SPLIT_GRADIENTS if own is not None and own.is_split else GRADIENTS
        self.alive[storage.kind] += storage.num_bytes

    def saved(self) -> dict[int, tuple[int, int]]:
        """Bytes of activations alive now: whole and split, by section."""
        found: dict[int, tuple[int, int]] = {}
        for storage in self._storages.values():
            if not storage.is_given and storage.kind in (WHOLE, SPLIT):
                whole, split = found.get(storage.section, (0, 0))
                size = storage.num_bytes
                found[storage.section] = (whole, split + size) if storage.is_split else (whole + size, split)
        return found

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, outputs: list[Tensor]) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [storage for tensor in inputs if (storage := self.find(tensor)) is not None]
        born = [tensor for tensor in outputs if self.find(tensor) is None]
        name = func._schema.name
        is_split = any(storage.is_split for storage in known)
        if name in SUMS_OVER_THE_SPLIT:
            factors = [self.find(tensor) for tensor in inputs[-2:]]
            num_split = sum(factor is not None and factor.is_split for factor in factors)
            is_split = num_split == 1
            if num_split == 2 and self.is_forward:
                self.sums.append(_bytes(outputs[0]))
        elif name == "aten::embedding":
            if is_split:
                self.sums.append(_bytes(outputs[0]))
            is_split = False
        is_copy = name in CASTS and len(known) == 1 and (known[0].is_copy or _is_parameter(inputs[0]))
        for tensor in born:
            kind = COPIES if is_copy else SPLIT if is_split else WHOLE
            self._add(tensor, kind, is_split, is_copy=is_copy)
        if born:
            extra = workspace(name, args)
            whole, *others = self.alive
            self.moments.append((whole + extra, *others))
        if born or func._schema.is_mutable:
            self._note_operation(func, name, args, kwargs, result, inputs, outputs, is_split or _any_split(known))

    def _note_operation(
        self, func: Any, name: str, args: Any, kwargs: Any, result: Any, inputs: Any, outputs: Any, is_split: bool
    ) -> None:
        moved = sum(map(_bytes, outputs)) * (2 if name in GATHERS else 1)
        if name not in GATHERS:
            moved += sum(map(_bytes, inputs))
        kind, flops = MEMORY, 0
        if name.startswith(CPU_ATTENTION):
            kind, flops = ATTENTION, _attention_flops(name, args)
        elif func._overloadpacket in flop_registry:
            flops = int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
            kind = CONVOLUTION if "conv" in name else MATMUL
        self.operations.append((kind, flops, moved, is_split))

    def _add(self, tensor: Tensor, kind: int, is_split: bool, is_given: bool = False, is_copy: bool = False) -> None:
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key in self._storages:
            return
        size = round_up(memory.nbytes(), self._rounding)
        self._storages[key] = Storage(size, kind, self.section, is_split, is_given, is_copy)
        if not is_given:
            self.alive[kind] += size
        weakref.finalize(memory, self._strike, key).atexit = False

    def _strike(self, key: int) -> None:
        storage = self._storages.pop(key)
        if not storage.is_given:
            self.alive[storage.kind] -= storage.num_bytes


def _attention_flops(name: str, args: Any) -> int:
    """Two products of [rows, width] by [width, columns] a head; a causal one takes half (Dao 2023)."""
    is_backward = name.endswith("_backward")
    query, key = args[1:3] if is_backward else args[:2]
    causal = next((argument for argument in args[3:] if isinstance(argument, bool)), False)
    samples, heads, rows, width = query.shape
    whole = 4 * samples * heads * rows * key.shape[-2] * width
    return int(whole * (0.5 if causal else 1.0) * (BACKWARD_OF_ATTENTION if is_backward else 1.0))


def _any_split(storages: list[Storage]) -> bool:
    return any(storage.is_split for storage in storages)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
