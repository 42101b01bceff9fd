"""The parts: of a state that is spread over the ranks, each has some; what is written down of it is the whole."""

from dataclasses import dataclass

from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.engine.sharded_state import LocalShard, ShardedState
from samestep.engine.step import TrainStep


@dataclass(frozen=True)
class Parts:
    """What this rank has of a state.

    Attributes:
        state: the parts that the optimizers hold.
        over: among the ranks over which it is spread; all of them ask for the same wholes, one after another.
        names: of the parts, by their ids.
    """

    state: ShardedState
    over: Communicator
    names: dict[int, str]

    def num_elements(self, part: Tensor) -> int:
        """Of the whole parameter."""
        spread = self.state.spreads.get(self.names.get(id(part), ""))
        return part.numel() if spread is None else spread.shape.numel()

    def whole(self, part: Tensor, value: Tensor) -> Tensor:
        """The whole of what is as large as this rank's part of a parameter, on every rank; anything else as it is."""
        spread = self.state.spreads.get(self.names.get(id(part), ""))
        if spread is None or value.shape != part.shape or value.ndim == 0:
            return value
        return LocalShard(value.detach().contiguous(), spread).gather(self.over)


def parts_of(step: TrainStep) -> Parts | None:
    """What this rank has of the state of a step; None if its optimizers hold the parameters of the model."""
    state = step.spread
    if state is None:
        return None
    return Parts(state, step.spread_over, {id(part): name for name, part in state.parts.items()})
