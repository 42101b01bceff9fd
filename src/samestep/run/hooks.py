"""Hooks: objects that a trainer calls at fixed points, the further state that it keeps, and the moving average."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from inspect import getattr_static, getclosurevars
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from samestep.checks import check_number, check_type
from samestep.data.checksums import version_of
from samestep.data.nested import leaves
from samestep.engine.observer import StepObserver
from samestep.engine.result import StepResult
from samestep.engine.sharded_state import divided_parameters
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


MOST_ENTRIES = 1024  # of a list or mapping that is looked through
LIBRARIES = ("builtins", "samestep", "torch")  # whose objects are not looked through
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
        check_type("hooks", hooks, isinstance(hooks, Iterable), "a list of them, hooks=[…]")
        self._stateless: list[Any] = []
        for hook in hooks:
            self._add(hook)

    def watching(self, loss_fn: Any, is_saved: bool) -> list[StepObserver]:
        """The observers of the trainer's step: this object if a hook wants the steps, and one for what is not saved."""
        self._unsaved = [Unsaved(loss_fn, self._stateless, self.state)] if is_saved else []
        return [*([self] if self._methods["on_step_end"] else []), *self._unsaved]

    def _add(self, hook: Any) -> None:
        """Takes in the methods of a hook, and the hook itself if it has state."""
        for name in dir(hook):
            # Statically: a property of the hook is not to be called here.
            if name.startswith("on_") and name not in EVENTS and callable(getattr_static(hook, name)):
                nearest = get_close_matches(name, EVENTS, 1, 0.0)[0]
                raise UsageError(
                    f"the hook {type(hook).__name__} has a method {name}, which no trainer calls; "
                    f"did you mean {nearest}? A hook's methods are {', '.join(EVENTS)}"
                )
        own = [event for event in EVENTS if callable(getattr(hook, event, None))]
        is_stateful = hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict")
        fits = not isinstance(hook, type) and (own or is_stateful)
        check_type("a hook", hook, fits, f"an object with some of the methods {', '.join(EVENTS)}")
        for event in own:
            method = getattr(hook, event)
            if getattr(method, "__func__", None) is not getattr(Hook, event):
                self._methods[event].append(method)
        if not is_stateful:
            self._stateless.append(hook)
        if not is_stateful or any(value is hook for value in self.state.values()):
            return
        name = getattr(hook, "name", None) or type(hook).__name__.lower()
        if name in self.state:
            raise UsageError(f"got two parts of the state with the name {name!r}; give one of the hooks another `name`")
        self.state |= _checked_state({name: hook})

    def call(self, event: str, *args: Any) -> None:
        """Calls a method of all hooks, in their order."""
        for unsaved in self._unsaved if event == "on_checkpoint" else ():
            unsaved.report(self._trainer.step)
        for method in self._methods[event]:
            method(self._trainer, *args)

    def on_update(self, step: Any, result: StepResult) -> None:
        """A step has ended; a hook may take its time, like the script between two steps."""
        step.membership.heartbeat.call("script", lambda: self.call("on_step_end", result))

    def contract(self) -> dict[str, Any]:
        """The part of the contract that says what else is state; empty without any."""
        if not self.state:
            return {}
        own = {name: getattr(value, "contract", None) for name, value in self.state.items()}
        kinds = {name: {"class": type(value).__name__} for name, value in self.state.items()}
        return {"state": {n: {**kinds[n], **(more if isinstance(more, Mapping) else {})} for n, more in own.items()}}


class Unsaved(StepObserver):
    """Names what rides along unsaved: held by hooks or the loss function, and changing.

    Found are, by an attribute of a hook, or a variable that a method of it or the loss function uses: tensors, modules
    too, that the second step writes in place, and objects with `state_dict` and `load_state_dict`, such as schedulers,
    whose state is another one at a checkpoint; if they are neither the model's nor in the state.
    """

    def __init__(self, loss_fn: Any, hooks: Iterable[Any], state: Mapping[str, Any]) -> None:
        self._sources = {"the loss function": loss_fn, **{f"the hook {type(h).__name__}": h for h in hooks}}
        self._state = state
        self._before: dict[int, Any] | None = None  # the versions after the first step, by id
        self._kept: list[tuple[str, str, Any, Any]] = []

    def on_update(self, step: Any, result: StepResult) -> None:
        """Looks after the first step, reports after the second, and leaves."""
        if self._before is None:
            self._kept = [found for source, value in self._sources.items() for found in _held_by(source, value)]
            self._before = {id(thing): _version(thing) for *_, thing in self._kept}
            return
        step.observers.remove(self)
        if any(isinstance(thing, Tensor) for *_, thing in self._kept):
            self.report(step)
            # Their memory is freed.
            self._kept = [found for found in self._kept if not isinstance(found[3], Tensor)]

    def report(self, step: Any) -> None:
        """Names what has changed since the first step."""
        saved = {tensor.data_ptr() for tensor in chain(step.model.parameters(), step.model.buffers())}
        states = [value.state_dict() for value in self._state.values()]
        saved |= {leaf.data_ptr() for state in states for leaf in leaves(state) if isinstance(leaf, Tensor)}
        saved |= {id(each) for each in (step.scheduler, *step.optimizers, *self._state.values())}
        for source, name, owner, thing in self._kept:
            is_saved = (thing.data_ptr() if isinstance(thing, Tensor) else id(thing)) in saved
            if not is_saved and _version(thing) != (self._before or {})[id(thing)]:
                remedy = f"give it by state={{{name!r}: {name}}}"
                if not hasattr(owner, "load_state_dict"):
                    remedy = "keep it in an object with state_dict and load_state_dict, and give that by state={…}"
                step.membership.notice(
                    f"{source} has {name} ({type(owner).__name__}), which changes in training and is in no checkpoint: "
                    f"a resumed run would begin it anew; {remedy}"
                )


