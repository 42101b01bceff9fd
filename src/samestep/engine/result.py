"""The numbers of a step: loss statistics of each microbatch, the control message of each rank, and the result."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from samestep.comm.communicator import Communicator
from samestep.comm.reduction import tree_sum_rows
from samestep.core.microbatches import in_microbatch_order
from samestep.core.tree import tree_sum
from samestep.data.batch import Batch
from samestep.engine.losses import MicrobatchLoss, wide_dtype
from samestep.errors import DeterminismError, LossError, NonFiniteError

ADVICE = "Lower the learning rate, set max_grad_norm, or leave such steps out by on_nonfinite='skip'"
COLUMNS = 3  # of a microbatch's row: total, count, sum of the gradient's elements
NUM_SUMS = 5  # in a result's scalars before the rows: total, count, gradient norm, skipped, failed
IDENTITY = 5  # in a header: length, epoch, position and checksum of the batch, and the number of the step
OPTIONS = 3  # then stop, checkpoint, failed
FLAGS_A_WORD = 62
RAN_NONE, NO_NAMES = 0, 1  # the word of a rank without microbatches, and of one without scalars beside its losses


class StepStats:
    """The loss statistics of a step, [V, 3]: total, count and gradient sum of each microbatch."""

    # `on_host` they are Python's floats, which have the same 64 bits as a tensor's elements; else they stay on the
    # device, for which the host then does not wait, and become a tensor once a step.

    def __init__(self, device: torch.device, on_host: bool) -> None:
        self.on_host = on_host
        self._device = device
        self._dtype = wide_dtype(device)
        # By place among this rank's microbatches: loss, its weight, count, sum of the gradient's elements.
        self._on_device: dict[int, tuple[Tensor, float, float | Tensor, Tensor]] = {}
        self._names_by_place: dict[int, tuple[str, ...]] = {}
        self._scalars: dict[int, Tensor] = {}  # beside the loss: totals and counts by place
        self.names: tuple[str, ...] = ()  # of these
        self.begin(range(0))

    def begin(self, mine: range) -> None:
        """Starts a step in which this rank runs some microbatches; those without samples count as zero."""
        self._mine = mine
        # On the host a list: writing to a tensor costs as much as a whole layer of a small model.
        self._rows: Any = [(0.0, 0.0, 0.0)] * len(self._mine) if self.on_host else None
        self._on_device.clear()
        self._names_by_place.clear()
        self._scalars.clear()
        self._scalar_rows: Tensor | None = None
        self.names = ()

    def record(self, microbatch: int, loss: MicrobatchLoss, gradient_sum: Tensor) -> None:
        """Records a microbatch's row."""
        index = self._mine.index(microbatch)
        if self._names_by_place and self.names != loss.names:
            raise _other_names(self.names, loss.names)
        self.names = self._names_by_place[index] = loss.names
        if loss.scalars is not None:
            self._scalars[index] = loss.scalars
        if self.on_host:
            self._rows[index] = (loss.value.item() * loss.weight, float(loss.count), gradient_sum.item())
        else:
            value = loss.value.detach().to(self._dtype, copy=True)  # the loss function may write to its own tensor
            self._on_device[index] = value, loss.weight, loss.count, gradient_sum

    def record_empty(self, microbatch: int, nothing: Tensor, gradient_sum: Tensor) -> None:
        """Records the row of a microbatch without samples."""
        index = self._mine.index(microbatch)
        if self.on_host:
            self._rows[index] = (0.0, 0.0, gradient_sum.item())
        else:
            self._on_device[index] = nothing.to(self._dtype), 0.0, 0.0, gradient_sum

    def exchange(self, communicator: Communicator, ranges: Sequence[range], header: Sequence[int]) -> list[list[int]]:
        """Gives every rank the rows of all microbatches; returns the headers of all ranks, from the same message."""
        ours = torch.tensor(self._rows, dtype=torch.float64).view(-1, COLUMNS) if self.on_host else self._own_rows()
        # One message for both: between small ranks its latency is most of the cost of a step.
        counts = [len(microbatches) for microbatches in ranges]
        words = [*header, self._word_of_names()]
        rows, headers = communicator.gather_header(ours, counts, words)
        order = in_microbatch_order(ranges)
        rows = rows if order is None else rows[order]
        self._rows = rows.tolist() if self.on_host else rows
        words_of_names = [words.pop() for words in headers]
        if any(word not in (RAN_NONE, NO_NAMES) for word in words_of_names):
            self._agree_on_names(communicator, words_of_names)
            beside = communicator.gather_rows(self._own_scalars(), counts)
            self._scalar_rows = beside if order is None else beside[order]
        return headers

    def _word_of_names(self) -> int:
        """The names of the scalars beside the losses of this rank, as a number."""
        if not self._names_by_place:
            return RAN_NONE
        text = json.dumps(self.names).encode()
        return int.from_bytes(blake2b(text, digest_size=7).digest()) + NO_NAMES + 1 if self.names else NO_NAMES

    def _agree_on_names(self, communicator: Communicator, words: Sequence[int]) -> None:
        """Gives the names to the ranks that ran no microbatch; raises a `LossError` on all if names differ."""
        source = next(rank for rank, word in enumerate(words) if word != RAN_NONE)
        if any(word not in (RAN_NONE, words[source]) for word in words):
            raise _other_names()
        if RAN_NONE in words:
            self.names = communicator.share_value(self.names, source)

    def sums(self, num_leaves: int) -> tuple[Any, Any]:
        """Total and count over the microbatches with samples, along the tree: floats, or 0-d tensors on the device."""
        self._rows = self._own_rows() if self._rows is None else self._rows
        rows = self._rows[:num_leaves]
        if self.on_host:
            sums = tree_sum([row[:2] for row in rows], lambda a, b: (a[0] + b[0], a[1] + b[1]))
            assert sums is not None, "a batch holds at least one sample"
            return sums[0], sums[1]
        total, count, _ = tree_sum_rows(rows)
        return total, count

    def scalars(self, sums: Sequence[Any], num_leaves: int) -> Tensor | list[float]:
        """Some sums, then the rows, flat; then the sums of the scalars beside the loss, along the tree."""
        rows = self._rows[:num_leaves]
        beside: list[Tensor] = []
        if self.names:
            beside_rows = self._own_scalars() if self._scalar_rows is None else self._scalar_rows
            beside = [tree_sum_rows(beside_rows[:num_leaves])]
        if self.on_host:
            flat = [value for row in rows for value in row]
            return [*map(float, sums), *flat, *(value for each in beside for value in each.tolist())]
        return torch.cat([*(value.to(self._dtype).view(1) for value in sums), rows.reshape(-1), *beside])

    def _own_scalars(self) -> Tensor:
        """The totals and counts of this rank's microbatches, [microbatches, 2 * names]; zero for those without any."""
        nothing = torch.zeros(2 * len(self.names), dtype=self._dtype, device=self._device)
        rows = [self._scalars.get(index, nothing) for index in range(len(self._mine))]
        return torch.stack(rows) if rows else nothing.view(1, -1)[:0]

    def _own_rows(self) -> Tensor:
        """The rows of this rank's microbatches, on the device."""
        if not self._on_device:
            return torch.zeros(len(self._mine), COLUMNS, dtype=self._dtype, device=self._device)
        values, weights, counts, gradients = zip(*self._on_device.values(), strict=True)
        factors = self._column(weights)
        are_means = not any(isinstance(count, Tensor) for count in counts) and counts == weights
        divisors = factors if are_means else self._column(counts)
        columns = torch.stack(values) * factors, divisors, torch.stack(gradients).to(self._dtype)
        rows = torch.stack(columns, 1)
        return functional.pad(rows, (0, 0, 0, len(self._mine) - len(rows))) if len(rows) < len(self._mine) else rows

    def _column(self, numbers: Sequence[float | Tensor]) -> Tensor:
        """Numbers of the host, or 0-d tensors on the device, as one tensor there."""
        column = torch.empty(len(numbers), dtype=self._dtype, device=self._device)
        start = 0
        # Never a copy of a list of numbers, for which the host would wait; equal neighbours are filled in at once.
        for number, run in groupby(numbers, lambda number: None if isinstance(number, Tensor) else number):
            entries = list(run)
            part = column[start : start + len(entries)]
            if number is None:
                part.copy_(torch.stack(entries))  # type: ignore[arg-type]  # they are tensors
            else:
                part.fill_(number)
            start += len(entries)
        return column


