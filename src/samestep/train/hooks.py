"""Hooks: objects that a trainer calls at fixed points, the further state that it keeps, and the moving average."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor, nn

from samestep.engine.losses import describe
from samestep.engine.observer import StepObserver
from samestep.engine.result import StepResult
from samestep.errors import UsageError


class Hook:
    """The points at which `samestep.Trainer` calls its hooks, in their order; each does nothing unless overridden.

    A hook is any object with some of these methods; this class is for editors and type checkers. Every rank calls all
    hooks in the order given, at the same points: what is written to the model, or drawn, must be so on all of them
    (`trainer.run.is_main` is for output alone). A step that is repeated after the loss of a rank is one step, and calls
    its hooks once. A hook with `state_dict` and `load_state_dict` is part of the state, under its attribute `name`, or
    else its class's name in lower case: see `Trainer(state=…)`.
    """

    # `trainer` is typed Any because the trainer imports this module; hooks may annotate `samestep.Trainer`.

    def on_fit_start(self, trainer: Any) -> None:
        """A call of `fit` begins that has something to do; the state is restored if the run is resumed."""

    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        """An epoch begins, counted from 1; not called again if the run is resumed in the middle of it."""

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        """The model is updated. Reading `result.loss` waits for the device."""

    def on_evaluation_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """The evaluation of `fit` after an epoch has ended."""

    def on_epoch_end(self, trainer: Any, record: Any) -> None:
        """An epoch has ended, its evaluation too; `record` is a `samestep.EpochRecord`."""

    def on_checkpoint(self, trainer: Any, step: int) -> None:
        """The state after so many updates was taken for a checkpoint, which rank 0 may still be writing."""

    def on_failure(self, trainer: Any, error: Exception) -> None:
        """`fit` raises this error on this rank; others may not have raised it."""

    def on_fit_end(self, trainer: Any) -> None:
        """A call of `fit` ends, and all files are written; not called if a signal has stopped the run."""


EVENTS = tuple(name for name in vars(Hook) if name.startswith("on_"))


class Hooks(StepObserver):
    """The hooks of a trainer. As an observer of its step they are called before the ledger takes the state's checksum.

    Attributes:
        state: the objects that are part of the state, by name.
    """

    def __init__(self, trainer: Any, hooks: Iterable[Any], state: Mapping[str, Any] | None) -> None:
        self._trainer = trainer
        self._methods: dict[str, list[Callable[..., None]]] = {event: [] for event in EVENTS}
        self.state = _checked_state(state)
        if not isinstance(hooks, Iterable):
            raise UsageError(f"got {describe(hooks)} as hooks; needed: a list of them, hooks=[…]")
        for hook in hooks:
            self._add(hook)

    def _add(self, hook: Any) -> None:
        """Takes in the methods of a hook, and the hook itself if it has state."""
        if isinstance(hook, type):
            raise UsageError(f"got the class {hook.__name__} as a hook; needed: an object of it, {hook.__name__}()")
        for name in dir(hook):
            if name.startswith("on_") and name not in EVENTS and callable(getattr_static(hook, name)):
                nearest = get_close_matches(name, EVENTS, 1, 0.0)[0]
                raise UsageError(
                    f"the hook {type(hook).__name__} has a method {name}, which no trainer calls; "
                    f"did you mean {nearest}? A hook's methods are {', '.join(EVENTS)}"
                )
        own = [event for event in EVENTS if callable(getattr(hook, event, None))]
        is_stateful = hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict")
        if not own and not is_stateful:
            raise UsageError(f"got {describe(hook)} as a hook; it has none of the methods {', '.join(EVENTS)}")
        for event in own:
            method = getattr(hook, event)
            if getattr(method, "__func__", None) is not getattr(Hook, event):
                self._methods[event].append(method)
        if not is_stateful or any(value is hook for value in self.state.values()):
            return
        name = getattr(hook, "name", None) or type(hook).__name__.lower()
        if name in self.state:
            raise UsageError(f"got two parts of the state with the name {name!r}; give one of the hooks another `name`")
        self.state |= _checked_state({name: hook})

    @property
    def observers(self) -> tuple[StepObserver, ...]:
        """This object if a hook wants the steps; their cost is else that of a step without hooks."""
        return (self,) if self._methods["on_step_end"] else ()

    def call(self, event: str, *args: Any) -> None:
        """Calls a method of all hooks, in their order."""
        for method in self._methods[event]:
            method(self._trainer, *args)

    def on_update(self, step: Any, result: StepResult) -> None:
        """A step has ended."""
        self.call("on_step_end", result)

    def contract(self) -> dict[str, Any]:
        """The part of the contract that says what else is state; empty without any."""
        if not self.state:
            return {}
        own = {name: getattr(value, "contract", None) for name, value in self.state.items()}
        kinds = {name: {"class": type(value).__name__} for name, value in self.state.items()}
        return {"state": {n: {**kinds[n], **(more if isinstance(more, Mapping) else {})} for n, more in own.items()}}


def _checked_state(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Objects with state by name; raises a `UsageError` for others."""
    if not isinstance(state, Mapping | None):
        raise UsageError(f"got {describe(state)} as state; needed: objects by name, state={{'ema': ema}}")
    for name, value in (state or {}).items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"got {name!r} as a name in state; needed: a string that is not empty")
        for method in ("state_dict", "load_state_dict"):
            if isinstance(value, type) or not callable(getattr(value, method, None)):
                raise UsageError(
                    f"got {describe(value)} as state {name!r}; it needs the methods state_dict and load_state_dict, by "
                    "which it is saved and restored"
                )
    return dict(state or {})


