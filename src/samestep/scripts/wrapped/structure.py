"""The structure of a forward's arguments and results: taken apart into tensors and a template, and put together again.

The containers are those that `torch.nn.parallel` scatters and gathers (`torch/nn/parallel/scatter_gather.py`): lists,
tuples, named tuples and dicts; results may be dataclasses too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from samestep.data.nested import map_entries


@dataclass(frozen=True)
class Slot:
    """Where a tensor was: the position of its leaf."""

    index: int


@dataclass(frozen=True)
class DataclassTemplate:
    """A dataclass, taken apart: its class and its fields."""

    cls: type
    values: Mapping[str, Any]


def take_apart(value: Any, is_leaf: Callable[[Any], bool], *, dataclasses: bool = False) -> tuple[list[Any], Any]:
    """Splits a nested value into its leaves and a template with a `Slot` in the place of each.

    Args:
        value: any nesting of lists, tuples, named tuples and dicts.
        is_leaf: what to take out; everything else stays in the template as it is.
        dataclasses: look into dataclasses, too.
    """
    leaves: list[Any] = []

    def visit(entry: Any) -> Any:
        if is_leaf(entry):
            leaves.append(entry)
            return Slot(len(leaves) - 1)
        if dataclasses and is_dataclass(entry) and not isinstance(entry, type | dict):
            values = {field.name: visit(getattr(entry, field.name)) for field in fields(entry) if field.init}
            return DataclassTemplate(type(entry), values)
        return entry if isinstance(entry, Mapping) and not isinstance(entry, dict) else map_entries(visit, entry)

    return leaves, visit(value)


def put_together(template: Any, leaves: Sequence[Any]) -> Any:
    """The nested value of a template, with these leaves in its slots."""

    def visit(entry: Any) -> Any:
        if type(entry) is Slot:
            return leaves[entry.index]
        if type(entry) is DataclassTemplate:
            return entry.cls(**{name: visit(value) for name, value in entry.values.items()})
        return entry if isinstance(entry, Mapping) and not isinstance(entry, dict) else map_entries(visit, entry)

    return visit(template)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor."""
    return isinstance(value, Tensor)
