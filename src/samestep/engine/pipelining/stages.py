"""Stages: a model as parts that are applied one after another, cut into stages of which each rank keeps some."""

import copy
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from samestep.comm.communicator import Communicator
from samestep.comm.exceptions import on_main
from samestep.data.randomness import Generators
from samestep.engine.strategy_options import Pipeline
from samestep.errors import UsageError

TRIALS = 3

Parts = list[tuple[str, nn.Module]]


class Stage(nn.Module):
    """Some parts of a model, applied one after another; in messages modules have the names that they have in it."""

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
        """Applies all parts."""
        for module in self._chain:
            value = module(value)
        return value

    @property
    def writes_to_input(self) -> bool:
        """Whether the first part overwrites its input."""
        return bool(getattr(self._chain[0], "inplace", False))


def parts_of(model: nn.Module) -> Parts:
    """The parts of a model by name, in the order in which it applies them; a `UsageError` if it has no such parts."""
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
    _check_parts(model, parts)
    return parts


def cut(model: nn.Module, parts: Parts, options: Pipeline, num_stages: int, communicator: Communicator) -> list[Parts]:
    """The parts of each stage; all ranks cut as rank 0 has measured. Raises a `UsageError` if there is no such cut."""
    if len(parts) < num_stages:
        raise UsageError(
            f"the {type(model).__name__} has {len(parts)} parts for {num_stages} stages ({_named(parts)}): use fewer "
            'ranks along "pipe", or a model of more parts'
        )
    starts = _named_starts(parts, options.split, num_stages) if options.split is not None else None
    # Deterministic: all ranks compute the same cut from the same costs.
    if starts is None:
        starts = balanced_starts(_costs(parts, options.example, communicator), num_stages)
    stages = [parts[a:b] for a, b in zip(starts, [*starts[1:], len(parts)], strict=True)]
    _refuse_tied(model, stages)
    return stages


def balanced_starts(costs: Sequence[int], num_stages: int) -> list[int]:
    """The starts of the stages by which the most costly stage is as cheap as can be; of several such cuts the first."""
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def best(stages: int, end: int) -> tuple[int, tuple[int, ...]]:
        """The most costly of so many stages before `end`, and their starts."""
        if stages == 1:
            return sums[end], (0,)
        cuts = ((best(stages - 1, start), start) for start in range(stages - 1, end))
        return min((max(most, sums[end] - sums[start]), (*starts, start)) for (most, starts), start in cuts)

    return list(best(num_stages, len(costs))[1])


def _costs(parts: Parts, example: Any, communicator: Communicator) -> list[int]:
    """The cost of each part: nanoseconds as rank 0 measures them, or the number of parameters."""
    if example is None:
        return [sum(parameter.numel() for parameter in module.parameters()) for _, module in parts]
    # Times differ from rank to rank, and ranks that cut differently would wait for each other forever.
    measured = on_main(communicator, lambda: _measured(parts, example, communicator.device))
    return communicator.gather_words(measured or [0] * len(parts))[0]


def _measured(parts: Parts, example: Any, device: torch.device) -> list[int]:
    """The nanoseconds of each part."""
    generators = Generators(device)
    costs, value, number = [0] * len(parts), example, 0
    try:
        # A trial must not move the script's generators.
        with generators.preserved():
            generators.seed(0)
            for number, (_, module) in enumerate(parts):
                costs[number], value = _measure(module, value, device)
    except UsageError:
        raise
    except Exception as error:  # whatever the parts make of the example
        raise UsageError(
            f"Pipeline(example=…) does not fit the model: part {parts[number][0]} raised {type(error).__name__}: "
            f"{error}; give what loss_fn gives to the model for one microbatch, or leave it out (stages are cut by "
            "parameters then)"
        ) from error
    return costs


def _measure(module: nn.Module, value: Any, device: torch.device) -> tuple[int, Any]:
    """The shortest of a few times for forward and backward of a copy of a module, and its output."""
    # Of a copy: a trial must leave no gradients, and no running statistics, in the model.
    module = copy.deepcopy(module).to(device)
    times = []
    for _ in range(TRIALS):
        # Copies: a part may write to what it is given, which autograd refuses of a leaf.
        inputs = [_leaf(tensor.to(device)).clone() for tensor in as_tensors(value)]
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
    """The tensors of a value that goes from one part to the next; a `UsageError` if it is something else."""
    entries = value if isinstance(value, tuple | list) else (value,)
    for entry in entries:
        if not isinstance(entry, Tensor):
            raise UsageError(
                f"a {type(entry).__name__} cannot go from one stage of a pipeline to the next: a tensor can, or a "
                "tuple of tensors; cut the model elsewhere (split)"
            )
    return list(entries)


def like(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Tensors in the form of a value: one tensor, or a tuple."""
    return tuple(tensors) if isinstance(value, tuple | list) else tensors[0]


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) > 0


def _flattened(prefix: str, module: nn.Module) -> Parts:
    """The parts of a sequence, and of sequences in it."""
    # A nested sequence with hooks stays whole: its hooks run only if it is called itself.
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
    if not _is_chain(module) or (prefix and has_hooks):
        return [(prefix, module)]
    inner = ((f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children())
    return [part for name, child in inner for part in _flattened(name, child)]


def _check_parts(model: nn.Module, parts: Parts) -> None:
    """Checks that no part is within another or comes twice, and that the parts hold all parameters and buffers."""
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
    inside = {id(tensor) for _, part in parts for tensor in (*part.parameters(), *part.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in inside:
            raise UsageError(f"{name} is in none of the parts of {type(model).__name__}: {_named(parts)}")


def _named_starts(parts: Parts, split: Sequence[str], num_stages: int) -> list[int]:
    if len(split) != num_stages - 1:
        raise UsageError(
            f'got split={list(split)}, which makes {len(split) + 1} stages for {num_stages} ranks along "pipe": name '
            f"{num_stages - 1} modules"
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