class EMA(Hook):
    """An exponential moving average of a model's parameters, as a hook of a trainer. Tier `bitwise`.

    The first update copies the parameters, each later one is `average = decay * average + (1 - decay) * parameter` by
    torch's own `get_ema_multi_avg_fn`: the bits are those of `torch.optim.swa_utils.AveragedModel` after every step.
    Buffers are not averaged. The average is part of checkpoints and of `Trainer.digest`. With `strategy="sharded"`,
    `"pipeline"` and tensor parallelism, where no rank has all parameters, `fit` refuses it.

    In a loop of your own call `ema.update(model)` after each step, on every rank.

    Args:
        decay: from 0 to 1; part of the contract.
        name: in the state; another one for a second average.

    Attributes:
        weights: the averages by the parameters' names, on the model's device; empty before the first update.
        num_updates: updates so far.
    """

    def __init__(self, decay: float = 0.999, name: str = "ema") -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise UsageError(f"got decay={decay!r}; it must be from 0 to 1, such as 0.999")
        self.decay, self.name = decay, name
        self.weights: dict[str, Tensor] = {}
        self.num_updates = 0

    @property
    def contract(self) -> dict[str, Any]:
        """What the bits of the average depend on."""
        return {"decay": self.decay}

    def on_fit_start(self, trainer: Any) -> None:
        """Refuses sharded parameters, and a restored average of another model."""
        state = trainer.step.sharded_state
        if state is not None and not state.has_whole_parameters:
            raise UsageError(
                "samestep.EMA averages whole parameters, of which each rank has only a part here: use "
                "strategy='replicate' (with shard_optimizer=True to save memory), or leave it out"
            )
        if self.num_updates > 0:
            self._check(dict(trainer.model.named_parameters()))

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        """Updates the average."""
        self.update(trainer.model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Takes the model's parameters, as they are now, into the average."""
        from torch.optim.swa_utils import get_ema_multi_avg_fn  # not loaded by programs without an average

        now = dict(model.named_parameters())
        if self.num_updates == 0:
            self.weights = {name: parameter.detach().clone() for name, parameter in now.items()}
        self._check(now)
        if self.num_updates > 0:
            average = get_ema_multi_avg_fn(self.decay)
            kinds = {(tensor.dtype, tensor.device) for tensor in now.values()}
            for kind in sorted(kinds, key=str):
                names = [name for name, tensor in now.items() if (tensor.dtype, tensor.device) == kind]
                self.weights |= {
                    name: self.weights[name].to(kind[1]) for name in names
                }  # restored ones lie on the host
                average([self.weights[name] for name in names], [now[name].detach() for name in names], None)
        self.num_updates += 1

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """Writes the average to the model's parameters within the block, and their own values back after it.

            with ema.applied(trainer.model):
                scores = trainer.evaluate(test_set, metrics)

        Raises:
            UsageError: there is no average yet, or it is that of another model.
        """
        if self.num_updates == 0:
            raise UsageError("the average is empty: it begins with the first step")
        parameters = dict(model.named_parameters())
        self._check(parameters)
        own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        _write(parameters, self.weights)
        try:
            yield model
        finally:
            _write(parameters, own)

    def state_dict(self) -> dict[str, Any]:
        """The averages, whose memory the result shares, and the number of updates."""
        return {"num_updates": self.num_updates, "weights": dict(self.weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
        self.weights = {str(name): tensor.detach().clone() for name, tensor in state["weights"].items()}
        self.num_updates = int(state["num_updates"])

    def _check(self, parameters: Mapping[str, Tensor]) -> None:
        """Raises a `UsageError` unless the averages are of these parameters."""
        forms = [{name: tensor.shape for name, tensor in some.items()} for some in (parameters, self.weights)]
        if forms[0] != forms[1]:
            raise UsageError(
                f"the average has {len(forms[1])} parameters of other names or shapes than the model's "
                f"{len(forms[0])}; needed: the model that it was begun with"
            )


@torch.no_grad()
def _write(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
