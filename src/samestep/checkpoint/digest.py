"""Hashes of the whole state of a run, and their comparison over the ranks.

Runs are compared by a SHA-256, steps and ranks by a 64-bit checksum.

The checksum is computed where the state lies, cheaply enough for each step. The bytes of all tensors, each in the
logical order of its elements, are cut into rows of `ROW_WORDS` words of 32 bits: first those that fill no row of their
own, side by side, then the full rows of each tensor. A row's sum is multilinear: Σ wᵢxᵢ modulo 2^64, with 64-bit
weights that look random (Carter and Wegman 1979; modulo a power of two and without division, Dietzfelbinger 1996, and
Lemire and Kaser 2014, "Strongly universal string hashing is fast"). Two given rows have the same sum with a probability
of at most 2^-33 over the weights, since a difference of 32-bit words is divisible by 2^31 at most; and no two weights
agree modulo 2^32, so that one changed word, or two swapped words of a row, are not probably but certainly seen: their
products with the difference keep a bit below 2^64.

A row's sum and its number then go through a bijection that scatters them (the finalizer of SplitMix64, Steele, Lea and
Flood 2014), and these are added over the rows, as in the additive hash of Clarke et al. 2003: a difference in one row
alone changes the result with certainty, one in several goes unseen with a probability of about 2^-64. Names, dtypes,
shapes and plain numbers enter through BLAKE2. It finds accidents; against intent there is the SHA-256.

Integer sums modulo 2^64 do not depend on their order, so neither does the result: any device, any number of threads,
any layout in memory. A row's sum is linear in its words, and a word in its bytes (the highest bit counts -2^31): the
ranks of a sharded state sum their own bytes, with zeros for the others', and exchange 8 bytes for 16 KiB of state.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.checkpoint.local_shards import local_state, local_tensors, unsharded
from samestep.checkpoint.packing import extra_states, pack
from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.data.checksums import checksum, flattened
from samestep.data.nested import leaves
from samestep.engine.generator_states import generator_states
from samestep.engine.parameters import held_by
from samestep.engine.sharded_state import LocalShard, ShardedState, divided_parameters, is_divided
from samestep.engine.step import TrainStep
from samestep.errors import DeterminismError, UsageError

ROW_WORDS = 4096
ROW_BYTES = 4 * ROW_WORDS
_SLOT_BYTES = 16  # the alignment of a tensor's bytes among those that fill no row
_CPU_BLOCK_ROWS = 32  # 1 MiB of products, which stay in the cache
_BLOCK_ROWS = 1024  # large enough on an accelerator to hide the launch of a kernel
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, SplitMix64's increment
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def state_digest(model: nn.Module | TrainStep, optimizers: Optimizer | Sequence[Optimizer] | None = None) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of parameters, buffers and optimizer state, as hexadecimal digits.

    If the state is sharded (strategy="sharded") give the step: all ranks call it then, and gather one tensor at a time.
    The digest is the same as for that state on one device. Tier `bitwise`.

    Args:
        model: its parameters and all its buffers count, in their order; or a training step.
        optimizers: one or several; state is named after its parameter, numbers count as JSON. None for a step.

    Raises:
        UsageError: the model is sharded, or there are optimizers neither here nor in a step.
    """
    if not isinstance(model, TrainStep):
        if optimizers is None:
            raise UsageError("got a model alone; give its optimizers, too ([] for its own state alone), or the step")
        divided = divided_parameters(model)
        several = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
        divided += [f"the state of {type(each).__name__}" for each in several if is_divided(each)]
        if divided:
            raise UsageError(f"{divided[0]} is sharded over the ranks; call state_digest(step) on all ranks")
    hasher = hashlib.sha256()
    for name, value in named_state(model, optimizers):
        whole = unsharded(value, model.communicator) if isinstance(model, TrainStep) else value
        if isinstance(whole, Tensor):
            hasher.update(f"{name} {whole.dtype} {list(whole.shape)}\n".encode())
            hasher.update(_bytes(whole.cpu()).numpy().tobytes())
        else:
            hasher.update(f"{name} {json.dumps(whole)}\n".encode())
    return hasher.hexdigest()


