"""What a watched run records: of all modules in one step, of every optimizer at every step.

If the unit of computation is a microbatch (the API, single-process scripts), a microbatch's modules give the same bits
on any rank: calls are identified by (microbatch, call). Else the ranks' batches differ in size, so each sample's own
row of an output is summarized, and identified by the content of its row of the model's input.

Nothing here may change a number of the program: no generator is drawn from, checksums are of detached tensors, and
`DisableTorchFunction` keeps the code of tensor subclasses, and of simulated devices, out of what only looks. `nudge` is
the exception, in a run of its own.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.callsite import script_line
from samestep.comm.communicator import Communicator
from samestep.data.nested import leaves
from samestep.engine.sharded_state import LocalShard, ShardedState
from samestep.engine.step import TrainStep
from samestep.verify.recording import JsonlWriter
from samestep.verify.summaries import (
    bits,
    local_part,
    norm,
    num_rows,
    sample_checksums,
    summarize_rows,
    summarize_tensor,
    unsharded,
)
from samestep.verify.trained_batches import Batches, Metrics
from samestep.verify.wraps import Wrap, unwrapped

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
class ModuleRecorder:
    """Records the modules of this rank in the step of interest."""

    writer: JsonlWriter
    in_microbatches: bool  # whether microbatches are recorded; else rows are
    world_size: int  # over which the rows that are kept are divided
    step: int | None = None  # the number of the step, while it is the one of interest
    microbatch: int = -1  # that runs now; -1 outside of microbatches
    _stack: list[nn.Module] = field(default_factory=list)
    _root: RootCall | None = None
    _num_lines: int = 0

    def wrap(self) -> Wrap:
        """The wrap of all modules' calls: no hook, which a single-process script's driver would send to its workers."""

        def call(inner: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._is_on() or not torch.is_grad_enabled():
                return inner(module, *args, **kwargs)
            self._enter(module, args)
            output = None
            try:
                output = inner(module, *args, **kwargs)
            finally:
                self._leave(module, output)
            return output

        return Wrap(nn.Module, "__call__", call)

    @contextmanager
    def in_chunk(self, number: int) -> Iterator[None]:
        """For a block that runs a microbatch, whose outermost module is a root: in a worker nothing is around it."""
        before = self.microbatch, self._stack, self._root
        self.microbatch, self._stack, self._root = number, [], None
        try:
            yield
        finally:
            self.microbatch, self._stack, self._root = before

    def _is_on(self) -> bool:
        return self.step is not None and self._num_lines < MAX_CALLS

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._stack or self._root is None:
            model = unwrapped(module)
            names = {id(part): name for name, part in model.named_modules()}
            with torch._C.DisableTorchFunction():
                length = None if self.in_microbatches else num_rows(args)
                rows = sample_checksums(args, length) if length else None
            self._root = RootCall(names, type(model).__name__, rows)
        self._stack.append(module)

    def _leave(self, module: nn.Module, output: Any) -> None:
        """A module returned, or raised."""
        self._stack.pop()
        root = self._root
        assert root is not None, "a module that was entered has a root"
        name = root.names.get(id(module))
        if output is None or name is None or not self._is_on() or not torch.is_grad_enabled():
            return
        about = {
            "name": name,
            "type": type(module).__name__,
            "root": root.type,
            "call": root.num_calls,
            "training": module.training,
            "line": script_line(),
            **({"microbatch": self.microbatch} if self.in_microbatches else {}),
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
            found = {"bits": checksums, "norm": norm(tensors[0])}
        else:
            found = self._rows_of(tensors, root.rows or [])
        self._num_lines += 1
        self.writer.write("module", step=self.step, direction=direction, **about, **found)

    def _rows_of(self, tensors: list[Tensor], keys: list[int]) -> dict[str, Any]:
        """The summaries of an output's rows, of so many that all ranks together keep about `MAX_ROWS`."""
        tensor = next((found for found in tensors if keys and found.shape[:1] == (len(keys),)), None)
        if tensor is None:
            return {"keys": [], "rows": []}
        # Chosen by content: every run, whatever its ranks, keeps the same rows.
        # In 1024ths of the rows. The factor below is 2^64 by the golden ratio, which spreads keys (Knuth,
        # multiplicative hashing).
        limit = 1024 * MAX_ROWS / (len(keys) * self.world_size)
        chosen = [index for index, key in enumerate(keys) if (key * 0x9E3779B97F4A7C15 >> 7) % 1024 < limit]
        return {"keys": [keys[index] for index in chosen], "rows": summarize_rows(tensor[chosen]) if chosen else []}


