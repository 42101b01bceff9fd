"""The outputs and gradients of all modules in one step, in a form in which runs can be compared.

If the unit of computation is a microbatch (the API, adopted scripts), a microbatch's modules give the same bits on any
rank: calls are identified by (microbatch, call). Else the ranks' batches differ in size, so each sample's own row of an
output is summarized, and identified by the content of its row of the model's input.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from samestep.data.nested import leaves
from samestep.verify.recording import JsonlWriter
from samestep.verify.watching.tensor_summary import bits, norm, num_rows, row_checksums, summarize_rows
from samestep.verify.wrapping import unwrapped

MAX_ROWS = 64
MAX_CALLS = 2_000


@dataclass
class RootCall:
    """A call of a model by the program: the names of its modules by `id`, and a checksum of each row of its input."""

    names: dict[int, str]
    type: str
    rows: list[int] | None
    num_calls: int = 0


@dataclass
class Modules:
    """Records the modules of this rank in the step of interest."""

    writer: JsonlWriter
    in_microbatches: bool  # whether microbatches are recorded; else rows are
    world_size: int  # over which the rows that are kept are divided
    step: int | None = None  # the number of the step, while it is the one of interest
    microbatch: int = -1  # that runs now; -1 outside of microbatches
    _stack: list[nn.Module] = field(default_factory=list)
    _root: RootCall | None = None
    _num_lines: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which the hooks are in place."""
        with ExitStack() as stack:
            stack.callback(hooks.register_module_forward_pre_hook(self._enter).remove)
            stack.callback(hooks.register_module_forward_hook(self._leave, always_call=True).remove)
            yield

    def _is_on(self) -> bool:
        return self.step is not None and self._num_lines < MAX_CALLS

    def _enter(self, module: nn.Module, args: Any) -> None:
        """A module is called."""
        if not self._is_on() or not torch.is_grad_enabled():
            return
        if not self._stack or self._root is None:
            model = unwrapped(module)
            names = {id(part): name for name, part in model.named_modules()}
            with torch._C.DisableTorchFunction():
                length = None if self.in_microbatches else num_rows(args)
                rows = row_checksums(args, length) if length else None
            self._root = RootCall(names, type(model).__name__, rows)
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module returned, or raised."""
        if module not in self._stack or self._root is None:
            return
        while self._stack.pop() is not module:
            continue
        root = self._root
        name = root.names.get(id(module))
        if output is None or name is None or not self._is_on() or not torch.is_grad_enabled():
            return
        about = {
            "name": name,
            "type": type(module).__name__,
            "root": root.type,
            "call": root.num_calls,
            "training": module.training,
        }
        root.num_calls += 1
        with torch._C.DisableTorchFunction():
            self._write("forward", about, root, output)
            for leaf in leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(self._backward, about, root))

    def _backward(self, about: dict[str, Any], root: RootCall, gradient: Tensor) -> None:
        """The gradient of a module's output is known."""
        if self._is_on():
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._write("backward", about, root, gradient)

    def _write(self, direction: str, about: dict[str, Any], root: RootCall, value: Any) -> None:
        tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
        if not tensors:
            return
        found: dict[str, Any]
        if self.in_microbatches:
            checksums = [bits(tensor) for tensor in tensors]
            found = {"microbatch": self.microbatch, "bits": checksums, "norm": norm(tensors[0])}
        else:
            found = self._rows_of(tensors, root.rows or [])
        self._num_lines += 1
        self.writer.write("module", step=self.step, direction=direction, **about, **found)

    def _rows_of(self, tensors: list[Tensor], keys: list[int]) -> dict[str, Any]:
        """The summaries of an output's rows, of so many that all ranks together keep about `MAX_ROWS`."""
        tensor = next((found for found in tensors if keys and found.shape[:1] == (len(keys),)), None)
        if tensor is None:
            return {"keys": [], "rows": []}
        limit = 1024 * MAX_ROWS / (len(keys) * self.world_size)
        chosen = [index for index, key in enumerate(keys) if (key * 0x9E3779B97F4A7C15 >> 7) % 1024 < limit]
        return {"keys": [keys[index] for index in chosen], "rows": summarize_rows(tensor[chosen]) if chosen else []}