def _version(thing: Any) -> Any:
    """What changes if a tensor is written, or the state of an object is another one."""
    with suppress(Exception):  # of the script's own code, perhaps before it is ready
        return version_of(thing) if isinstance(thing, Tensor) else repr(thing.state_dict())
    return None


def _held_by(source: str, thing: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """The source, the name, its value, and each tensor or stateful object in it, of what a hook or a loss holds."""
    variables: dict[str, Any] = {}
    while isinstance(thing, partial):
        variables |= {**{f"argument {number}": value for number, value in enumerate(thing.args)}, **thing.keywords}
        thing = thing.func
    functions = [thing, vars(type(thing)).get("__call__"), *(getattr(thing, event, None) for event in EVENTS)]
    for function in (getattr(one, "__func__", one) for one in functions):
        if isinstance(function, FunctionType):
            # A variable of an enclosing function that has no value yet.
            with suppress(ValueError):
                found = getclosurevars(function)
                variables |= {**found.globals, **found.nonlocals}
    owner = getattr(thing, "__self__", thing)
    for name, value in {**variables, **getattr(owner, "__dict__", {})}.items():
        for held in _held_in(value, depth=3):
            yield source, name, value, held


def _held_in(value: Any, depth: int) -> Iterator[Any]:
    """The tensors and stateful objects in a value: in modules, lists, mappings, attributes of the script's objects."""
    if isinstance(value, Tensor | nn.Module):
        yield from (value,) if isinstance(value, Tensor) else chain(value.parameters(), value.buffers())
        return
    if hasattr(value, "load_state_dict") and not isinstance(value, type) and "samestep." not in type(value).__module__:
        yield value
    if depth > 0 and isinstance(value, list | tuple | dict) and len(value) <= MOST_ENTRIES:
        for entry in list(value.values() if isinstance(value, dict) else value):
            yield from _held_in(entry, depth - 1)
    elif depth > 0 and type(value).__module__.partition(".")[0] not in LIBRARIES:
        for entry in list(getattr(value, "__dict__", {}).values()):
            yield from _held_in(entry, depth - 1)


def _checked_state(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Objects with state by name; raises a `UsageError` for others."""
    check_type("state", state, isinstance(state, Mapping | None), "objects by name, state={'ema': ema}")
    for name, value in (state or {}).items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"got {name!r} as a name in state; needed: a string that is not empty")
        methods = ("state_dict", "load_state_dict")
        fits = not isinstance(value, type) and all(callable(getattr(value, method, None)) for method in methods)
        check_type(f"state {name!r}", value, fits, "an object that state_dict saves and load_state_dict restores")
    return dict(state or {})


_NO_PARTS = (
    "samestep.EMA averages whole parameters, and each rank has only a part of each here: use strategy='replicate' or "
    "'zero1', or leave it out"
)


class EMA(Hook):
    """An exponential moving average of a model's parameters, as a hook of a trainer. Tier `bitwise`.

    The first update copies the parameters, each later one is `average = decay * average + (1 - decay) * parameter` by
    torch's own `get_ema_multi_avg_fn`: the same bits as `torch.optim.swa_utils.AveragedModel` after every step.
    Buffers are not averaged. The average is part of checkpoints and of `Trainer.digest`. With `strategy="sharded"`,
    where no rank has all parameters, `fit` refuses it.

    In a loop of your own call `ema.update(model)` after each step, on every rank.

    Args:
        decay: from 0 to 1; part of the contract.
        name: in the state; another one for a second average.

    Attributes:
        weights: the averages by the parameters' names, on the model's device; empty before the first update.
        num_updates: updates so far.
    """

    def __init__(self, decay: float = 0.999, name: str = "ema") -> None:
        check_number("decay", decay, 0, 1, whole=False, option="")
        self.decay, self.name = float(decay), name  # it goes into the contract, as JSON
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
            raise UsageError(_NO_PARTS)
        if self.num_updates > 0:
            self._check(dict(trainer.model.named_parameters()))

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        """Updates the average."""
        self.update(trainer.model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Takes the model's parameters, as they are now, into the average."""
        now = dict(model.named_parameters())
        if self.num_updates == 0:
            if divided_parameters(model):
                raise UsageError(_NO_PARTS)
            self.weights = {name: parameter.detach().clone() for name, parameter in now.items()}
        self._check(now)
        if self.num_updates > 0:
            average = get_ema_multi_avg_fn(self.decay)
            kinds = {(tensor.dtype, tensor.device) for tensor in now.values()}
            for kind in sorted(kinds, key=str):
                names = [name for name, tensor in now.items() if (tensor.dtype, tensor.device) == kind]
                # Restored ones lie on the host.
                self.weights |= {name: self.weights[name].to(kind[1]) for name in names}
                average([self.weights[name] for name in names], [now[name].detach() for name in names], None)
        self.num_updates += 1

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """Writes the average to the model's parameters within the block, and their own values back after it.

            with ema.applied(trainer.model):
                scores = trainer.evaluate(test_set, metrics)

        Raises:
            UsageError: there is no average yet, or it is another model's.
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
