"""The parameters of a step: which they are, where they lie, and that all ranks begin with the same."""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from samestep.comm.buckets import aligned_zeros, dense_strides
from samestep.comm.communicator import Communicator
from samestep.data.batch import memory_border, tensor_checksum
from samestep.errors import DeterminismError, UsageError

UNINITIALIZED = (UninitializedParameter, UninitializedBuffer)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a parameter is a DTensor; importing that class would load half of torch.distributed."""
    return hasattr(tensor, "device_mesh")


def named_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """The model's parameters that the optimizers update, by name, each once, in the model's order."""
    held: set[int] = set()
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise UsageError("SparseAdam takes sparse gradients only, and gradients are summed as dense ones; use Adam")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS calls the loss several times a step, which a fixed step cannot; use another optimizer"
            )
        held.update(id(p) for group in optimizer.param_groups for p in group["params"])
    named = {name: p for name, p in model.named_parameters() if id(p) in held}
    lazy = [name for name, p in named.items() if isinstance(p, UNINITIALIZED)]
    if lazy:
        raise UsageError(f"parameter {lazy[0]} has no shape yet; run the model once on a batch before train_step")
    strangers = held - {id(p) for p in named.values()}
    if strangers or not named:
        advice = "pass the model that holds them all, for example torch.nn.ModuleList([generator, discriminator])"
        if any(is_dtensor(parameter) for parameter in model.parameters()):
            advice = "make the optimizer after parallelize_module, which replaces parameters"
        raise UsageError(
            f"the optimizer holds {len(held)} parameters, {len(strangers)} of which are not in the model; {advice}"
        )
    return named


class Homes:
    """Where a model has the parameters that are trained: one that it has no more would be updated, and never used.

    Args:
        model: whose modules have them.
        trained: some of its parameters, by name.
    """

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._trained = dict(trained)
        self._note()

    def _note(self) -> None:
        self._places = [
            (members, key, member)
            for module in self._model.modules()
            for members in (module._parameters, module._modules)
            for key, member in members.items()
        ]

    def check(self) -> None:
        """Looks whether all of them are where they were."""
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
        self._note()


def settle_model(model: nn.Module, device: torch.device) -> None:
    """Moves a model to the device, in place, and puts stray parameters and buffers on memory borders."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.layout != torch.strided:
            raise UsageError(f"{name} is sparse; keep it dense, or as a plain attribute and not as a buffer")
    if any(tensor.device != device for tensor in _own_tensors(model)):
        model.to(device)
    tensors = _own_tensors(model)  # not before: a buffer that moves is another tensor
    shared: dict[int, int] = {}
    for tensor in tensors:
        if not isinstance(tensor, UNINITIALIZED):
            key = tensor.untyped_storage().data_ptr()
            shared[key] = shared.get(key, 0) + 1
    border = memory_border(device)
    for tensor in tensors:
        if isinstance(tensor, UNINITIALIZED) or tensor.data_ptr() % border == 0:
            continue
        if shared[tensor.untyped_storage().data_ptr()] == 1:
            flat = aligned_zeros(tensor.numel(), tensor.dtype, device)
            home = flat.as_strided(tensor.shape, dense_strides(tensor), flat.storage_offset())
            tensor.data = home.copy_(tensor.data)


def _own_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers that this rank has whole."""
    return [tensor for tensor in chain(model.parameters(), model.buffers()) if not is_dtensor(tensor)]


def check_same_model(model: nn.Module, communicator: Communicator) -> None:
    """Checks that every rank holds the same parameters and buffers."""
    everything = chain(model.named_parameters(), model.named_buffers())
    named = {name: tensor for name, tensor in everything if not isinstance(tensor, UNINITIALIZED)}
    check_same_tensors(named, communicator)


def check_same_tensors(named: Mapping[str, Tensor], communicator: Communicator) -> None:
    """Raises a `DeterminismError` that names the first tensor that differs between the ranks."""
    if communicator.world_size == 1:
        return
    sums = [int(tensor_checksum(tensor)) for tensor in named.values()]
    count = communicator.gather_words([len(sums)])
    if len({row[0] for row in count}) > 1:
        raise DeterminismError(f"the ranks built different models: {[row[0] for row in count]} parameters and buffers")
    rows = communicator.gather_words(sums)
    for name, column in zip(named, zip(*rows, strict=True), strict=True):
        if len(set(column)) > 1:
            raise DeterminismError(
                f"{name} differs between the ranks at the start; build the model after samestep.Run(seed=…), which "
                "seeds every generator alike, or load the same weights on every rank"
            )
