"""The update of a small model: its optimizer's arithmetic, once for all parameters instead of once for each.

torch's SGD and Adam treat every element alone, so one call on a flat tensor gives each parameter the bits that a call
of its own gives it, and in a model of a few layers the calls cost more than the arithmetic. Parameters and state come
to lie in flat tensors; the optimizer keeps its `state`, and is used, saved and loaded as ever.

Nothing is taken on trust. An update is made both ways first, and the flat one is used from then on only if every bit
agrees. Wherever anything stands in the way (hooks, groups, a parameter without gradient, state that was replaced) the
optimizer's own `step` is called.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from samestep.comm.buckets import Bucket, dense_strides
from samestep.engine.gradients import num_holders

FLAT_BYTES = 8 * 2**20
MANY_ADOPTIONS = 16  # whoever replaces the state this often does so in every step
DTYPES = (torch.float32, torch.float64)  # with 16 bits SGD rounds the tail of a vector its own way
COUNT = "step"

_State = dict[str, Tensor]


class FlatUpdate:
    """Takes the place of one optimizer's `step()`, where it can.

    Args:
        optimizer: of the train step.
        parameters: the trainable ones.
        buckets: how their gradients lie in flat tensors.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], buckets: Sequence[Bucket]) -> None:
        self._optimizer = optimizer
        self._bucket = buckets[0]
        self._parameters = [parameters[index] for index in self._bucket.members]  # as they lie in it
        self._is_possible = (
            len(buckets) == len(optimizer.param_groups) == 1
            and len(parameters) == len(optimizer.param_groups[0]["params"]) > 1
            and type(optimizer) in ARITHMETIC
            and self._bucket.device.type == "cpu"
            and self._bucket.dtype in DTYPES
            and self._bucket.numel * self._bucket.dtype.itemsize <= FLAT_BYTES
        )
        self._num_adoptions = 0
        self._flat: Tensor | None = None
        self._state: _State = {}
        self._counts: list[Tensor] = []
        self._entries: list[tuple[dict[str, Tensor], str, Tensor]] = []
        self._addresses: list[int] = []
        self._table: Any = None
        self._steps: tuple[Any, Any] = (None, None)
        self._hooks: list[Any] = []

    def step(self, gradients: Sequence[Tensor], used: Sequence[bool]) -> None:
        """Updates the parameters.

        Args:
            gradients: the flat ones, of which the parameters' `.grad` are views.
            used: for each parameter whether it has a gradient.
        """
        if not self._is_possible:
            self._optimizer.step()
        elif not all(used):
            if self._counts:
                self._flat = None  # who is left out counts fewer steps than the others from now on
            self._optimizer.step()
        elif self._flat is not None and self._is_ours():
            self._update(self._flat, gradients[0], self._state)
            if len(self._counts) > 1:
                torch._foreach_add_(self._counts[1:], 1)
            torch.autograd.graph.increment_version(self._parameters)
        elif _is_torchs_own(self._optimizer):
            self._adopt(gradients[0])
        else:
            self._optimizer.step()

    def _update(self, flat: Tensor, gradient: Tensor, state: _State) -> None:
        ARITHMETIC[type(self._optimizer)](self._optimizer.param_groups[0], flat, gradient, state)

    def _is_ours(self) -> bool:
        """Whether parameters, state and `step` are still what they were, and nobody waits for the call of `step`."""
        held = self._optimizer
        return (
            held.state is self._table
            and not any(self._hooks)
            and _steps(held) == self._steps
            and _is_default(held.param_groups[0])
            and all(entry.get(key) is view for entry, key, view in self._entries)
            and [parameter.data_ptr() for parameter in self._parameters] == self._addresses
        )

    def _adopt(self, gradient: Tensor) -> None:
        """Updates both ways, and goes over to flat tensors if the bits agree."""
        self._flat = None
        self._is_possible = all(map(_can_move, self._parameters))
        keys = self._keys() if self._is_possible else None
        if keys is None:
            self._optimizer.step()
            return
        self._num_adoptions += 1
        flat = self._gathered(self._parameters)
        state = {key: self._gathered([self._optimizer.state[p][key] for p in self._parameters]) for key in keys}
        counts = [entry[COUNT] for p in self._parameters if COUNT in (entry := self._optimizer.state.get(p, {}))]
        if counts:
            state[COUNT] = counts[0].clone()
        self._update(flat, gradient, state)
        self._optimizer.step()
        agree = torch.equal(flat, self._gathered(self._parameters)) and all(
            torch.equal(state[key], self._gathered([self._optimizer.state[p][key] for p in self._parameters]))
            for key in keys
        )
        if not agree or self._num_adoptions > MANY_ADOPTIONS:
            self._is_possible = False
            return
        self._take(flat, state, counts)

    def _keys(self) -> list[str] | None:
        """Which state there is a parameter, beside the count of steps; None where it is not alike for all."""
        entries = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]
        keys = list(entries[0])
        if any(list(entry) != keys for entry in entries) or len({id(entry) for entry in entries}) < len(entries) > 1:
            return None
        if not keys and not _needs_no_state(self._optimizer):
            return None
        if COUNT in keys:
            keys.remove(COUNT)
            counts = [entry[COUNT] for entry in entries]
            if len({id(count) for count in counts}) < len(counts) or len({float(count) for count in counts}) > 1:
                return None
        for key in keys:
            for entry, parameter in zip(entries, self._parameters, strict=True):
                value = entry[key]
                alike = isinstance(value, Tensor) and value.dtype == parameter.dtype
                if not alike or value.shape != parameter.shape or value.stride() != parameter.stride():
                    return None
        return keys

    def _gathered(self, tensors: Sequence[Tensor]) -> Tensor:
        """A copy of some tensors, one a parameter, in one flat tensor."""
        flat = self._bucket.empty()
        torch._foreach_copy_(self._members(flat), [tensor.detach() for tensor in tensors])
        return flat

    def _members(self, flat: Tensor) -> list[Tensor]:
        """The members of a flat tensor, in its memory, each with a storage of its own that holds nothing else.

        Views of one storage would be saved with all of it, and safetensors refuses them.
        """
        memory, width = flat.numpy(), flat.element_size()
        return [
            torch.frombuffer(memory, dtype=flat.dtype, count=parameter.numel(), offset=width * offset).as_strided(
                parameter.shape, dense_strides(parameter)
            )
            for offset, parameter in zip(self._bucket.offsets, self._parameters, strict=True)
        ]

    def _take(self, flat: Tensor, state: _State, counts: list[Tensor]) -> None:
        """Brings parameters and state into the flat tensors, which hold the same values."""
        for parameter, view in zip(self._parameters, self._members(flat), strict=True):
            parameter.data = view
        self._entries = []
        for key in state:
            if key == COUNT:
                continue
            for parameter, view in zip(self._parameters, self._members(state[key]), strict=True):
                self._optimizer.state[parameter][key] = view
                self._entries.append((self._optimizer.state[parameter], key, view))
        if counts:
            state[COUNT] = counts[0]
            self._entries += [
                (self._optimizer.state[p], COUNT, n) for p, n in zip(self._parameters, counts, strict=True)
            ]
        self._flat, self._state, self._counts = flat, state, counts
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self._table, self._steps = self._optimizer.state, _steps(self._optimizer)
        self._hooks = _hooks(self._optimizer)


