"""Splitting: a model as parts that are applied one after another, and which of them make a stage."""

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.comm.communicator import Communicator
from samestep.data.randomness import Generators
from samestep.engine.strategies import Pipeline
from samestep.errors import UsageError

TRIALS = 3

Parts = list[tuple[str, nn.Module]]


class Stage(nn.Module):
    """Some parts of a model, applied one after another to one value.

    Args:
        parts: by name; in messages modules have the names that they have in the model.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.names = [name for name, _ in parts]
        self._chain = tuple(module for _, module in parts)
        for name, module in parts:
            *path, last = name.split(".")
            around: nn.Module = self
            for step in path:
                if step not in around._modules:
                    around.add_module(step, nn.Module())
                around = around.get_submodule(step)
            around.add_module(last, module)

    def forward(self, value: Any) -> Any:
        """The value, through all parts."""
        for module in self._chain:
            value = module(value)
        return value

    @property
    def writes_to_input(self) -> bool:
        """Whether the first part says that it overwrites what it is given."""
        return bool(getattr(self._chain[0], "inplace", False))


def parts_of(model: nn.Module) -> Parts:
    """The parts of a model by name, in the order in which it applies them.

    Raises:
        UsageError: it does not say which they are, or they are not all of it.
    """
    declared = getattr(model, "pipeline_stages", None)
    if callable(declared):
        parts = [(str(name), module) for name, module in declared()]
        for name, module in parts:
            if not isinstance(module, nn.Module):
                raise UsageError(
                    f"pipeline_stages() names {name!r}, a {type(module).__name__}; it must be an nn.Module"
                )
    elif _is_chain(model):
        parts = list(_flattened("", model))
    else:
        raise UsageError(
            f"strategy='pipeline' cannot see what {type(model).__name__} applies one after another: use an "
            "nn.Sequential, or give it a method pipeline_stages() that returns [(name, module), …] such that its "
            "forward is each module on what the one before it returned (a tensor, or a tuple of tensors)"
        )
    _check_names(model, parts)
    _check_whole(model, parts)
    return parts


def cut(model: nn.Module, parts: Parts, options: Pipeline, num_stages: int, communicator: Communicator) -> list[Parts]:
    """The parts of each stage.

    Args:
        model: whose parts they are.
        parts: in order.
        options: where to cut.
        num_stages: how many stages there are to be.
        communicator: among all ranks, which cut as rank 0 finds best.

    Raises:
        UsageError: the model cannot be cut so.
    """
    if len(parts) < num_stages:
        raise UsageError(
            f"the {type(model).__name__} has {len(parts)} parts for {num_stages} stages ({_named(parts)}): use fewer "
            'ranks along "pipe", fewer stages_per_rank, or a model of more parts'
        )
    starts = _named_starts(parts, options.split, num_stages) if options.split is not None else None
    if starts is None:
        starts = balanced_starts(_costs(parts, options.example, communicator), num_stages)
    stages = [parts[a:b] for a, b in zip(starts, [*starts[1:], len(parts)], strict=True)]
    _refuse_tied(model, stages)
    return stages


def balanced_starts(costs: Sequence[int], num_stages: int) -> list[int]:
    """Where stages begin so that the most costly is as cheap as can be; of several such cuts the first.

    Args:
        costs: of each part.
        num_stages: no more than parts.
    """
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    count = len(costs)
    best = [[sums[end] for end in range(count + 1)]]  # best[k][end]: the most costly of k + 1 stages before `end`
    where: list[list[int]] = [[0] * (count + 1)]
    for stages in range(1, num_stages):
        row, starts = [0] * (count + 1), [0] * (count + 1)
        for end in range(stages + 1, count + 1):
            options = [(max(best[-1][start], sums[end] - sums[start]), start) for start in range(stages, end)]
            row[end], starts[end] = min(options)
        best.append(row)
        where.append(starts)
    starts, end = [], count
    for stages in reversed(range(num_stages)):
        end = where[stages][end]
        starts.append(end)
    return starts[::-1]


def _costs(parts: Parts, example: Any, communicator: Communicator) -> list[int]:
    """What each part costs: nanoseconds as rank 0 measures them, or else parameters."""
    if example is None:
        return [sum(parameter.numel() for parameter in module.parameters()) for _, module in parts]
    costs, why = _measured(parts, example, communicator.device) if communicator.rank == 0 else ([0] * len(parts), b"")
    size, *costs = communicator.gather_words([len(why), *costs])[0]
    if size:
        sent = torch.tensor(list(why), dtype=torch.uint8, device=communicator.device)
        raise UsageError(bytes(communicator.share(sent).tolist()).decode())
    return costs


def _measured(parts: Parts, example: Any, device: torch.device) -> tuple[list[int], bytes]:
    """How long each part takes; or why that cannot be told, in a sentence for all ranks, who wait for it."""
    generators = Generators(device)
    costs, value, number = [0] * len(parts), example, 0
    try:
        with generators.preserved():
            generators.seed(0)
            for number, (_, module) in enumerate(parts):
                costs[number], value = _measure(module, value, device)
    except UsageError as error:
        return costs, str(error).encode()
    except Exception as error:  # whatever the parts make of the example
        what = f"part {parts[number][0]} raised {type(error).__name__}: {error}"
        text = (
            f"Pipeline(example=…) does not fit the model: {what}; give what loss_fn gives to the model for one "
            "microbatch, "
            "or leave it out (stages are cut by parameters then)"
        )
        return costs, text.encode()
    return costs, b""


def _measure(module: nn.Module, value: Any, device: torch.device) -> tuple[int, Any]:
    """How long forward and backward of a copy of a module take, the shortest of a few; and what it returns."""
    module = copy.deepcopy(module).to(device)
    times = []
    for _ in range(TRIALS):
        inputs = [_leaf(tensor.to(device)) for tensor in as_tensors(value)]
        _wait(device)
        start = time.perf_counter_ns()
        result = module(like(value, inputs))
        roots = [tensor for tensor in as_tensors(result) if tensor.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        _wait(device)
        times.append(time.perf_counter_ns() - start)
    return min(times), like(result, [tensor.detach() for tensor in as_tensors(result)])


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def as_tensors(value: Any) -> list[Tensor]:
    """The tensors of what goes from one part to the next.

    Raises:
        UsageError: it is neither a tensor nor a tuple of tensors.
    """
    entries = value if isinstance(value, tuple | list) else (value,)
    for entry in entries:
        if not isinstance(entry, Tensor):
            raise UsageError(
                f"a {type(entry).__name__} cannot go from one stage of a pipeline to the next: a tensor can, or a "
                "tuple of tensors; cut the model elsewhere (split)"
            )
    return list(entries)


def like(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Other tensors in the form of a value: one, or a tuple."""
    return tuple(tensors) if isinstance(value, tuple | list) else tensors[0]


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) > 0