# A few units of rounding of float32: by a run with it `Tolerance` measures how a program lets rounding grow.
NUDGE = 4 * 2.0**-23
EPSILONS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True)
class ShardedParameters:
    """The local shards that a sharded training step gave its optimizers; unsharded tensors are recorded of them."""

    state: ShardedState
    over: Communicator  # all of its ranks gather the same tensors in the same order
    names: dict[int, str]  # by the shards' ids

    @classmethod
    def of(cls, step: TrainStep) -> "ShardedParameters | None":
        """The sharded parameters of a step; None if its optimizers hold the parameters of the model."""
        state = step.sharded_state
        if state is None:
            return None
        return cls(state, step.communicator, {id(shard): name for name, shard in state.parts.items()})

    def numel(self, parameter: Tensor) -> int:
        """The elements of an unsharded parameter."""
        sharding = self.state.shardings.get(self.names.get(id(parameter), ""))
        return parameter.numel() if sharding is None else sharding.shape.numel()

    def unsharded(self, parameter: Tensor, value: Tensor) -> Tensor:
        """The unsharded tensor of a value of a local shard's shape, on every rank; any other value as it is."""
        sharding = self.state.shardings.get(self.names.get(id(parameter), ""))
        if sharding is None or value.shape != parameter.shape or value.ndim == 0:
            return value
        return LocalShard(value.detach().contiguous(), sharding).gather(self.over)


@dataclass
class _KnownOptimizer:
    """An optimizer that has stepped."""

    number: int
    parameters: list[Tensor]
    models: list["weakref.ref[nn.Module]"]  # that hold its parameters


@dataclass
class StepRecorder:
    """Records the steps of this rank's optimizers.

    A hook before an update reads the gradients, one after it the state. Losses, inputs and microbatches come before
    them, and are gathered until the step is written down (`finish`): after each update of an optimizer; but once, at
    its end, in a step of `samestep.Run`, whatever optimizers step in it.
    """

    writer: JsonlWriter
    batches: Batches
    metrics: Metrics
    modules: ModuleRecorder
    facts: Callable[..., Sequence[dict[str, Any]]]  # the causes' observations since the last call
    end: Callable[[], None]  # ends the program after the last step
    num_wanted: int  # steps to record
    detail: int | None = None  # the step whose modules are recorded
    nudge: bool = False  # whether gradients are changed by a rounding error
    number: int = 0  # of the step that comes next
    in_train_step: bool = False  # whether a step of `samestep.Run` is under way, which is recorded as one
    sharded: ShardedParameters | None = None  # that step's
    losses: list[float] = field(default_factory=list)  # roots of backward since the last step
    inputs: list[int] = field(default_factory=list)  # checksums of the inputs of wrapped forwards since the last step
    microbatches: list[list[int]] = field(default_factory=list)  # that this rank ran since the last step
    num_rows: int = 0  # samples in those inputs
    epsilon: float = 0.0  # the rounding unit of the coarsest type that was computed with
    _known: "weakref.WeakKeyDictionary[Optimizer, _KnownOptimizer]" = field(default_factory=weakref.WeakKeyDictionary)
    _gradients: list[dict[str, Any]] = field(default_factory=list)
    _states: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.modules.step = 0 if self.detail == 0 else None

    def end_if_done(self) -> None:
        """Ends the program if enough steps were recorded."""
        if self.number >= self.num_wanted:
            self.end()

    def before(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update, for the first time in its step or, by a closure, again."""
        self.end_if_done()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            known = self._known.get(optimizer) or self._introduce(optimizer)
            if self.nudge:
                nudge([p for p in known.parameters if p.grad is not None])
            # An optimizer with a closure evaluates several times in a step: the first gradients are the step's.
            if not any(group["optimizer"] == known.number for group in self._gradients):
                grads = [None if p.grad is None else self._unsharded(p, p.grad) for p in known.parameters]
                self._gradients.append({"optimizer": known.number, **_summary(grads)})

    def after(self, optimizer: Optimizer) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            known = self._known[optimizer]
            moments = [self._moments(optimizer, parameter) for parameter in known.parameters]
            rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
            values = _summary([self._unsharded(parameter, parameter) for parameter in known.parameters])
            self._states.append({"optimizer": known.number, "lr": rates, "moments": moments, **values})
        if not self.in_train_step:
            self.finish([model for ref in known.models if (model := ref()) is not None], self.batches.pop_trained())

    def finish(self, models: Sequence[nn.Module], samples: dict[str, Any]) -> None:
        """Writes a step down, and ends the program if it was the last one."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if samples.get("num_samples") is None and self.num_rows:
                samples = {**samples, "num_samples": self.num_rows}
            buffers = [found for model in models for found in model.named_buffers()]
            self.writer.write(
                "step",
                step=self.number,
                loss=self.losses,
                inputs=self.inputs,
                microbatches=self.microbatches,
                epsilon=self.epsilon,
                gradients=self._gradients,
                states=self._states,
                buffers={"names": [name for name, _ in buffers], **_summary([buffer for _, buffer in buffers])},
                **samples,
            )
        self.write_rest(after_step=True)
        self.losses, self.inputs, self.microbatches = [], [], []
        self.num_rows = 0
        self._gradients, self._states = [], []
        self.metrics.in_exchange = False
        self.number += 1
        self.modules.step = self.number if self.number == self.detail else None
        self.end_if_done()

    def write_rest(self, *, after_step: bool = False) -> None:
        """Writes the reduced numbers and the facts since the last step."""
        for values in self.metrics.pop_values():
            self.writer.write("metric", step=self.number, **values)
        for fact in self.facts(after_step=after_step):
            self.writer.write("fact", **{"step": self.number, **fact})

    def _introduce(self, optimizer: Optimizer) -> _KnownOptimizer:
        """Writes an optimizer's parameters down before its first step."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        models = _root_modules()
        names: dict[int, str] = dict(self.sharded.names) if self.sharded is not None else {}
        for name, parameter in (found for model in models for found in model.named_parameters()):
            names.setdefault(id(parameter), name)  # the first of several models to hold it
        # Models are found among all objects: a script may call its model by any name, or hold several.
        own = {id(parameter) for parameter in parameters}
        holders = [model for model in models if any(id(p) in own for p in model.parameters())]
        known = _KnownOptimizer(len(self._known), parameters, [weakref.ref(model) for model in holders])
        self._known[optimizer] = known
        self.writer.write(
            "parameters",
            optimizer=known.number,
            type=type(optimizer).__name__,
            names=[names.get(id(parameter), f"parameter {index}") for index, parameter in enumerate(parameters)],
            numel=[p.numel() if self.sharded is None else self.sharded.numel(p) for p in parameters],
            dtype=[str(parameter.dtype).removeprefix("torch.") for parameter in parameters],
            divided=any(local_part(parameter).numel() < parameter.numel() for parameter in parameters),
            **_summary([self._unsharded(parameter, parameter) for parameter in parameters]),
        )
        self.epsilon = max([self.epsilon, *(EPSILONS.get(parameter.dtype, 0.0) for parameter in parameters)])
        return known

    def _unsharded(self, parameter: Tensor, value: Tensor) -> Tensor:
        """The unsharded tensor of a parameter, its gradient, or its state in the optimizer."""
        return unsharded(value if self.sharded is None else self.sharded.unsharded(parameter, value))

    def _moments(self, optimizer: Optimizer, parameter: Tensor) -> int:
        """A checksum of an optimizer's state of a parameter."""
        state = optimizer.state.get(parameter, {})
        total = 0
        for leaf in (leaf for key in sorted(state, key=str) for leaf in leaves(state[key])):
            if isinstance(leaf, Tensor):
                part = bits(self._unsharded(parameter, leaf))
            else:
                # The hash of a number, unlike a text's, is the same in every process.
                part = hash(leaf) if isinstance(leaf, int | float) else 0
            total = (total * 1_000_003 + part) % 2**63
        return total


def with_gradients(act: Callable[[Optimizer], None]) -> Callable[..., Any]:
    """A hook before an optimizer's step that acts once the gradients are known: after its closure, if it has one."""

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            act(optimizer)
            return None

        def evaluate() -> Any:
            value = closure()
            act(optimizer)
            return value

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluate}
        return (args[0], evaluate, *args[2:]), kwargs

    return hook


