"""The schedule: in which order each rank runs the forwards and backwards of its stages, and what it sends to whom.

The orders are PyTorch's (`torch.distributed.pipelining`): GPipe (Huang et al., arXiv 1811.06965), 1F1B (PipeDream-Flush
in Narayanan et al., arXiv 2006.09503), interleaved 1F1B (arXiv 2104.04473), and the zero-bubble schedules ZB1P and ZB-V
(Qi et al., arXiv 2401.10241). Within one stage all of them run the microbatches in order, forwards and backwards alike,
as the tree wants it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"


class Action(NamedTuple):
    """What a rank does next.

    Attributes:
        kind: a forward, a whole backward, or the part of one that gives the gradient of the input, or of the weights.
        stage: of all stages.
        place: of the microbatch among those that the pipeline runs in this step.
    """

    kind: str
    stage: int
    place: int


class Message(NamedTuple):
    """What one rank sends to another.

    Attributes:
        kind: `FORWARD`, a value, or `BACKWARD`, its gradient.
        stage: that it is for.
        place: of the microbatch.
    """

    kind: str
    stage: int
    place: int


@dataclass(frozen=True)
class Schedule:
    """The order of a step.

    Attributes:
        actions: of every rank along the axis.
        owners: of each stage, the rank that has it.
    """

    actions: tuple[tuple[Action, ...], ...]
    owners: tuple[int, ...]

    def messages(self, source: int, target: int) -> dict[Message, int]:
        """What one rank sends to another, in the order in which it does, with the number of the action that does."""
        sent = {}
        for number, action in enumerate(self.actions[source]):
            message = _sent_by(action, len(self.owners))
            if message is not None and self.owners[message.stage] == target:
                sent[message] = number
        return sent

    def awaited(self, target: int) -> dict[Message, int]:
        """What a rank needs from whichever rank, with the number of the action that needs it."""
        needed = ((_needed_by(action, len(self.owners)), k) for k, action in enumerate(self.actions[target]))
        return {message: number for message, number in needed if message is not None}


def owners_of_stages(name: str, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank that has each stage: in rounds over the ranks; with "zbv" there and back again."""
    rounds = range(stages_per_rank)
    if name == "zbv":
        return tuple(rank if k % 2 == 0 else num_ranks - 1 - rank for k in rounds for rank in range(num_ranks))
    return tuple(rank for _ in rounds for rank in range(num_ranks))


@cache
def make_schedule(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """The schedule of a step.

    Some orders exist for certain numbers of microbatches only. Then it is that of the next larger number, of which the
    microbatches that there are not are left out: what depends on what stays in order.

    Args:
        name: of the schedule.
        num_ranks: along the axis; 2 or more.
        stages_per_rank: as the schedule wants it.
        num_microbatches: that this pipeline runs in the step.
    """
    owners = owners_of_stages(name, num_ranks, stages_per_rank)
    if num_microbatches == 0:
        return Schedule(((),) * num_ranks, owners)
    count = max(num_microbatches, len(owners))
    while (order := _order(name, num_ranks, stages_per_rank, count)) is None:
        count += 1
    actions = tuple(tuple(_actions(order[rank], num_microbatches)) for rank in range(num_ranks))
    for rank, mine in enumerate(actions):
        _check(mine, [stage for stage, owner in enumerate(owners) if owner == rank], num_microbatches)
    return Schedule(actions, owners)


def _needed_by(action: Action, num_stages: int) -> Message | None:
    """What an action waits for, from whichever rank."""
    if action.kind == FORWARD:
        return Message(FORWARD, action.stage, action.place) if action.stage else None
    if action.kind == WEIGHT or action.stage + 1 == num_stages:
        return None
    return Message(BACKWARD, action.stage, action.place)


def _sent_by(action: Action, num_stages: int) -> Message | None:
    """What an action has to send on, to whichever rank."""
    if action.kind == FORWARD:
        return Message(FORWARD, action.stage + 1, action.place) if action.stage + 1 < num_stages else None
    if action.kind == WEIGHT:
        return None
    return Message(BACKWARD, action.stage - 1, action.place) if action.stage else None


def _order(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Any:
    """PyTorch's order by rank; None where it has none for so many microbatches."""
    from torch.distributed.pipelining import schedules  # not before: it loads the tracer of torch.export

    stages = [
        SimpleNamespace(
            num_stages=num_ranks * stages_per_rank,
            group_size=num_ranks,
            group_rank=0,
            stage_index=k,
            is_first=False,
            is_last=False,
            has_backward=True,
            submod=None,
        )
        for k in range(stages_per_rank)
    ]
    make: Any = getattr(schedules, CLASSES[name])
    try:
        made = make(stages[0] if name in ("gpipe", "1f1b") else stages, num_microbatches)
    except ValueError:
        return None
    return made.pipeline_order if made.pipeline_order is not None else made._get_pipeline_order()


def _actions(order: Iterable[Any], num_microbatches: int) -> Iterable[Action]:
    """One rank's actions, of the microbatches that there are.

    PyTorch's order of 1F1B counts the forwards of the last stage from 1 (2.13); here all are counted from 0.
    """
    entries = [(e.computation_type.value, e.stage_index, e.microbatch_index) for e in order if e is not None]
    entries = [entry for entry in entries if entry[0] in (FORWARD, BACKWARD, INPUT, WEIGHT)]
    first: dict[tuple[str, int], int] = {}
    for kind, stage, place in entries:
        first[kind, stage] = min(place, first.get((kind, stage), place))
    if first.get((FORWARD, entries[0][1])) == 1:
        entries = [(kind, stage, place - first[kind, stage]) for kind, stage, place in entries]
    for kind, stage, place in entries:
        if place < num_microbatches:
            yield Action(kind, stage, place)


def _check(actions: Iterable[Action], stages: list[int], num_microbatches: int) -> None:
    """Asserts that a rank runs each microbatch once in each of its stages, in order."""
    everything = list(range(num_microbatches))
    for stage in stages:
        places = {kind: [a.place for a in actions if a.kind == kind and a.stage == stage] for kind in "FBIW"}
        assert places[FORWARD] == everything, "each stage runs the microbatches in order"
        done = sorted(places[BACKWARD] + places[WEIGHT])
        assert done == everything, "each microbatch goes back through each stage once"
        last = [a.place for a in actions if a.stage == stage and a.kind in (BACKWARD, WEIGHT)]
        assert last == everything, "each stage runs the microbatches backwards in order"
        assert sorted(places[BACKWARD] + places[INPUT]) == everything, "weights follow inputs"
