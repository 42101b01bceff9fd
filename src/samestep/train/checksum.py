"""The state checksum: 64 bits over the whole state of a run, computed where the state lies, cheap enough for each step.

The bytes of all tensors, each in the logical order of its elements, are cut into rows of `ROW_WORDS` words of 32 bits.
A row's sum is multilinear: Σ wᵢxᵢ modulo 2^64, with 64-bit weights that look random (Carter and Wegman 1979; modulo a
power of two and without division, Dietzfelbinger 1996, and Lemire and Kaser 2014, "Strongly universal string hashing is
fast"). Two given rows have the same sum with a probability of at most 2^-33 over the weights, since a difference of
32-bit words is divisible by 2^31 at most; and no two weights agree modulo 2^32, so that one changed word, or two
swapped words of a row, are not probably but certainly seen: their products with what differs keep a bit below 2^64.

A row's sum and its number then go through a bijection that scatters them (the finalizer of SplitMix64, Steele, Lea and
Flood 2014), and these are added over the rows, as in the additive hash of Clarke et al. 2003: what differs in one row
alone changes the result with certainty, what differs in several goes unseen with a probability of about 2^-64. Names,
dtypes, shapes and plain numbers enter through BLAKE2. Nobody who wants to is kept from making two states of one
checksum: it finds accidents. `samestep.train.digest` is the one for proof against intent.

Integer sums modulo 2^64 do not depend on their order, so neither does the result: any device, any number of threads,
any layout in memory. A word is read and multiplied once; what is between stays in the cache of a CPU, and on an
accelerator in blocks that are large enough to hide the start of a kernel.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.data.batch import flattened
from samestep.train.digest import named_state

ROW_WORDS = 4096
ROW_BYTES = 4 * ROW_WORDS
SLOT_BYTES = 16  # what the longest dtype, complex128, must be aligned to
CPU_BLOCK_ROWS = 32  # 1 MiB of products: they stay in the cache
BLOCK_ROWS = 1024

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, SplitMix64's increment
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class _Stage:
    """The words of one device that fill no row of their own, in one buffer; those of other devices are zero in it.

    Attributes:
        words: int32 [rows, ROW_WORDS].
        groups: for each dtype the tensors, by number, with how many of their last elements go here, and where they go.
            A tensor that fills no row goes here as it is: 0 stands for its number of elements.
    """

    words: Tensor
    groups: tuple[tuple[list[tuple[int, int]], list[Tensor]], ...]


@dataclass(frozen=True)
class _Plan:
    """Where the words of each tensor lie among the rows; the same for every placement on devices but for `stages`.

    Attributes:
        layout: names, dtypes, shapes and devices, by which the plan is known to fit.
        fingerprint: 64 bits over names, dtypes and shapes.
        full: for each tensor how many rows it fills alone.
        keys: for each device the keys of those rows, in the order of its tensors.
        stages: the rest, by device.
        stage_keys: the keys of the rows of the rest, on the main device.
        weights: by device, int64 [ROW_WORDS].
        main: the device that the checksum is computed on: the first that is no CPU, if there is one.
    """

    layout: list[tuple[Any, ...]]
    fingerprint: int
    full: tuple[int, ...]
    keys: dict[torch.device, Tensor]
    stages: dict[torch.device, _Stage]
    stage_keys: Tensor
    weights: dict[torch.device, Tensor]
    main: torch.device


class StateChecksum:
    """A position-dependent 64-bit checksum of parameters, buffers and optimizer state, computed on the device.

    Equal states have equal checksums, on any kind and number of devices and any number of threads. The order of
    elements and of tensors counts, as do names, dtypes, shapes and every bit (-0.0 is not 0.0); strides and alignment
    do not. Tier `bitwise`.

    Args:
        model: its parameters and all its buffers count.
        optimizers: state is named after the parameter that it belongs to; settings such as learning rates do not count.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._plan: _Plan | None = None
        self._scratch = torch.empty(0, ROW_WORDS, dtype=torch.int64)

    @torch.no_grad()
    def compute(self) -> Tensor:
        """The checksum of the state as it is now.

        Returns:
            A 0-d int64 tensor on the device; nobody waits for it until it is read. See `as_hex`.
        """
        names, tensors, plain = [], [], []
        for name, value in named_state(self._model, self._optimizers):
            if isinstance(value, Tensor):
                names.append(name)
                tensors.append(value)
            else:
                plain.append((name, value))
        plan = self._fitting_plan(names, tensors)
        total = torch.zeros((), dtype=torch.int64, device=plan.main)
        rest = torch.zeros_like(plan.stage_keys)
        for device, stage in plan.stages.items():
            weights, keys = plan.weights[device], plan.keys[device]
            if keys.numel():
                counted = zip(tensors, plan.full, strict=True)
                rows = (_rows(tensor, count) for tensor, count in counted if count and tensor.device == device)
                sums = self._row_sums(rows, weights)
                total += _carried(_scattered(sums + keys).sum(), plan.main)
            for parts, slots in stage.groups:
                torch._foreach_copy_(slots, [_last(tensors[k], n) if n else tensors[k] for k, n in parts])
            rest += _carried(self._row_sums([stage.words], weights), plan.main)
        total += _scattered(rest + plan.stage_keys).sum()
        return _scattered(total + _signed(plan.fingerprint + _hash(json.dumps(plain))))

    def _row_sums(self, rows: Iterable[Tensor], weights: Tensor) -> Tensor:
        """The weighted sum of each row of some matrices, int32 [rows, ROW_WORDS], one after another: int64 [rows]."""
        if weights.device.type != "cpu":
            return _sums_of_large_blocks(rows, weights)
        if self._scratch.numel() == 0:
            self._scratch = torch.empty(CPU_BLOCK_ROWS, ROW_WORDS, dtype=torch.int64)
        return _sums_in_cache(rows, weights, self._scratch)

    def _fitting_plan(self, names: list[str], tensors: list[Tensor]) -> _Plan:
        """The plan of last time, if it fits; optimizers make their state in their first step."""
        layout = [(name, t.dtype, t.shape, t.device) for name, t in zip(names, tensors, strict=True)]
        if self._plan is None or self._plan.layout != layout:
            self._plan = None  # give its buffers back first
            self._plan = _make_plan(layout)
        return self._plan


