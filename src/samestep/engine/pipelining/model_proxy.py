"""The model proxy: what a loss function is given as the model if a rank has some stages of it only.

Every rank of a pipeline calls the loss function, up to where it calls the model. There its stage runs, on what the loss
function gives to the model (in the first stage) or on what the stage before it has sent. The last stage returns its
output, and the loss function goes on; the others leave it there. So what the loss function does around the model
(autocast, noise on the input) happens as on one device.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from samestep.errors import LossError


class LeaveError(BaseException):
    """Leaves a loss function once a stage that is not the last has run; no `except Exception` may hold it up."""


class ModelProxy:
    """Takes the place of the model in one call of a loss function."""

    def __init__(self, model: nn.Module, run: Callable[[Any], Any], returns: bool) -> None:
        self._model = model
        self._run = run
        self._returns = returns
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the stage.

        Raises:
            LossError: the model is called twice, or with anything but one value.
        """
        self.num_calls += 1
        if self.num_calls > 1:
            raise LossError(
                "the loss function calls the model twice; with strategy='pipeline' a microbatch goes through the "
                "stages "
                "once: join the inputs along dim 0 and call it once, or use another strategy"
            )
        if len(args) != 1 or kwargs:
            raise LossError(
                f"the loss function calls the model with {len(args)} values and {len(kwargs)} by name; with "
                "strategy='pipeline' it takes one: put them in a tuple"
            )
        output = self._run(args[0])
        if not self._returns:
            raise LeaveError
        return output

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if isinstance(value, Tensor | nn.Module) or callable(value):
            raise LossError(
                f"the loss function uses model.{name}; with strategy='pipeline' no rank has the whole model: call "
                "model(x) alone, or use another strategy"
            )
        return value

    def check_called(self) -> None:
        """Raises a `LossError` if the loss function never called the model."""
        if not self.num_calls:
            raise LossError("the loss function does not call the model; with strategy='pipeline' it must, once")
