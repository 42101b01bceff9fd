"""The parameters of a step: which it trains, where they lie in memory, and that nothing else writes to them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from samestep.comm.buckets import aligned_zeros, dense_strides
from samestep.comm.communicator import Communicator
from samestep.data.batch import memory_border
from samestep.data.checksums import lacks_bytes, quick_sums, tensor_checksum, version_of, versions_of
from samestep.data.nested import leaves
from samestep.errors import DeterminismError, UsageError

UNINITIALIZED = (UninitializedParameter, UninitializedBuffer)
SUMMED_STEPS = 2
CHECKED_EVERY = 100


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a parameter is a DTensor; importing that class would load half of torch.distributed."""
    return hasattr(tensor, "device_mesh")


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, in the order in which its state counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """The model's parameters that the optimizers update, by name, each once, in the model's order."""
    held: set[int] = set()  # by identity: tensors compare by their elements
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise UsageError("SparseAdam takes sparse gradients only, and gradients are summed as dense ones; use Adam")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS calls the loss several times a step, which a fixed step cannot; use another optimizer, or a "
                "plain loop with optimizer.step(closure), whose model `samestep run` shares out as it is"
            )
        held.update(map(id, held_by(optimizer)))
    named = {name: p for name, p in model.named_parameters() if id(p) in held}
    lazy = [name for name, p in named.items() if isinstance(p, UNINITIALIZED)]
    if lazy:
        raise UsageError(f"parameter {lazy[0]} has no shape yet; run the model once on a batch before train_step")
    strangers = held - {id(p) for p in named.values()}
    if strangers or not named:
        raise UsageError(
            f"the optimizer holds {len(held)} parameters, and {len(strangers)} of them are not in the model; pass the "
            "model that holds them all, for example torch.nn.ModuleList([generator, discriminator])"
        )
    return named


class Homes:
    """Checks that a model still has its trained parameters: one that was replaced would be updated, but never used."""

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._trained = dict(trained)
        self._list_members()

    def _list_members(self) -> None:
        self._places = [
            (members, key, member)
            for module in self._model.modules()
            for members in (module._parameters, module._modules)
            for key, member in members.items()
        ]

    def check(self) -> None:
        """Raises a `UsageError` that names a parameter which was replaced."""
        # The identity of all members is quick to compare; only if one differs are the parameters searched.
        if all(members.get(key) is member for members, key, member in self._places):
            return
        present = {id(parameter) for parameter in self._model.parameters()}
        for name, parameter in self._trained.items():
            if id(parameter) not in present:
                raise UsageError(
                    f"parameter {name} was replaced in the model (a new layer, load_state_dict(assign=True)), but the "
                    "optimizer holds the one from before, which is not used any more: give the optimizer the new one, "
                    "write to the old one in place, or change the model before train_step"
                )
        self._list_members()


class PurityCheck:
    """Checks that microbatches leave the parameters (or local shards, `parts`) and the modules' modes alone."""

    # The next microbatch on this rank would read such a write, and the other ranks would not.

    def __init__(self, model: nn.Module, parts: Mapping[str, Tensor] | None = None) -> None:
        self._model = model
        named = dict(model.named_parameters()) if parts is None else parts  # those that no optimizer holds, too
        self._names, self._parameters = list(named), list(named.values())
        self._modules = list(model.modules())
        self._modes: list[bool] = []
        self._versions: list[int] = []
        self._addresses: list[int] | None = None
        self._sums: Tensor | None = None

    def begin(self, step: int) -> None:
        """Remembers the state of the model."""
        self._sums, self._addresses = None, None
        # Version counters show most writes; those through `.data` only values and addresses do, which cost more.
        if step < SUMMED_STEPS or step % CHECKED_EVERY == 0:
            self._modules = list(self._model.modules())
            self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        if step < SUMMED_STEPS:
            self._sums = self._sum()  # of a copy there may be no memory
        self._modes = [module.training for module in self._modules]
        self._versions = versions_of(self._parameters)

    def end(self) -> None:
        """Drops the sums after the last microbatch."""
        self._sums = None

    def not_finite(self) -> str | None:
        """The name of the first parameter that holds NaN or infinity, if any."""
        named = zip(self._names, self._parameters, strict=True)
        return next((name for name, parameter in named if not bool(torch.isfinite(parameter.detach()).all())), None)

    def restore_modes(self) -> None:
        """Restores the training mode of each module: a microbatch must not decide it for the next."""
        if [module.training for module in self._modules] != self._modes:
            for module, mode in zip(self._modules, self._modes, strict=True):
                module.training = mode

    def check(self) -> None:
        """Raises a `DeterminismError` if the microbatch has written to a parameter."""
        if self._addresses is None and versions_of(self._parameters) == self._versions:
            return
        written = [index for index in range(len(self._names)) if self._has_moved(index)]
        if not written and self._sums is not None and not torch.equal(now := self._sum(), self._sums):
            written = (now != self._sums).nonzero()[:, 0].tolist()
        if written:
            raise DeterminismError(
                f"parameter {self._names[written[0]]} was written to while a microbatch ran (Embedding with max_norm, "
                "a teacher that is averaged in the forward and weights that normalise themselves do so); write to "
                "parameters between steps, under torch.no_grad()"
            )

    def _has_moved(self, index: int) -> bool:
        parameter, addresses = self._parameters[index], self._addresses
        return version_of(parameter) != self._versions[index] or (
            addresses is not None and parameter.data_ptr() != addresses[index]
        )

    def _sum(self) -> Tensor:
        """A number for the values of each parameter."""
        return quick_sums([[parameter] for parameter in self._parameters], self._parameters[0].device)