def named_state(
    model: nn.Module | TrainStep, optimizers: Optimizer | Sequence[Optimizer] | None = None
) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values of the state by name, in a fixed order; of sharded tensors this rank's local shards."""
    state: ShardedState | None = None
    world_size = 1
    extra: Mapping[str, Any] = {}
    if isinstance(model, TrainStep):
        state, world_size, optimizers = model.sharded_state, model.communicator.world_size, model.optimizers
        extra = model.extra_state
        model = model.model
    named = chain(model.named_parameters(), () if state is None else state.parts.items())
    names = {id(parameter): name for name, parameter in named}
    yield from local_tensors(model, state, world_size)
    for number, optimizer in enumerate([optimizers] if isinstance(optimizers, Optimizer) else optimizers or ()):
        parameters = held_by(optimizer)
        for index, of_parameter in local_state(optimizer, state, world_size).items():
            owner = names.get(id(parameters[index]), f"parameter {index}")
            for key, value in sorted(of_parameter.items()):
                for leaf in leaves(value):
                    if isinstance(leaf, Tensor | LocalShard | int | float | str | bool) or leaf is None:
                        yield f"optimizer {number}: {owner}: {key}", leaf
    extra_of = {f"extra state {name}": value for name, value in extra_states(model).items()}
    for name, value in (extra_of | {f"state {name}": value.state_dict() for name, value in extra.items()}).items():
        packed = pack(value, name)
        yield name, json.dumps(packed.facts, sort_keys=True)
        yield from sorted(packed.tensors.items())


@torch.no_grad()
def state_checksum(model: nn.Module | TrainStep, optimizers: Sequence[Optimizer] = ()) -> Tensor:
    """A position-dependent 64-bit checksum of parameters, buffers and optimizer state, computed on the device.

    Equal states have equal checksums, on any kind and number of devices and any number of threads. The order of
    elements and of tensors counts, as do names, dtypes, shapes and every bit (-0.0 is not 0.0); strides and alignment
    do not. If the state is sharded give the step, and call it on all ranks. Tier `bitwise`.
    """
    over = model.communicator if isinstance(model, TrainStep) else None
    tensors, plain = [], []
    is_sharded = False
    for name, value in named_state(model, optimizers):
        is_sharded |= isinstance(value, LocalShard)
        if isinstance(value, Tensor | LocalShard):
            tensors.append((name, value))
        else:
            plain.append((name, value))
    return _checksum(tensors, plain, over if is_sharded else None)


@torch.no_grad()
def common_checksum(step: TrainStep) -> Tensor:
    """The checksum of what each rank has whole, and alike: all but the local shards."""
    whole, plain = [], []
    for name, value in _common_state(step):
        if isinstance(value, Tensor):
            whole.append((name, value))
        else:
            plain.append((name, value))
    return _checksum(whole, plain, None)


def _common_state(step: TrainStep) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in named_state(step) if not isinstance(value, LocalShard))


def as_hex(value: int) -> str:
    """A checksum, signed or not, as 16 hexadecimal digits."""
    return f"{value % 2**64:016x}"


def _checksum(
    tensors: Sequence[tuple[str, Tensor | LocalShard]], plain: list[tuple[str, Any]], over: Communicator | None
) -> Tensor:
    forms = [(name, str(value.dtype), list(value.shape)) for name, value in tensors]
    total = sum_of_rows([value for _, value in tensors], over)
    return scattered(total + _signed(_hash(json.dumps(forms)) + _hash(json.dumps(plain))))