def as_hex(value: int) -> str:
    """A checksum, signed or not, as 16 hexadecimal digits."""
    return f"{value % 2**64:016x}"


def _make_plan(layout: list[tuple[Any, ...]]) -> _Plan:
    """Gives every word of the state its place: whole rows tensor by tensor, then what is left of all of them."""
    devices = list(dict.fromkeys(device for *_, device in layout)) or [torch.device("cpu")]
    main = next((device for device in devices if device.type != "cpu"), devices[0])
    full, places, end = [], [], 0
    for _, dtype, shape, _ in layout:
        size = shape.numel() * dtype.itemsize
        full.append(size // ROW_BYTES)
        places.append((end, size % ROW_BYTES))
        end += -(-(size % ROW_BYTES) // SLOT_BYTES) * SLOT_BYTES
    num_rest = max(1, -(-end // ROW_BYTES))
    keys = _random_words(ROW_WORDS, sum(full) + num_rest)
    keys_of = dict(zip(range(len(full)), keys[num_rest:].split(full), strict=True))
    described = [(name, str(dtype), list(shape)) for name, dtype, shape, _ in layout]
    weights = _random_words(0, ROW_WORDS)
    return _Plan(
        layout=layout,
        fingerprint=_hash(json.dumps(described)),
        full=tuple(full),
        keys={
            device: torch.cat([keys[:0], *(keys_of[k] for k, row in enumerate(layout) if row[3] == device)]).to(device)
            for device in devices
        },
        stages={device: _make_stage(layout, full, places, num_rest, device) for device in devices},
        stage_keys=keys[:num_rest].to(main),
        weights={device: weights.to(device) for device in devices},
        main=main,
    )


def _make_stage(
    layout: list[tuple[Any, ...]],
    full: list[int],
    places: list[tuple[int, int]],
    num_rows: int,
    device: torch.device,
) -> _Stage:
    """The buffer of a device, with a slot for what is left of each of its tensors."""
    buffer = torch.zeros(num_rows * ROW_BYTES, dtype=torch.uint8, device=device)
    groups: dict[torch.dtype, tuple[list[tuple[int, int]], list[Tensor]]] = {}
    for number, ((_, dtype, shape, place), (start, size)) in enumerate(zip(layout, places, strict=True)):
        if place == device and size:
            parts, slots = groups.setdefault(dtype, ([], []))
            slot = buffer[start : start + size].view(dtype)
            parts.append((number, slot.numel() if full[number] else 0))
            slots.append(slot if full[number] else slot.view(shape))
    return _Stage(buffer.view(torch.int32).view(num_rows, ROW_WORDS), tuple(groups.values()))


def _flat(tensor: Tensor) -> Tensor:
    """The elements in their logical order, in a row; a copy only where they lie otherwise."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.view(-1)
    return flattened(tensor.resolve_conj().resolve_neg())


def _last(tensor: Tensor, count: int) -> Tensor:
    """The last elements, [count], without the rest of a copy."""
    flat = _flat(tensor)
    last = flat[flat.numel() - count :]
    return last if flat.data_ptr() == tensor.data_ptr() else last.clone()


def _rows(tensor: Tensor, count: int) -> Tensor:
    """The first rows of a tensor's words, as int32 [count, ROW_WORDS]."""
    head = _flat(tensor)[: count * ROW_BYTES // tensor.element_size()]
    if head.storage_offset() * head.element_size() % 4:
        head = head.clone()  # words of 32 bits begin at multiples of 4 bytes
    return head.view(torch.int32).view(count, ROW_WORDS)


def _sums_of_large_blocks(rows: Iterable[Tensor], weights: Tensor) -> Tensor:
    """Row sums in few and large operations, for accelerators; the conversion to 64 bits is a part of the product."""
    sums = []
    for block in _blocks(rows, BLOCK_ROWS):
        words = block[0] if len(block) == 1 else torch.cat(block)
        sums.append((words * weights).sum(1))
    return torch.cat(sums)


def _sums_in_cache(rows: Iterable[Tensor], weights: Tensor, products: Tensor) -> Tensor:
    """Row sums by way of a small buffer that is used again and again, int64 [some rows, ROW_WORDS]."""
    sums = []
    for block in _blocks(rows, products.shape[0]):
        counts = [words.shape[0] for words in block]
        part = products[: sum(counts)]
        for target, words in zip(part.split(counts), block, strict=True):
            target.copy_(words)
        sums.append(part.mul_(weights).sum(1))
    return torch.cat(sums)


def _blocks(rows: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """The rows of some matrices in blocks of at most `limit` rows."""
    block: list[Tensor] = []
    room = limit
    for matrix in rows:
        start, count = 0, matrix.shape[0]
        while start < count:
            size = min(room, count - start)
            block.append(matrix[start : start + size])
            start += size
            room -= size
            if room == 0:
                yield block
                block, room = [], limit
    if block:
        yield block


def _random_words(start: int, count: int) -> Tensor:
    """Some numbers of SplitMix64 from seed 0: the first `ROW_WORDS` are the weights, the others keys of rows.

    No two of the weights agree modulo 2^32, and none is 0 there: with this seed that is so, and a test looks.
    """
    return _scattered(torch.arange(start + 1, start + count + 1) * _signed(_GOLDEN))


def _scattered(words: Tensor) -> Tensor:
    """The finalizer of SplitMix64, a bijection of 64-bit words: int64 of any shape."""
    words = (words ^ ((words >> 30) & 0x3FFFFFFFF)) * _signed(_FIRST)  # >> copies the sign, & removes the copies
    words = (words ^ ((words >> 27) & 0x1FFFFFFFFF)) * _signed(_SECOND)
    return words ^ ((words >> 31) & 0x1FFFFFFFF)


def _carried(value: Tensor, device: torch.device) -> Tensor:
    """Moves a small tensor to a device without waiting for it."""
    if value.device == device:
        return value
    if device.type == "cuda":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def _signed(value: int) -> int:
    """The 64-bit word as a tensor of int64 holds it."""
    return (value + 2**63) % 2**64 - 2**63


def _hash(text: str) -> int:
    """64 bits of BLAKE2b over a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