def _other_names(first: tuple[str, ...] = (), other: tuple[str, ...] = ()) -> LossError:
    shown = f" ({', '.join(first) or 'none'}; {', '.join(other) or 'none'})" if first or other else ""
    return LossError(
        f"the loss function returned other scalars for one microbatch than for another{shown}; return the same names "
        "for all, and samestep.Mean with a count of 0 if a microbatch has nothing to add"
    )


@dataclass(frozen=True, slots=True)
class Agreed:
    """The requests of one rank; after the exchange the requests of any rank."""

    stop: int  # the signal by which the run is to stop, or `requests.END_OF_FIT`; 0 for none
    checkpoint: bool  # whether all ranks are to write a checkpoint after the step
    flags: list[bool]  # any others, equally many on every rank
    failed: int = 0  # the number of an earlier step whose failure was read since; 0 for none


def write_header(batch: Batch, step: int, asked: Agreed) -> list[int]:
    """The control message of this rank, as 64-bit integers, equally many on every rank."""
    flags = asked.flags
    # 62 a word: the sign bit and the one beside it stay clear, so that no shift overflows a signed integer.
    packed = [
        sum(flag << k for k, flag in enumerate(flags[i : i + FLAGS_A_WORD])) for i in range(0, len(flags), FLAGS_A_WORD)
    ]
    identity = [batch.length, batch.epoch, batch.position, batch.checksum, step]
    return [*identity, asked.stop, int(asked.checkpoint), asked.failed, *packed]


