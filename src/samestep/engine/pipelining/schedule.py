"""The order in which each rank runs the forwards and backwards of its stage, and the messages that follow from it.

The schedules are GPipe (Huang et al., arXiv 1811.06965) and 1F1B (PipeDream-Flush in Narayanan et al., arXiv
2006.09503). The rank with number k along "pipe" has stage k.
"""

from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor

from samestep.engine.pipelining.p2p import Contents, PointToPoint, Sent

FORWARD, BACKWARD = "F", "B"
OTHER = {FORWARD: BACKWARD, BACKWARD: FORWARD}


class Action(NamedTuple):
    """The forward or the backward of a microbatch in one stage."""

    kind: str
    place: int  # of the microbatch among those that the pipeline runs in this step


@cache  # every step asks for those of this rank and of its neighbours
def actions_of(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """The actions of a stage in a step.

    The tree needs the backwards in the order of the microbatches. Both kinds are in this order, in every stage.
    """
    # GPipe holds the activations of all microbatches. By 1F1B the last stage holds one and each stage before it one
    # more, the fewest with which no stage waits longer: from then on each backward makes room for the next forward.
    ahead = num_microbatches if schedule == "gpipe" else min(num_stages - stage, num_microbatches)
    kinds = FORWARD * ahead + (BACKWARD + FORWARD) * (num_microbatches - ahead) + BACKWARD * ahead
    places = {FORWARD: count(), BACKWARD: count()}
    return tuple(Action(kind, next(places[kind])) for kind in kinds)


class StageMessages:
    """The messages of one step to and from the neighbouring stages, sent and received in the order of the schedule.

    An action of kind `FORWARD` needs the output of the stage before, one of kind `BACKWARD` the gradients from the
    stage behind. Each neighbour sends one kind alone, in the order of the microbatches, which is that in which they are
    needed here. So a message needs no name, and none has to be kept for later.

    A sent tensor is freed as soon as a message shows that it has arrived: the neighbour sent that message after an
    action that needed ours. Otherwise every activation would stay until the end of the step.
    """

    def __init__(self, p2p: PointToPoint, schedule: str, num_microbatches: int) -> None:
        self._p2p = p2p
        self._source = {FORWARD: p2p.rank - 1, BACKWARD: p2p.rank + 1}
        # By kind and microbatch, the actions of the other kind that the neighbour runs before it. At the ends of the
        # pipeline, where there is no neighbour, nothing is received.
        self._before = {kind: list[int]() for kind in OTHER}
        for kind, source in self._source.items():
            for position, action in enumerate(actions_of(schedule, max(source, 0), p2p.world_size, num_microbatches)):
                if action.kind == kind:
                    self._before[kind].append(position - action.place)
        self._sent: dict[str, deque[Sent]] = {FORWARD: deque(), BACKWARD: deque()}
        self._num_freed = {FORWARD: 0, BACKWARD: 0}

    def send(self, kind: str, tensors: Sequence[Tensor | None], note: Any) -> None:
        """Sends what the neighbour needs for its next action of a kind, without blocking."""
        self._sent[kind].append(self._p2p.send(self._source[OTHER[kind]], tensors, note))

    def receive(self, action: Action) -> Contents:
        """Waits for what an action of this rank needs."""
        contents = self._p2p.receive(self._source[action.kind])
        # Each of the neighbour's actions of the other kind had received a message of this rank.
        other = OTHER[action.kind]
        arrived = self._before[action.kind][action.place]
        for _ in range(arrived - self._num_freed[other]):
            self._p2p.wait(self._sent[other].popleft())
        self._num_freed[other] = arrived
        return contents
