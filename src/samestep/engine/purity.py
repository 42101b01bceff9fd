"""The purity check: a microbatch leaves the parameters and the modes of the modules as it found them."""

from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from samestep.errors import DeterminismError

COPIED_STEPS = 2
LOOKED_EVERY = 100


class PurityCheck:
    """Checks a model while microbatches run: the next microbatch would read what one writes, other ranks would not.

    Args:
        model: whose parameters and modules, those that no optimizer holds too.
        parts: this rank's parts of the parameters, by name, where it has no more.
    """

    def __init__(self, model: nn.Module, parts: Mapping[str, Tensor] | None = None) -> None:
        self._model = model
        named = dict(model.named_parameters()) if parts is None else parts
        self._names, self._parameters = list(named), list(named.values())
        self._modules = list(model.modules())
        self._modes: list[bool] = []
        self._versions: list[int] = []
        self._addresses: list[int] | None = None
        self._copies: list[Tensor] | None = None

    def begin(self, step: int) -> None:
        """Remembers how the model is."""
        self._copies, self._addresses = None, None
        # Versions tell most writes; those behind torch's back (`.data`) only copies and addresses do.
        if step < COPIED_STEPS or step % LOOKED_EVERY == 0:
            self._modules = list(self._model.modules())
            self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        if step < COPIED_STEPS:
            self._copies = [parameter.detach().clone() for parameter in self._parameters]
        self._modes = [module.training for module in self._modules]
        self._versions = [parameter._version for parameter in self._parameters]

    def end(self) -> None:
        """Drops the copies: the microbatches have run."""
        self._copies = None

    def not_finite(self) -> str | None:
        """The name of the first parameter that holds NaN or infinity, if one does."""
        named = zip(self._names, self._parameters, strict=True)
        return next((name for name, parameter in named if not bool(torch.isfinite(parameter.detach()).all())), None)

    def modes(self) -> list[bool]:
        """Which modules trained when the step began."""
        return self._modes

    def addresses(self) -> list[int]:
        """Where the parameters and buffers of the modules that there are now lie."""
        modules = self._model.modules()
        tensors = chain.from_iterable((*m._parameters.values(), *m._buffers.values()) for m in modules)
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    def restore_modes(self) -> None:
        """Puts back which modules train: a microbatch must not decide it for the next."""
        if [module.training for module in self._modules] != self._modes:
            for module, mode in zip(self._modules, self._modes, strict=True):
                module.training = mode

    def check(self) -> None:
        """Looks at the parameters after a microbatch."""
        if self._addresses is None and [parameter._version for parameter in self._parameters] == self._versions:
            return
        for index, name in enumerate(self._names):
            if self._is_written(index):
                raise DeterminismError(
                    f"parameter {name} was written to while a microbatch ran (Embedding with max_norm, a teacher that "
                    "is "
                    "averaged in the forward and weights that normalise themselves do so); write to parameters between "
                    "steps, under torch.no_grad()"
                )

    def _is_written(self, index: int) -> bool:
        parameter = self._parameters[index]
        if parameter._version != self._versions[index]:
            return True
        if self._addresses is not None and parameter.data_ptr() != self._addresses[index]:
            return True
        return self._copies is not None and not _same_values(parameter, self._copies[index])


def _same_values(tensor: Tensor, copy: Tensor) -> bool:
    """Whether two tensors of one shape hold the same values, NaN where the other holds NaN."""
    return torch.equal(tensor, copy) or bool(((tensor == copy) | (tensor.isnan() & copy.isnan())).all())