def _sgd(group: dict[str, Any], flat: Tensor, gradient: Tensor, state: _State) -> None:
    """torch's own arithmetic of SGD."""
    sgd(
        [flat],
        [gradient],
        [state.get("momentum_buffer")],
        has_sparse_grad=False,
        foreach=False,
        fused=False,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )


def _adam(group: dict[str, Any], flat: Tensor, gradient: Tensor, state: _State) -> None:
    """torch's own arithmetic of Adam and AdamW."""
    beta1, beta2 = group["betas"]
    adam(
        [flat],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [state["max_exp_avg_sq"]] if group["amsgrad"] else [],
        [state[COUNT]],
        foreach=False,
        capturable=False,
        differentiable=False,
        fused=False,
        has_complex=False,
        decoupled_weight_decay=group["decoupled_weight_decay"],
        amsgrad=group["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


ARITHMETIC: dict[type[Optimizer], Callable[[dict[str, Any], Tensor, Tensor, _State], None]] = {
    SGD: _sgd,
    Adam: _adam,
    AdamW: _adam,
}


def _needs_no_state(held: Optimizer) -> bool:
    return isinstance(held, SGD) and held.param_groups[0]["momentum"] == 0


def _can_move(parameter: nn.Parameter) -> bool:
    """Whether nobody would be left behind if the parameter's memory were another."""
    alone = nn.Parameter(torch.empty(1))
    return (
        type(parameter) is nn.Parameter
        and parameter.stride() == dense_strides(parameter)
        and not parameter.is_shared()
        and parameter.numel() > 0
        and -1 < num_holders(parameter) <= num_holders(alone)
    )


def _is_torchs_own(held: Optimizer) -> bool:
    """Whether `step()` would do nothing but torch's arithmetic: no hook, no patch, no other implementation."""
    return (
        _is_default(held.param_groups[0])
        and not any(_hooks(held))
        and all(step is None or _is_from_torch(step) for step in _steps(held))
    )


def _is_default(group: dict[str, Any]) -> bool:
    """Whether a parameter group is updated by the loop over its parameters, with plain numbers."""
    return not any(map(group.get, IMPLEMENTATIONS)) and isinstance(group["lr"], float | int)


def _steps(held: Optimizer) -> tuple[Any, Any]:
    """The functions that a call of `step` runs: the class's, and what was put in the object (by a scheduler)."""
    return type(held).step, held.__dict__.get("step")


def _is_from_torch(function: Any) -> bool:
    """Whether a function, and whatever it wraps, was written in torch.optim."""
    while function is not None:
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.optim."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _hooks(held: Optimizer) -> list[Any]:
    """The tables of those who want to be called before and after `step`; true where this torch has no such table."""
    own = [getattr(held, name, True) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")]
    return own + [getattr(optimizer, name, True) for name in GLOBAL_HOOKS]


GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")