def move_model(model: nn.Module, device: torch.device) -> None:
    """Moves a model to the device, in place, and its parameters and buffers to memory borders."""
    # Vectorised kernels may round differently by the alignment of their inputs, which must be alike on all ranks.
    if any(tensor.device != device for tensor in _own_tensors(model).values()):
        model.to(device)
    # Not listed before: a buffer that moves becomes another tensor.
    tensors = [tensor for tensor in _own_tensors(model).values() if not isinstance(tensor, UNINITIALIZED)]
    sharing = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
    for tensor in tensors:
        # Views of one storage stay where they are: the script may rely on their sharing it.
        if tensor.data_ptr() % memory_border(device) and sharing[tensor.untyped_storage().data_ptr()] == 1:
            flat = aligned_zeros(tensor.numel(), tensor.dtype, device)
            home = flat.as_strided(tensor.shape, dense_strides(tensor), flat.storage_offset())
            tensor.data = home.copy_(tensor.data)


def move_states(optimizers: Sequence[Optimizer]) -> None:
    """Moves state that an optimizer, such as Adagrad, made before the model moved to the devices of the parameters."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            counts_too = group.get("fused") or group.get("capturable")  # else kept in host memory, as torch does
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.device != parameter.device and (value.dim() or counts_too):
                        state[key] = value.to(parameter.device)


def keep_numbers(optimizer: Optimizer) -> None:
    """Lets numbers in the optimizer's state, 0-d tensors, keep their dtype when the script loads it."""
    # torch casts all but `step` to the parameter's dtype: NAdam's product of momenta, float32 in every training, would
    # have 16 or 64 bits in a resumed one.
    saved: list[dict[str, Any]] = []

    def before(_: Optimizer, state: dict[str, Any]) -> None:
        saved[:] = [state]

    def after(optimizer: Optimizer) -> None:
        restore_dtypes(optimizer, saved.pop(), of_numbers=True)

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


@torch.no_grad()
def restore_dtypes(optimizer: Optimizer, state: Mapping[str, Any], of_numbers: bool = False) -> None:
    """After `load_state_dict` of a state: its tensors, or the 0-d ones alone, as they were before torch cast them."""
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, parameter in zip(indices, held_by(optimizer), strict=True):
        saved, loaded = state["state"].get(index, {}), optimizer.state.get(parameter, {})
        pairs = (zip(leaves(value), leaves(loaded.get(name)), strict=False) for name, value in saved.items())
        for there, here in chain.from_iterable(pairs):
            if not (isinstance(there, Tensor) and isinstance(here, Tensor)) or (of_numbers and there.ndim):
                continue
            if there.dtype != here.dtype:
                here.data = there.to(here.device, copy=True)


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by name that are no DTensors; a `UsageError` names one whose bytes cannot be read."""
    own = {n: t for n, t in chain(model.named_parameters(), model.named_buffers()) if not is_dtensor(t)}
    for name, tensor in own.items():
        if not isinstance(tensor, UNINITIALIZED) and (kind := lacks_bytes(tensor)):
            raise UsageError(f"{name} ({kind}) has no bytes to compare and keep; make it dense, or a plain attribute")
    return own


def check_same_model(model: nn.Module, communicator: Communicator) -> None:
    """Raises a `DeterminismError` that names the first parameter or buffer that differs between the ranks."""
    named = {name: tensor for name, tensor in _own_tensors(model).items() if not isinstance(tensor, UNINITIALIZED)}
    if communicator.world_size == 1:
        return
    # Checksums, not values: a start compares gigabytes, and only the name of a difference is needed.
    sums = [int(tensor_checksum(tensor)) for tensor in named.values()]
    rows = communicator.gather_values(sums)
    if len(set(map(len, rows))) > 1:
        raise DeterminismError(f"the ranks built different models: {[*map(len, rows)]} parameters and buffers")
    for name, column in zip(named, zip(*rows, strict=True), strict=True):
        if len(set(column)) > 1:
            raise DeterminismError(
                f"{name} differs between the ranks at the start; build the model after samestep.Run(seed=…), which "
                "seeds every generator alike, or load the same weights on every rank"
            )
