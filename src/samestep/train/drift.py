"""Drift: the ranks compare checksums of their states, and name the rank and the tensor that differ."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor

from samestep.comm.local_shards import LocalShard
from samestep.comm.membership import Membership
from samestep.data.batch import checksum
from samestep.data.nested import leaves
from samestep.engine.step import TrainStep
from samestep.errors import DeterminismError
from samestep.train.checkpoint.state import generator_states
from samestep.train.digest import local_checksums, named_state


class Drift:
    """Compares the state that several ranks hold alike, by 8 bytes a rank (16 if it is sharded)."""

    def __init__(self, membership: Membership, steps: Sequence[TrainStep]) -> None:
        self._membership = membership
        self._steps = list(steps)
        self._equal_at: list[int] | None = None

    def check(self, digest: Tensor | None = None) -> None:
        """Compares the states as they are now, unless that was done after the same step; a collective call.

        `digest` is the checksum of the state, if it is known and the state is not sharded.
        """
        at = [step.num_steps for step in self._steps]
        if self._membership.world_size == 1 or at == self._equal_at:
            return
        tensors = [digest] if digest is not None else [part for step in self._steps for part in local_checksums(step)]
        words = [int(tensor) for tensor in tensors]
        before = self._membership.heartbeat.enter("exchange")  # a rank that waits for a slower one does not hang
        self._membership.perform(lambda: self._compare(words))
        self._membership.heartbeat.enter(before)
        self._equal_at = at

    def _compare(self, words: Sequence[int]) -> None:
        """Gathers the checksums; those of the local shards are the second of each step."""
        columns = list(zip(*self._membership.communicator.gather_words(words), strict=True))
        for step in self._steps:
            for is_piece in (False,) if step.spread is None else (False, True):
                if self._odd_one(columns.pop(0), step, is_piece) is not None:
                    self._explain(step)

    def _odd_one(self, values: Sequence[int], step: TrainStep, is_piece: bool) -> tuple[int, int] | None:
        """A rank whose value is not that of most ranks which should have the same, and one of those; None if all agree.

        Of local shards (`is_piece`) only ranks at equal places of several groups should have the same.
        """
        stride = step.spread_over.world_size if is_piece else 1
        for first in range(stride):
            ranks = range(first, len(values), stride)
            common = Counter(values[rank] for rank in ranks).most_common(1)[0][0]
            if odd := [rank for rank in ranks if values[rank] != common]:
                return odd[0], next(rank for rank in ranks if values[rank] == common)
        return None

    def _explain(self, step: TrainStep) -> None:
        """Finds the first entry that differs, and raises a `DeterminismError` on all ranks."""
        membership, entries = self._membership, list(_entries(step))
        draws = checksum(list(leaves(generator_states(membership.communicator.device))))
        rows = membership.communicator.gather_words([len(entries), draws])
        most = max(count for count, _ in rows)
        own = [total for _, total, _ in entries] + [0] * (most - len(entries))
        columns = zip(*membership.communicator.gather_words(own), strict=True)
        found = []
        for number, column in enumerate(columns):
            name, _, is_piece = entries[number] if number < len(entries) else ("the number of entries", 0, False)
            if (pair := self._odd_one(column, step, is_piece)) is not None:
                found.append((name, pair))
        name, (rank, other) = found[0] if found else ("the state", (1, 0))
        before = None if self._equal_at is None else self._equal_at[self._steps.index(step)]
        since = "" if before is None else f" (they agreed after step {before})"
        advice = "" if before == step.num_steps - 1 else "; digest_every=1 (--digest-every 1) compares after every step"
        drew = ", and so do the random generators" if len({draws for _, draws in rows}) > 1 else ""
        raise DeterminismError(
            f"the ranks' states differ after step {step.num_steps}{since}: {name} of rank {rank} is not that of rank "
            f"{other}; {len(found)} of {most} entries differ{drew}. Something was written, set or drawn on one rank "
            f"only: look for what depends on run.rank or run.is_main, in hooks and callbacks too{advice}"
        )


def _entries(step: TrainStep) -> Iterator[tuple[str, int, bool]]:
    """The entries of a step's state: names, checksums, and whether it is this rank's local shard.

    Settings of the optimizers, such as learning rates, come first: where they differ the rest does because of them.
    """
    for number, optimizer in enumerate(step.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and isinstance(value, Tensor | int | float | str | bool | tuple):
                    yield f"optimizer {number}: {key} of parameter group {index}", checksum([key, value]), False
    for name, value in named_state(step):
        is_piece = isinstance(value, LocalShard)
        held = value.local if isinstance(value, LocalShard) else value
        form = f"{name} {held.dtype} {list(held.shape)}" if isinstance(held, Tensor) else name
        yield name, checksum([form, held]), is_piece