def read_headers(headers: Sequence[Sequence[int]], num_flags: int) -> Agreed:
    """The requests of all ranks together; raises a `DeterminismError` if they run different steps."""
    first = headers[0][:IDENTITY]
    for rank, header in enumerate(headers):
        if header[:IDENTITY] != first:
            # Of a loader's batch the checksum is the length of its dataset, not negative as a stream's.
            if min(first[1], header[1], first[3], header[3]) >= 0 and header[3] != first[3]:
                raise DeterminismError(
                    f"the dataset of rank {rank} has {header[3]} samples in step {first[4]}, rank 0's has "
                    f"{first[3]}; needed: the same dataset on every rank, of the same length in every epoch"
                )
            raise DeterminismError(
                f"rank {rank} and rank 0 were handed different batches in step {first[4]} (length, epoch, position, "
                f"checksum, step: {list(header[:IDENTITY])} and {list(first)}); use run.loader, and seed your sampler, "
                "or what your stream yields, alike on every rank"
            )
    # The greatest: any rank's request is everyone's, and of two signals all ranks choose the same.
    options = [header[IDENTITY : IDENTITY + OPTIONS] for header in headers]
    stop, checkpoint, failed = (max(column) for column in zip(*options, strict=True))
    merged = [0] * (len(headers[0]) - IDENTITY - OPTIONS)
    for header in headers:
        merged = [a | b for a, b in zip(merged, header[IDENTITY + OPTIONS :], strict=True)]
    flags = [bool(merged[k // FLAGS_A_WORD] >> (k % FLAGS_A_WORD) & 1) for k in range(num_flags)]
    return Agreed(stop, bool(checkpoint), flags, failed)


@dataclass(slots=True)
class StepResult:
    """The result of one optimizer step; all numbers are for the global batch, equal on every rank.

    Reading `loss`, `grad_norm`, `total`, `count`, `scalars` or `skipped` waits for the device, once, and raises a
    `NonFiniteError` that this step or one before it left behind; without reading, the host does not wait. Tier
    `bitwise`.

    Attributes:
        step: the number of this step, counted from 1.
        num_samples: samples of the global batch.
    """

    step: int
    num_samples: int
    _batch: Batch = field(repr=False)
    _num_microbatches: int = field(repr=False)
    _scalars: Tensor | list[float] = field(repr=False)
    _event: torch.Event | None = field(default=None, repr=False)
    _read_before: Callable[[int], None] | None = field(default=None, repr=False)
    _values: list[float] | None = field(default=None, repr=False)
    _names: tuple[str, ...] = field(default=(), repr=False)

    @property
    def loss(self) -> float:
        """The mean loss over the global batch: the sum of all totals over the sum of all counts."""
        total, count = self._fetch()[:2]
        return total / count if count else float("nan")

    @property
    def total(self) -> float:
        """The sum of the loss over the global batch."""
        return self._fetch()[0]

    @property
    def count(self) -> float:
        """The divisor of the sum: the number of samples, or the sum of the counts of `samestep.Mean`."""
        return self._fetch()[1]

    @property
    def grad_norm(self) -> float:
        """The 2-norm of the gradient of the mean loss, before clipping."""
        return self._fetch()[2]

    @property
    def scalars(self) -> dict[str, float]:
        """The means of the scalars that the loss function returned beside the loss, over the global batch, by name."""
        return {name: total / count if count else float("nan") for name, (total, count) in self.scalar_sums.items()}

    @property
    def scalar_sums(self) -> dict[str, tuple[float, float]]:
        """Their totals and counts."""
        values = self._fetch()[-2 * len(self._names) :] if self._names else []
        return dict(zip(self._names, zip(values[::2], values[1::2], strict=True), strict=True))

    @property
    def skipped(self) -> bool:
        """Whether the update was left out because the gradient was not finite."""
        return self._fetch()[3] != 0

    @property
    def batch(self) -> Batch:
        """The batch without its samples: length, epoch, position, ids."""
        return self._batch

    @property
    def is_there(self) -> bool:
        """Whether reading returns without waiting."""
        return self._values is not None or self._event is None or self._event.query()

    @property
    def is_good(self) -> bool:
        """Whether reading neither waits nor raises: the numbers are there, and the step has not failed."""
        return self.is_there and not self._raw()[4]

    def check(self) -> None:
        """Raises the failure of this step, if any.

        Raises:
            NonFiniteError: this step's loss or gradient was not finite, and `on_nonfinite` is "raise".
        """
        values = self._raw()
        if values[4]:
            raise NonFiniteError(self._explain(values))

    def _fetch(self) -> list[float]:
        # Earlier steps first: the first of several failures is the one to raise, and the later steps did not update.
        if self._read_before is not None:
            self._read_before(self.step)
        self.check()
        return self._raw()

    def _raw(self) -> list[float]:
        if self._values is None:
            # The copy that the step started may still be under way.
            if self._event is not None:
                self._event.synchronize()
            self._values = self._scalars.tolist() if isinstance(self._scalars, Tensor) else self._scalars
        return self._values

    def _explain(self, values: list[float]) -> str:
        """Names the first microbatch whose loss or gradient is not finite."""
        end = len(values) - 2 * len(self._names)
        rows = [values[i : i + COLUMNS] for i in range(NUM_SUMS, end, COLUMNS)]
        if len(rows) == 1:
            rows[0][2] = values[2]  # of the only microbatch of a step no gradient sum is made, only the norm
        where = "the gradient summed over all microbatches (each microbatch's own is finite)"
        for microbatch, (total, _, gradient) in enumerate(rows):
            if not _is_finite(total) or not _is_finite(gradient):
                what, value = ("gradient", gradient) if _is_finite(total) else ("loss", total)
                # Of a large gradient the sum of two siblings was read, and zero stands for the left one's.
                is_either = what == "gradient" and microbatch % 2 == 1 and rows[microbatch - 1][2] == 0
                those = [microbatch - 1, microbatch] if is_either else [microbatch]
                samples = " or ".join(self._batch.describe_microbatch(one, self._num_microbatches) for one in those)
                where = f"the {what} of microbatch {' or '.join(map(str, those))} ({value}; {samples})"
                break
        else:
            if values[1] == 0:
                where = "the loss, since its count over the whole batch is 0"
        state = "Parameters, optimizer and buffers are as before this step"
        return f"step {self.step}: not finite: {where}. {state}. {ADVICE}"


def _is_finite(value: float) -> bool:
    return value - value == 0