def _flattened(prefix: str, module: nn.Module) -> Parts:
    """The parts of a sequence, and of sequences in it."""
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
    if not _is_chain(module) or (prefix and has_hooks):
        return [(prefix, module)]
    inner = ((f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children())
    return [part for name, child in inner for part in _flattened(name, child)]


def _check_names(model: nn.Module, parts: Parts) -> None:
    """Checks that no part is within another, and none comes twice."""
    names = [name for name, _ in parts]
    modules = [id(module) for _, module in parts]
    for number, name in enumerate(names):
        for other in names[:number]:
            if not name or f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
                raise UsageError(f"the parts {other!r} and {name!r} of {type(model).__name__} need names of their own")
        if modules[number] in modules[:number] and any(True for _ in parts[number][1].parameters()):
            other = names[modules.index(modules[number])]
            raise UsageError(
                f"{other} and {name} of {type(model).__name__} are one module, applied twice; strategy='pipeline' "
                "needs it once"
            )


def _check_whole(model: nn.Module, parts: Parts) -> None:
    """Checks that each parameter and buffer of the model is in a part."""
    inside = {id(tensor) for _, part in parts for module in part.modules() for tensor in _own(module)}
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if id(tensor) not in inside:
            raise UsageError(f"{name} is in none of the parts of {type(model).__name__}: {_named(parts)}")


def _own(module: nn.Module) -> list[Tensor]:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return [tensor for tensor in tensors if tensor is not None]


def _named_starts(parts: Parts, split: Sequence[str], num_stages: int) -> list[int]:
    """Where the stages begin that a user named."""
    if len(split) != num_stages - 1:
        raise UsageError(
            f'got split={list(split)}, which makes {len(split) + 1} stages; ranks along "pipe" times stages_per_rank '
            f"are {num_stages}: name {num_stages - 1} modules"
        )
    starts = [0]
    for name in split:
        found = [number for number, (own, _) in enumerate(parts) if own == name or own.startswith(f"{name}.")]
        if not found:
            raise UsageError(f"split names {name!r}, which is none of the parts: {_named(parts)}")
        if found[0] <= starts[-1]:
            raise UsageError(
                f"split names {name!r} where no new stage can begin: name modules in the order in which they run, each "
                "after the first"
            )
        starts.append(found[0])
    return starts


def _refuse_tied(model: nn.Module, stages: Sequence[Parts]) -> None:
    """Raises a `UsageError` that names the first parameter which two stages share."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owner: dict[int, int] = {}
    for number, parts in enumerate(stages):
        for place, module in parts:
            for parameter in module.parameters():
                if owner.setdefault(id(parameter), number) != number:
                    raise UsageError(
                        f"parameter {names.get(id(parameter))} is used in two stages of the pipeline, in {place} and "
                        "before; give each a parameter of its own, or cut so that one stage has both (split)"
                    )


def _named(parts: Parts) -> str:
    names = [name for name, _ in parts]
    return ", ".join(names if len(names) <= 8 else [*names[:4], "…", *names[-3:]])
