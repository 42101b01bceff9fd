"""The modules: what every module gives in one step, forward and backward, in a form that runs can compare.

Where the unit of computation is a microbatch (the API, adopted scripts), a microbatch's modules give the same bits
whoever runs it: they are told apart by (microbatch, call). Elsewhere the ranks' batches differ in size, so each
sample's own row of an output is sketched, and told apart by the content of its row of the model's input.
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
from samestep.verify.watching.jsonl_writer import JsonlWriter
from samestep.verify.watching.names import unwrapped
from samestep.verify.watching.tensor_summary import bits, norm, num_rows, row_checksums, summarize_rows

MAX_ROWS = 64
MAX_CALLS = 2_000


@dataclass
class RootCall:
    """A call of a model by the program: what its modules are called, and what tells its rows apart."""

    names: dict[int, str]
    type: str
    rows: list[int] | None
    num_calls: int = 0


@dataclass
class Modules:
    """What the modules of this rank gave in the step of interest.

    Attributes:
        writer: where it is written.
        in_microbatches: whether microbatches are told apart; else rows are.
        world_size: the number of ranks, among which the rows that are kept are counted.
        step: the number of the step, while it is the one of interest; else None.
        microbatch: the microbatch that runs now; -1 outside of microbatches.
    """

    writer: JsonlWriter
    in_microbatches: bool
    world_size: int
    step: int | None = None
    microbatch: int = -1
    _stack: list[nn.Module] = field(default_factory=list)
    _root: RootCall | None = None
    _num_lines: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The time in which the hooks are in."""
        with ExitStack() as stack:
            for handle in (
                hooks.register_module_forward_pre_hook(self._enter),
                hooks.register_module_forward_hook(self._leave, always_call=True),
            ):
                stack.callback(handle.remove)
            yield

    def _is_on(self) -> bool:
        return self.step is not None and torch.is_grad_enabled() and self._num_lines < MAX_CALLS

    def _enter(self, module: nn.Module, args: Any) -> None:
        """A module is called."""
        if not self._is_on():
            return
        if not self._stack or self._root is None:
            with torch._C.DisableTorchFunction():
                self._root = self._root_call(module, args)
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module returned, or raised."""
        if module not in self._stack or self._root is None:
            return
        while self._stack.pop() is not module:
            continue
        root = self._root
        name = root.names.get(id(module))
        if output is None or name is None or not self._is_on():
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
        """The gradient of a module's output is there."""
        if self.step is not None and self._num_lines < MAX_CALLS:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._write("backward", about, root, gradient)

    def _root_call(self, module: nn.Module, args: Any) -> RootCall:
        model = unwrapped(module)
        length = None if self.in_microbatches else num_rows(args)
        rows = row_checksums(args, length) if length else None
        return RootCall({id(part): name for name, part in model.named_modules()}, type(model).__name__, rows)

    def _write(self, direction: str, about: dict[str, Any], root: RootCall, value: Any) -> None:
        tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
        if not tensors:
            return
        found: dict[str, Any]
        if self.in_microbatches:
            found = {
                "microbatch": self.microbatch,
                "bits": [bits(tensor) for tensor in tensors],
                "norm": norm(tensors[0]),
            }
        else:
            found = _rows_of(tensors, root.rows, self.world_size)
        self._num_lines += 1
        self.writer.write("module", step=self.step, direction=direction, **about, **found)


def _rows_of(tensors: list[Tensor], keys: list[int] | None, world_size: int) -> dict[str, Any]:
    """The sketches of an output's rows, of so many that all ranks together keep about `MAX_ROWS`."""
    if keys is None:
        return {"keys": [], "rows": []}
    tensor = next((found for found in tensors if found.ndim > 0 and found.shape[0] == len(keys)), None)
    if tensor is None:
        return {"keys": [], "rows": []}
    limit = MAX_ROWS / (len(keys) * world_size)
    chosen = [index for index, key in enumerate(keys) if (key * 0x9E3779B97F4A7C15 >> 7) % 1024 < limit * 1024]
    return {"keys": [keys[index] for index in chosen], "rows": summarize_rows(tensor[chosen]) if chosen else []}
