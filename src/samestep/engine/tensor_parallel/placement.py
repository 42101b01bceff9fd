"""The placement of a divided model: what follows from it for each part of the step."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.membership import Membership
from samestep.engine.placement import Placement
from samestep.engine.strategies import TensorParallel
from samestep.engine.tensor_parallel.gradients import DividedGradientSum
from samestep.engine.tensor_parallel.model import DividedModel


class DividedPlacement(Placement):
    """Every rank along "tensor" has a part of each matrix.

    Args:
        membership: the ranks.
        model: divided.
        optimizers: over its parameters.
        options: how.
    """

    def __init__(
        self, membership: Membership, model: nn.Module, optimizers: Sequence[Optimizer], options: TensorParallel
    ) -> None:
        super().__init__(membership, model)
        self.divided = DividedModel(membership, model, optimizers, options)
        self.state = self.divided.state
        self._gradients: DividedGradientSum | None = None

    @property
    def contract(self) -> dict[str, Any]:
        """How many ranks share each matrix, and how: where sums are cut."""
        return {"tensor": self.divided.contract}

    def explain(self, error: RuntimeError) -> Exception | None:
        """A rank was lost, or what is divided met what is not."""
        return self.divided.explain(error)

    def note_loss(self, loss: Tensor) -> None:
        """The ranks that share the model compare it."""
        assert self._gradients is not None, "a step has been laid out"
        self._gradients.note_loss(loss)

    def note_frozen(self) -> None:
        """A parameter of the model that was frozen or unfrozen since: this rank's part is so, too."""
        self.divided.note_frozen()

    def make_gradients(
        self, trainable: dict[str, nn.Parameter], optimizers: Sequence[Optimizer], bucket_bytes: int, overlap: bool
    ) -> DividedGradientSum:
        """What sums the microbatches' gradients, of this rank's parts."""
        self._gradients = DividedGradientSum(self.divided, trainable, self.membership, bucket_bytes)
        return self._gradients
