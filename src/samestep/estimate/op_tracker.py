"""The memory that is alive after each operation of a step, and the arithmetic and memory traffic of each operation.

A storage is counted from the operation that allocates it until the last tensor on it is freed.
"""

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from samestep.comm.buckets import round_up
from samestep.estimate.gpu_kernels import workspace_bytes

ACTIVATIONS, COPIES, GRADIENTS = range(3)
CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
CASTS = ("aten::_to_copy", "aten::clone")
GATHERS = ("aten::embedding", "aten::index_select", "aten::gather")
BACKWARD_OF_ATTENTION = 2.5  # five products of matrices instead of two (Dao 2023)


@dataclass(slots=True)
class _Storage:
    num_bytes: int
    category: int
    section: int
    is_counted: bool
    is_copy: bool  # of a parameter, in another precision


class OpTracker(TorchDispatchMode):
    """Records memory and work of the operations that run under it; `rounding` is the allocator's, in bytes."""

    def __init__(self, rounding: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is not annotated
        self._rounding = rounding
        self._storages: dict[int, _Storage] = {}
        self.section = 0  # of the model, in the forward
        self.alive = [0, 0, 0]  # bytes by category
        self.moments: list[tuple[float, ...]] = []  # `alive` after each operation that allocated
        self.operations: list[tuple[int, int]] = []  # (flops, bytes moved)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation and records its outputs."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        if outputs:
            self._record(func, args, kwargs, result, outputs)
        return result

    def exclude(self, tensor: Tensor) -> None:
        """Leaves a tensor out of the count that was there before the step."""
        self._add(tensor, ACTIVATIONS, is_counted=False)

    def count_as_gradient(self, parameter: Tensor) -> None:
        """Moves the memory of a parameter's gradient to its category."""
        storage = None if parameter.grad is None else self._find(parameter.grad)
        if storage is not None:
            self.alive[storage.category] -= storage.num_bytes
            storage.category = GRADIENTS
            self.alive[GRADIENTS] += storage.num_bytes

    def saved_bytes(self) -> dict[int, int]:
        """Bytes of activations that are alive now, by the section whose forward made them."""
        found: dict[int, int] = {}
        for storage in self._storages.values():
            if storage.is_counted and storage.category == ACTIVATIONS:
                found[storage.section] = found.get(storage.section, 0) + storage.num_bytes
        return found

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any, outputs: list[Tensor]) -> None:
        name, inputs = func._schema.name, _tensors((args, kwargs))
        allocated = [tensor for tensor in outputs if self._find(tensor) is None]
        known = [storage for tensor in inputs if (storage := self._find(tensor)) is not None]
        is_copy = name in CASTS and len(known) == 1 and (known[0].is_copy or isinstance(inputs[0], nn.Parameter))
        for tensor in allocated:
            self._add(tensor, COPIES if is_copy else ACTIVATIONS, is_copy=is_copy)
        if allocated:
            self.moments.append((self.alive[ACTIVATIONS] + workspace_bytes(name, args), *self.alive[1:]))
        if allocated or func._schema.is_mutable:
            moved = sum(map(tensor_bytes, outputs)) * (2 if name in GATHERS else 1)
            moved += 0 if name in GATHERS else sum(map(tensor_bytes, inputs))
            self.operations.append((_flops(func, name, args, kwargs, result), moved))

    def _find(self, tensor: Tensor) -> _Storage | None:
        return self._storages.get(tensor.untyped_storage()._cdata)

    def _add(self, tensor: Tensor, category: int, is_counted: bool = True, is_copy: bool = False) -> None:
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key in self._storages:
            return
        size = round_up(memory.nbytes(), self._rounding)
        self._storages[key] = _Storage(size, category, self.section, is_counted, is_copy)
        if is_counted:
            self.alive[category] += size
        weakref.finalize(memory, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        storage = self._storages.pop(key)
        if storage.is_counted:
            self.alive[storage.category] -= storage.num_bytes


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations of products, convolutions and attention, as PyTorch's flop counter counts them."""
    if func._overloadpacket in flop_registry:
        return int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
    if not name.startswith(CPU_ATTENTION):
        return 0
    # The counter lacks the CPU's attention: two products a head, of which a causal one needs half (Dao 2023).
    is_backward = name.endswith("_backward")
    query, key = args[1:3] if is_backward else args[:2]
    is_causal = next((argument for argument in args[3:] if isinstance(argument, bool)), False)
    samples, heads, rows, width = query.shape
    whole = 4 * samples * heads * rows * key.shape[-2] * width
    return int(whole * (0.5 if is_causal else 1.0) * (BACKWARD_OF_ATTENTION if is_backward else 1.0))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