def sum_of_rows(tensors: Sequence[Tensor | LocalShard], over: Communicator | None) -> Tensor:
    """The sum over all rows of their scattered sums, 0-d int64; a collective call if there are local shards in it."""
    # Two kinds of rows: the first `num_rest` hold, side by side, what fills no row of its own, the others full rows of
    # each tensor. A rank's elements may begin and end within a row: full rows are summed in place, the others are
    # copied into `stage`, with zeros where the elements of other ranks are.
    rank, ranks = (0, 1) if over is None else (over.rank, over.world_size)
    held = [value.local if isinstance(value, LocalShard) else value for value in tensors]
    main = next((each.device for each in held if each.device.type != "cpu"), torch.device("cpu"))
    sizes = [value.shape.numel() * value.dtype.itemsize for value in tensors]
    num_rest = max(1, -(-sum(-(-(size % ROW_BYTES) // _SLOT_BYTES) * _SLOT_BYTES for size in sizes) // ROW_BYTES))
    num_rows = num_rest + sum(size // ROW_BYTES for size in sizes)
    share = -(-num_rows // ranks)
    # [rows], rounded up to equal shares.
    sums = torch.zeros(share * ranks, dtype=torch.int64, device=main)
    partial: dict[torch.device, list[tuple[int, Tensor]]] = {}  # (place among all rows in bytes, bytes of one row)
    rest_at, rows_at = 0, num_rest * ROW_BYTES
    for value, each, size in zip(tensors, held, sizes, strict=True):
        start = value.sharding.cuts[rank] * each.dtype.itemsize if isinstance(value, LocalShard) else 0
        data = _bytes(each) if isinstance(value, LocalShard) or rank == 0 else _bytes(each)[:0]
        border = size // ROW_BYTES * ROW_BYTES
        for begin, end, base in ((0, border, rows_at), (border, size, rest_at)):
            first, stop = max(start, begin), min(start + data.numel(), end)
            if first >= stop:
                continue
            at = base + first - begin
            # Where the first full row begins, and the last one ends.
            head = min(stop, first + -at % ROW_BYTES)
            tail = max(head, stop - (at + stop - first) % ROW_BYTES)
            if head < tail:
                row = (at + head - first) // ROW_BYTES
                sums[row : row + (tail - head) // ROW_BYTES] += _row_sums(data[head - start : tail - start]).to(main)
            for a, b in ((first, head), (tail, stop)):
                if a < b:
                    partial.setdefault(each.device, []).append((at + a - first, data[a - start : b - start]))
        rows_at += border
        rest_at += -(-(size - border) // _SLOT_BYTES) * _SLOT_BYTES
    for device, pieces in partial.items():
        numbers = {row: number for number, row in enumerate(dict.fromkeys(place // ROW_BYTES for place, _ in pieces))}
        stage = torch.zeros(len(numbers) * ROW_BYTES, dtype=torch.uint8, device=device)
        places = [numbers[place // ROW_BYTES] * ROW_BYTES + place % ROW_BYTES for place, _ in pieces]
        slots = [stage[place : place + piece.numel()] for place, (_, piece) in zip(places, pieces, strict=True)]
        torch._foreach_copy_(slots, [piece for _, piece in pieces])
        sums.index_add_(0, torch.tensor(list(numbers)).to(main), _row_sums(stage).to(main))
    if over is None or ranks == 1:
        return scattered(sums + random_words(ROW_WORDS, num_rows, main)).sum()
    # Each rank adds up and scatters an equal part of the rows; of that only one number a rank travels.
    at_hand = over.transport if main == over.device else over.control
    theirs = at_hand.exchange(sums, [share] * ranks, [share] * ranks).wait().view(ranks, share).sum(0)
    own = range(min(rank * share, num_rows), min((rank + 1) * share, num_rows))
    keys = random_words(ROW_WORDS + own.start, len(own), main)
    return at_hand.gather(scattered(theirs[: len(own)] + keys).sum().view(1)).wait().sum()


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of the elements in their logical order; a copy only if they lie in memory otherwise."""
    return flattened(tensor.data).view(torch.uint8)


def _row_sums(data: Tensor) -> Tensor:
    """The weighted sum of each row, int64 [rows], of bytes that fill rows."""
    # Products are [rows, ROW_WORDS] int64, which wrap around modulo 2^64; in blocks, since they are twice the data.
    aligned = data if data.storage_offset() % 4 == 0 else data.clone()
    words, weights = aligned.view(torch.int32).view(-1, ROW_WORDS), random_words(0, ROW_WORDS, data.device)
    blocks = words.split(_CPU_BLOCK_ROWS if data.device.type == "cpu" else _BLOCK_ROWS)
    return torch.cat([(block * weights).sum(1) for block in blocks])


def random_words(start: int, count: int, device: torch.device | None = None) -> Tensor:
    """Some numbers of SplitMix64 from seed 0: the first `ROW_WORDS` are the weights, the others keys of rows.

    No two of the weights agree modulo 2^32, and none is 0 there; a test checks that this holds for seed 0.
    """
    return scattered(torch.arange(start + 1, start + count + 1, device=device) * _signed(_GOLDEN))


def scattered(words: Tensor) -> Tensor:
    """The finalizer of SplitMix64, a bijection of 64-bit words: int64 of any shape."""
    # >> copies the sign, & removes the copies.
    words = (words ^ ((words >> 30) & 0x3FFFFFFFF)) * _signed(_FIRST)
    words = (words ^ ((words >> 27) & 0x1FFFFFFFFF)) * _signed(_SECOND)
    return words ^ ((words >> 31) & 0x1FFFFFFFF)


def _signed(value: int) -> int:
    """The 64-bit word as a tensor of int64 holds it."""
    return (value + 2**63) % 2**64 - 2**63


def _hash(text: str) -> int:
    """64 bits of BLAKE2b over a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Drift:
    """Compares the state that several ranks hold alike, by 8 bytes a rank."""

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
        words = [int(each) for each in ([digest] if digest is not None else map(common_checksum, self._steps))]
        self._membership.perform(lambda: self._compare(words))
        self._equal_at = at

    def _compare(self, words: Sequence[int]) -> None:
        """Gathers the checksums, one a step."""
        columns = zip(*self._membership.communicator.gather_words(words), strict=True)
        for step, column in zip(self._steps, columns, strict=False):
            if _odd_one(column) is not None:
                self._explain(step)

    def _explain(self, step: TrainStep) -> None:
        """Finds the first entry that differs, and raises a `DeterminismError` on all ranks."""
        membership, entries = self._membership, list(_entries(step))
        draws = checksum(list(leaves(generator_states(membership.communicator.device))))
        rows = membership.communicator.gather_values((draws, [total for _, total in entries]))
        columns = list(zip_longest(*(own for _, own in rows)))  # one rank may have an entry more
        found = []
        for number, column in enumerate(columns):
            name = entries[number][0] if number < len(entries) else "the number of entries"
            if (pair := _odd_one(column)) is not None:
                found.append((name, pair))
        name, (rank, other) = found[0] if found else ("the state", (1, 0))
        before = None if self._equal_at is None else self._equal_at[self._steps.index(step)]
        since = "" if before is None else f" (they agreed after step {before})"
        advice = "" if before == step.num_steps - 1 else "; digest_every=1 compares after every step"
        drew = ", and so do the random generators" if len({draws for draws, _ in rows}) > 1 else ""
        raise DeterminismError(
            f"the ranks' states differ after step {step.num_steps}{since}: {name} of rank {rank} differs from rank "
            f"{other}; {len(found)} of {len(columns)} entries differ{drew}. Something was written, set or drawn on one "
            f"rank only: look for what depends on run.rank or run.is_main, in hooks and callbacks too{advice}"
        )


def _odd_one(values: Sequence[int]) -> tuple[int, int] | None:
    """A rank whose value most ranks do not have, and a rank with the common value; None if all agree."""
    # What most ranks have is taken for right; of two ranks, what rank 0 has.
    common = Counter(values).most_common(1)[0][0]
    odd = [rank for rank, value in enumerate(values) if value != common]
    return (odd[0], values.index(common)) if odd else None


def _entries(step: TrainStep) -> Iterator[tuple[str, int]]:
    """The entries of a step's state that every rank has: names and checksums.

    Settings of the optimizers, such as learning rates, come first: if they differ, all else differs because of them.
    """
    for number, optimizer in enumerate(step.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and isinstance(value, Tensor | int | float | str | bool | tuple):
                    yield f"optimizer {number}: {key} of parameter group {index}", checksum([key, value])
    for name, value in _common_state(step):
        form = f"{name} {value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else name
        yield name, checksum([form, value])
