"""Replicas: the wrapped module with stand-ins for its parameters, for the time of one chunk.

As `torch.func.functional_call` does it, the module itself runs, with other tensors in the places of its parameters;
`isinstance(w, nn.Parameter)` stays true inside. What a chunk writes to the module's attributes is taken back, as it is
lost with the replicas of torch's DataParallel: the next chunk, which may run on another rank, must not see it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import DeterminismError

ACCUMULATE = "torch::autograd::AccumulateGrad"
REENTRANT = "CheckpointFunctionBackward"


class Replicas:
    """A wrapped module's places for parameters and attributes.

    Args:
        module: the wrapped module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = tuple(module.named_modules(remove_duplicate=True))
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self._slots: list[tuple[nn.Module, str, int]] = []
        numbers: dict[int, int] = {}
        for prefix, child in self.modules:
            for key, parameter in child._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in numbers:
                    numbers[id(parameter)] = len(self.parameters)
                    self.parameters.append(parameter)
                    self.names.append(f"{prefix}.{key}" if prefix else key)
                self._slots.append((child, key, numbers[id(parameter)]))
        # Recurrent layers keep their weights in a list as well, in the order of the kernel's arguments.
        self._lists = [child for _, child in self.modules if isinstance(child, nn.RNNBase)]

    def is_current(self, module: nn.Module) -> bool:
        """Whether the module still has these children and parameters."""
        children = tuple(module.modules())
        if len(children) != len(self.modules) or any(
            child is not known for child, (_, known) in zip(children, self.modules, strict=True)
        ):
            return False
        count = sum(parameter is not None for child in children for parameter in child._parameters.values())
        return count == len(self._slots) and all(
            child._parameters.get(key) is self.parameters[number] for child, key, number in self._slots
        )

    @contextmanager
    def swapped(self, stand_ins: dict[int, Tensor], lost: set[str]) -> Iterator[None]:
        """The time while a chunk runs: stand-ins in place; afterwards everything is as it was.

        Args:
            stand_ins: by the parameter's number.
            lost: takes the names of attributes that the chunk wrote.
        """
        before = [dict(child.__dict__) for _, child in self.modules]
        children = [dict(child._modules) for _, child in self.modules]
        weights = [list(child._flat_weights) for child in self._lists]
        for stand_in in stand_ins.values():
            stand_in._is_param = True
        by_id = {id(self.parameters[number]): stand_in for number, stand_in in stand_ins.items()}
        for child, key, number in self._slots:
            if number in stand_ins:
                child._parameters[key] = stand_ins[number]  # type: ignore[assignment]
        for child, originals in zip(self._lists, weights, strict=True):
            child._flat_weights = [by_id.get(id(weight), weight) for weight in originals]
        placed = [child._flat_weights for child in self._lists]
        try:
            yield
        finally:
            for child, originals, ours in zip(self._lists, weights, placed, strict=True):
                if child._flat_weights is ours:
                    child._flat_weights = originals
            for (prefix, child), entries, grandchildren in zip(self.modules, before, children, strict=True):
                _restore(prefix, child, entries, grandchildren, lost)
            for child, key, number in self._slots:
                child._parameters[key] = self.parameters[number]

    def versions(self) -> list[int]:
        """The versions of all parameters: a write moves them."""
        return [parameter._version for parameter in self.parameters]

    def check_unwritten(self, versions: Sequence[int]) -> None:
        """Raises if a parameter was written since `versions` were taken."""
        for name, before, now in zip(self.names, versions, self.versions(), strict=True):
            if before != now:
                raise DeterminismError(
                    f"parameter {name} was written to inside the wrapped forward; chunks that run on other devices "
                    "would not see it. Write it outside: after optimizer.step(), or in the training loop"
                )

    def check_graph(self, outputs: Sequence[Tensor], token: Tensor | None) -> None:
        """Raises if a gradient would leave a chunk by another way than its stand-ins and inputs.

        Args:
            outputs: what the chunks returned that requires grad.
            token: of the region they ran in; None if nothing that requires grad entered it.
        """
        entrance = None if token is None else token.grad_fn
        oldest = -1 if entrance is None else entrance._sequence_nr()
        names = {id(parameter): name for parameter, name in zip(self.parameters, self.names, strict=True)}
        waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node in seen or node is entrance:
                continue
            seen.add(node)
            name = node.name()
            if name == ACCUMULATE:
                self._check_leaf(node.variable, names)  # type: ignore[attr-defined]
            elif name == REENTRANT:
                raise DeterminismError(
                    "activation checkpointing inside the wrapped forward uses the reentrant form, which computes "
                    "gradients behind autograd's back; pass use_reentrant=False to torch.utils.checkpoint"
                )
            elif node._sequence_nr() < oldest:
                raise DeterminismError(
                    f"the wrapped forward uses a tensor that was computed outside of it ({name}) and requires grad; "
                    "its gradient would be a part only. Pass it to the forward as an input"
                )
            waiting += [following for following, _ in node.next_functions if following is not None]

    def _check_leaf(self, leaf: Tensor, names: dict[int, str]) -> None:
        """Raises for a leaf that lives longer than the forward: one of the parameters, or one in an attribute."""
        if id(leaf) in names:
            raise DeterminismError(
                f"parameter {names[id(leaf)]} was used inside the wrapped forward as it is, not by the module's "
                "attribute: its gradient would be a part only. A parameter kept in a plain list, dict or closure is "
                "not seen; use nn.ParameterList, or self.weight"
            )
        for prefix, child in self.modules:
            for key, value in child.__dict__.items():
                if key not in ("_parameters", "_buffers", "_modules") and _holds(value, leaf):
                    raise DeterminismError(
                        f"the attribute {f'{prefix}.{key}' if prefix else key} holds a tensor that requires grad and "
                        "is no parameter of the wrapped module; its gradient would be a part only. Register it: "
                        "nn.Parameter, nn.ParameterList"
                    )


def _restore(
    prefix: str, child: nn.Module, entries: dict[str, Any], grandchildren: dict[str, Any], lost: set[str]
) -> None:
    """Puts a module's attributes and children back, and notes the names of those that differ."""
    now = child.__dict__
    if len(now) != len(entries) or any(now.get(key) is not value for key, value in entries.items()):
        if not type(child).__module__.startswith("torch."):
            written = {key for key, value in now.items() if key not in entries or entries[key] is not value}
            lost |= {f"{prefix}.{key}" if prefix else key for key in written | (entries.keys() - now.keys())}
        now.clear()
        now.update(entries)
    if len(child._modules) != len(grandchildren) or any(
        child._modules.get(key) is not value for key, value in grandchildren.items()
    ):
        lost.add(prefix or "a submodule")
        child._modules.clear()
        child._modules.update(grandchildren)


def _holds(value: Any, leaf: Tensor, depth: int = 3) -> bool:
    """Whether a plain attribute is a tensor, or a list, tuple or dict that holds it."""
    if value is leaf:
        return True
    if depth and isinstance(value, list | tuple):
        return any(_holds(entry, leaf, depth - 1) for entry in value)
    if depth and isinstance(value, dict):
        return any(_holds(entry, leaf, depth - 1) for entry in value.values())
    return False


def uninitialized(module: nn.Module) -> bool:
    """Whether a lazy layer has not seen its first input yet."""
    return any(torch.nn.parameter.is_lazy(parameter) for parameter in module.parameters())
