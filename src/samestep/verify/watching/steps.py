"""The steps: gradients and state at every step of every optimizer, written down as checksums and sketches."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.data.nested import leaves
from samestep.verify.watching.batches import Batches
from samestep.verify.watching.ending import Ending
from samestep.verify.watching.jsonl_writer import JsonlWriter
from samestep.verify.watching.metrics import Metrics
from samestep.verify.watching.modules import Modules
from samestep.verify.watching.names import parameter_names, roots
from samestep.verify.watching.parts import Parts
from samestep.verify.watching.tensor_summary import bits, local_part, norm, summarize_tensor

NUDGE = 4 * 2.0**-23
EPSILONS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


class Notes(Protocol):
    """What the causes' recorder offers: what it noticed since the last call."""

    def facts(self) -> Sequence[dict[str, Any]]:
        """JSON objects with a "name"."""
        ...


@dataclass
class Known:
    """An optimizer that has stepped."""

    number: int
    parameters: list[Tensor]
    models: list["weakref.ref[nn.Module]"]


@dataclass
class Steps:
    """Watches the optimizers of this rank.

    Attributes:
        writer: where it is written.
        batches: which samples were trained on.
        metrics: what the program reduced itself.
        modules: told which step it is.
        notes: the causes' recorder.
        ending: ends the program after the last step.
        num_wanted: steps to watch.
        detail: the step whose modules are watched; None for none.
        nudge: whether gradients are changed by a rounding error.
        number: the step that comes next.
        parts: what this rank has of the state, while a step of `samestep.Run` is under way that spreads it.
        is_noted: whether this rank notes the microbatches of that step: of several that compute one together, one does.
        in_train_step: whether a step of `samestep.Run` is under way, which is written down as one.
        losses: roots of backward since the last step.
        inputs: checksums of what wrapped forwards were given since the last step.
        microbatches: microbatches that this rank ran since the last step.
        epsilon: the rounding unit of the coarsest type that was computed with.
    """

    writer: JsonlWriter
    batches: Batches
    metrics: Metrics
    modules: Modules
    notes: Notes
    ending: Ending
    num_wanted: int
    detail: int | None = None
    nudge: bool = False
    number: int = 0
    in_train_step: bool = False
    parts: Parts | None = None
    is_noted: bool = True
    losses: list[float] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    microbatches: list[list[int]] = field(default_factory=list)
    num_rows: int = 0
    epsilon: float = 0.0
    _known: "weakref.WeakKeyDictionary[Optimizer, Known]" = field(default_factory=weakref.WeakKeyDictionary)
    _gradients: list[dict[str, Any]] = field(default_factory=list)
    _states: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.modules.step = 0 if self.detail == 0 else None

    def before(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update, for the first time in its step or, by a closure, again."""
        if self.number >= self.num_wanted:
            self.ending.end()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            known = self._known.get(optimizer) or self._get_to_know(optimizer)
            if self.nudge:
                nudge([p for p in known.parameters if p.grad is not None])
            if any(group["optimizer"] == known.number for group in self._gradients):
                return
            grads = [None if p.grad is None else self._whole(p, p.grad) for p in known.parameters]
            self._gradients.append({"optimizer": known.number, **_summary(grads)})

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer has stepped."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            known = self._known[optimizer]
            moments = [self._moments(optimizer, parameter) for parameter in known.parameters]
            rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
            self._states.append(
                {"optimizer": known.number, "lr": rates, "moments": moments, **self._summary(known.parameters)}
            )
        if not self.in_train_step:
            models = [model for ref in known.models if (model := ref()) is not None]
            self.finish(models, self.batches.take())

    def finish(self, models: Sequence[nn.Module], samples: dict[str, Any]) -> None:
        """A step is over: writes it down, and ends the program if it was the last one."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if samples.get("num_samples") is None and self.num_rows:
                samples = {**samples, "num_samples": self.num_rows}
            self.writer.write(
                "step",
                step=self.number,
                loss=self.losses,
                inputs=self.inputs,
                microbatches=self.microbatches,
                epsilon=self.epsilon,
                gradients=self._gradients,
                states=self._states,
                buffers=_buffers(models),
                **samples,
            )
        self.write_rest()
        self.losses, self.inputs, self.microbatches = [], [], []
        self.num_rows = 0
        self._gradients, self._states = [], []
        self.metrics.in_exchange = False
        self.number += 1
        self.modules.step = self.number if self.number == self.detail else None
        if self.number >= self.num_wanted:
            self.ending.end()

    def write_rest(self) -> None:
        """Writes what was noticed beside the steps so far."""
        for values in self.metrics.take():
            self.writer.write("metric", step=self.number, **values)
        for fact in self.notes.facts():
            self.writer.write("fact", **{"step": self.number, **fact})

    def _get_to_know(self, optimizer: Optimizer) -> Known:
        """Looks at an optimizer's parameters before its first step."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        models = roots()
        names = {**parameter_names(models), **({} if self.parts is None else self.parts.names)}
        own = {id(parameter) for parameter in parameters}
        holders = [model for model in models if any(id(p) in own for p in model.parameters())]
        known = Known(len(self._known), parameters, [weakref.ref(model) for model in holders])
        self._known[optimizer] = known
        self.writer.write(
            "parameters",
            optimizer=known.number,
            type=type(optimizer).__name__,
            names=[names.get(id(parameter), f"parameter {index}") for index, parameter in enumerate(parameters)],
            numel=[p.numel() if self.parts is None else self.parts.num_elements(p) for p in parameters],
            dtype=[str(parameter.dtype).removeprefix("torch.") for parameter in parameters],
            **self._summary(parameters),
        )
        for parameter in parameters:
            self.epsilon = max(self.epsilon, EPSILONS.get(parameter.dtype, 0.0))
        return known

    def _whole(self, parameter: Tensor, value: Tensor) -> Tensor:
        """The whole of a parameter, its gradient, or what is kept of it."""
        return value if self.parts is None else self.parts.whole(parameter, value)

    def _summary(self, parameters: Sequence[Tensor]) -> dict[str, list[Any]]:
        return _summary([self._whole(parameter, parameter) for parameter in parameters])

    def _moments(self, optimizer: Optimizer, parameter: Tensor) -> int:
        """A checksum of what an optimizer keeps about a parameter."""
        state = optimizer.state.get(parameter, {})
        total = 0
        for key in sorted(state, key=str):
            for leaf in leaves(state[key]):
                if isinstance(leaf, Tensor):
                    part = bits(self._whole(parameter, leaf))
                else:
                    part = hash(leaf) if isinstance(leaf, int | float) else 0
                total = (total * 1_000_003 + part) % 2**63
        return total


def with_gradients(act: Callable[[Optimizer], None]) -> Callable[..., Any]:
    """A hook before an optimizer's step that acts once the gradients are there: where it has a closure, after that."""

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
    """Changes gradients by a few rounding errors, of their own size and of that of the whole gradient's elements."""
    count = sum(parameter.numel() for parameter in parameters)
    size = sum(norm(p.grad) ** 2 for p in parameters if p.grad is not None)
    typical = (size / count) ** 0.5 if count else 0.0
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None and parameter.grad.is_floating_point():
            grad = local_part(parameter.grad)
            positions = torch.arange(grad.numel(), device=grad.device) + index
            signs = ((positions * 2_654_435_761 >> 13) % 2 * 2 - 1).reshape(grad.shape)
            grad.add_((grad.abs() + typical) * (NUDGE * signs))


def _summary(tensors: Sequence[Tensor | None]) -> dict[str, list[Any]]:
    """Checksums, norms and sketches of tensors; None where there is none."""
    return {
        "bits": [None if tensor is None else bits(tensor) for tensor in tensors],
        "norm": [None if tensor is None else norm(tensor) for tensor in tensors],
        "summarize_tensor": [None if tensor is None else summarize_tensor(tensor) for tensor in tensors],
    }


def _buffers(models: Sequence[nn.Module]) -> dict[str, Any]:
    """The buffers of some models."""
    named = [(name, buffer) for model in models for name, buffer in model.named_buffers() if buffer is not None]
    return {"names": [name for name, _ in named], **_summary([buffer for _, buffer in named])}