def nudge(parameters: Sequence[Tensor]) -> None:
    """Changes gradients by a few rounding errors, of their own size and of the whole gradient's root mean square."""
    # Signs by position, and no draw: all ranks change their gradients alike, and the program's generators do not move.
    count = sum(parameter.numel() for parameter in parameters)
    size = sum(norm(unsharded(p.grad)) ** 2 for p in parameters if p.grad is not None)
    typical = (size / count) ** 0.5 if count else 0.0
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None and parameter.grad.is_floating_point():
            grad = local_part(parameter.grad)
            positions = torch.arange(grad.numel(), device=grad.device) + index
            signs = ((positions * 2_654_435_761 >> 13) % 2 * 2 - 1).reshape(grad.shape)
            grad.add_((grad.abs() + typical) * (NUDGE * signs))


def _root_modules() -> list[nn.Module]:
    """The modules of this process that no other module holds, unwrapped, in the order in which they were made."""
    # By its type: `isinstance` asks objects for their `__class__`, by which a proxy would run the program's code.
    modules = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
    held = {id(child) for module in modules for child in module.children()}
    return [unwrapped(module) for module in modules if id(module) not in held]


def _summary(tensors: Sequence[Tensor | None]) -> dict[str, list[Any]]:
    """Checksums, norms and summaries of tensors; None for an absent one."""
    functions = {"bits": bits, "norm": norm, "summary": summarize_tensor}
    return {key: [None if tensor is None else of(tensor) for tensor in tensors] for key, of in functions.items()}
