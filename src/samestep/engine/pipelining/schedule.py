"""The schedule: the order in which each rank runs the forwards and backwards of its stages, and its messages.

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
    """A forward, a whole backward, or the part of one for the input or for the weights."""

    kind: str
    stage: int
    place: int  # of the microbatch among those that the pipeline runs in this step


class Message(NamedTuple):
    """A value (`FORWARD`) or a gradient (`BACKWARD`) of a microbatch for a stage, its input."""

    kind: str
    stage: int
    place: int

    @property
    def source(self) -> int:
        """The stage that sends it."""
        return self.stage - 1 if self.kind == FORWARD else self.stage + 1


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank along "pipe" in a step, and the rank that has each stage."""

    actions: tuple[tuple[Action, ...], ...]
    owners: tuple[int, ...]

    def messages(self, source: int, target: int) -> dict[Message, int]:
        """The messages from one rank to another in their order, each with the number of the action that sends it."""
        sent = ((self._sent_by(action), number) for number, action in enumerate(self.actions[source]))
        return {message: k for message, k in sent if message is not None and self.owners[message.stage] == target}

    def awaited(self, target: int) -> dict[Message, int]:
        """The messages that a rank needs from any other, each with the number of the action that needs it."""
        needed = ((self._needed_by(action), number) for number, action in enumerate(self.actions[target]))
        return {message: k for message, k in needed if message is not None}

    def _needed_by(self, action: Action) -> Message | None:
        kind, stage, place = action
        if kind == FORWARD:
            return Message(FORWARD, stage, place) if stage else None
        return None if kind == WEIGHT or stage + 1 == len(self.owners) else Message(BACKWARD, stage, place)

    def _sent_by(self, action: Action) -> Message | None:
        kind, stage, place = action
        if kind == FORWARD:
            return Message(FORWARD, stage + 1, place) if stage + 1 < len(self.owners) else None
        return None if kind == WEIGHT or not stage else Message(BACKWARD, stage - 1, place)


def owners_of_stages(name: str, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank that has each stage: in rounds over the ranks; with "zbv" there and back again."""
    rounds = range(stages_per_rank)
    if name == "zbv":
        return tuple(rank if k % 2 == 0 else num_ranks - 1 - rank for k in rounds for rank in range(num_ranks))
    return tuple(rank for _ in rounds for rank in range(num_ranks))


@cache
def make_schedule(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """The schedule of a step in which a pipeline runs so many microbatches.

    Some orders exist for certain numbers of microbatches only. Then that of the next larger number is taken, and the
    microbatches beyond are left out: dependencies stay in order.
    """
    owners = owners_of_stages(name, num_ranks, stages_per_rank)
    if num_microbatches == 0:
        return Schedule(((),) * num_ranks, owners)
    # Some of PyTorch's schedules need at least as many microbatches as stages.
    count = max(num_microbatches, len(owners))
    while (order := _order(name, num_ranks, stages_per_rank, count)) is None:
        count += 1
    actions = tuple(tuple(_actions(order[rank], num_microbatches)) for rank in range(num_ranks))
    # PyTorch's orders may change between versions, and a wrong one would hang or give other sums: check what the
    # tree needs.
    for rank, mine in enumerate(actions):
        _check(mine, [stage for stage, owner in enumerate(owners) if owner == rank], num_microbatches)
    return Schedule(actions, owners)


def _order(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Any:
    """PyTorch's order by rank; None if it has none for so many microbatches."""
    from torch.distributed.pipelining import schedules  # not before: it loads the tracer of torch.export

    # PyTorch's schedules take stages with modules and process groups; for their order these few attributes
    # suffice.
    facts = {"num_stages": num_ranks * stages_per_rank, "group_size": num_ranks, "group_rank": 0, "submod": None}
    facts |= {"is_first": False, "is_last": False, "has_backward": True}
    stages = [SimpleNamespace(stage_index=k, **facts) for k in range(stages_per_rank)]
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

        def places(kinds: str, stage: int = stage) -> list[int]:
            return [action.place for action in actions if action.stage == stage and action.kind in kinds]

        assert places(FORWARD) == everything, "each stage runs the microbatches in order"
        assert places(BACKWARD + WEIGHT) == everything, "and backwards in order, each once"
        assert sorted(places(BACKWARD + INPUT)) == everything, "weights follow inputs"
