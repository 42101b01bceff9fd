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
any layout in memory. A row's sum is linear in its words: where the ranks have different parts of the state, each sums
its own words, these sums are exchanged, 8 bytes for 16 KiB of state, and added. A word is read and multiplied once;
what is between stays in the cache of a CPU, and on an accelerator in blocks that are large enough to hide the start of
a kernel.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.pieces import Piece
from samestep.engine.step import TrainStep
from samestep.train.digest import named_state
from samestep.train.rowsums import (
    ROW_BYTES,
    ROW_WORDS,
    RowSums,
    carried,
    flat,
    last,
    main_device,
    places_of,
    random_words,
    rows_of,
    scattered,
    signed,
)
from samestep.train.spreadsum import SpreadSum


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
        model: its parameters and all its buffers count; or a training step, whose state it is. Only a step knows what
            of it is spread over the ranks: all of them compute it together then.
        optimizers: state is named after the parameter that it belongs to; settings such as learning rates do not count.
            None for a step's own.
    """

    def __init__(self, model: nn.Module | TrainStep, optimizers: Sequence[Optimizer] = ()) -> None:
        self._step = model if isinstance(model, TrainStep) else None
        self._model = model.model if isinstance(model, TrainStep) else model
        self._optimizers = model.optimizers if isinstance(model, TrainStep) else tuple(optimizers)
        sums = RowSums()
        self._whole, self._pieces, self._spread_sum = _LocalSum(sums), _LocalSum(sums), SpreadSum(sums)

    @torch.no_grad()
    def compute(self) -> Tensor:
        """The checksum of the state as it is now.

        Returns:
            A 0-d int64 tensor on the device; nobody waits for it until it is read. See `as_hex`.
        """
        names, tensors, pieces, plain = self._state()
        if not pieces:
            return self._whole.of(names, tensors, plain)
        assert self._step is not None, "only a step has state that is spread"
        over = self._step.spread_over
        pieces = {number: piece.in_order(over) for number, piece in pieces.items()}
        tensors = [pieces[k].local if k in pieces else tensor for k, tensor in enumerate(tensors)]
        forms = [(names[k], t.dtype, pieces[k].shape if k in pieces else t.shape) for k, t in enumerate(tensors)]
        total = self._spread_sum.of(tensors, pieces, over)
        return scattered(total + signed(_fingerprint(forms) + _hash(json.dumps(plain))))

    @torch.no_grad()
    def compute_held(self) -> list[Tensor]:
        """Checksums of what this rank holds, by itself: of what each rank has whole, and of its pieces of the rest.

        Returns:
            0-d int64 tensors; the second only where a step has spread its state over the ranks.
        """
        names, tensors, pieces, plain = self._state()
        whole = [number for number in range(len(names)) if number not in pieces]
        held = [self._whole.of([names[k] for k in whole], [tensors[k] for k in whole], plain)]
        if self._step is not None and self._step.spread is not None:
            held.append(self._pieces.of([names[k] for k in pieces], [tensors[k] for k in pieces], []))
        return held

    def _state(self) -> tuple[list[str], list[Tensor], dict[int, Piece], list[tuple[str, Any]]]:
        """Names and tensors, of pieces what this rank has; the pieces by number; and the plain values."""
        step = self._step
        names: list[str] = []
        tensors: list[Tensor] = []
        pieces: dict[int, Piece] = {}
        plain: list[tuple[str, Any]] = []
        spread, world_size = (None, 1) if step is None else (step.spread, step.spread_over.world_size)
        for name, value in named_state(self._model, self._optimizers, spread, world_size):
            if isinstance(value, Piece):
                pieces[len(names)] = value
            if isinstance(value, Tensor | Piece):
                names.append(name)
                tensors.append(value.local if isinstance(value, Piece) else value)
            else:
                plain.append((name, value))
        return names, tensors, pieces, plain


class _LocalSum:
    """The checksum of tensors and plain values that are all here, again and again for the same names and shapes.

    Args:
        sums: of rows.
    """

    def __init__(self, sums: RowSums) -> None:
        self._sums = sums
        self._plan: _Plan | None = None

    def of(self, names: list[str], tensors: list[Tensor], plain: list[tuple[str, Any]]) -> Tensor:
        """A 0-d int64 tensor."""
        plan = self._fitting_plan(names, tensors)
        total = torch.zeros((), dtype=torch.int64, device=plan.main)
        rest = torch.zeros_like(plan.stage_keys)
        for device, stage in plan.stages.items():
            weights, keys = plan.weights[device], plan.keys[device]
            if keys.numel():
                counted = zip(tensors, plan.full, strict=True)
                rows = (_first_rows(tensor, count) for tensor, count in counted if count and tensor.device == device)
                sums = self._sums.of(rows, weights)
                total += carried(scattered(sums + keys).sum(), plan.main)
            for parts, slots in stage.groups:
                torch._foreach_copy_(slots, [last(tensors[k], n) if n else tensors[k] for k, n in parts])
            rest += carried(self._sums.of([stage.words], weights), plan.main)
        total += scattered(rest + plan.stage_keys).sum()
        return scattered(total + signed(plan.fingerprint + _hash(json.dumps(plain))))

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
    devices, main = main_device(device for *_, device in layout)
    full, places, num_rest = places_of(shape.numel() * dtype.itemsize for _, dtype, shape, _ in layout)
    keys = random_words(ROW_WORDS, sum(full) + num_rest)
    keys_of = dict(zip(range(len(full)), keys[num_rest:].split(full), strict=True))
    weights = random_words(0, ROW_WORDS)
    return _Plan(
        layout=layout,
        fingerprint=_fingerprint([form[:3] for form in layout]),
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


def _first_rows(tensor: Tensor, count: int) -> Tensor:
    """The first rows of a tensor's words, as int32 [count, ROW_WORDS]."""
    return rows_of(flat(tensor)[: count * ROW_BYTES // tensor.element_size()])


def _fingerprint(forms: Sequence[tuple[Any, ...]]) -> int:
    """64 bits over names, dtypes and shapes."""
    return _hash(json.dumps([(name, str(dtype), list(shape)) for name, dtype, shape in forms]))


def _hash(text: str) -> int:
    """64 bits of BLAKE2b over a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
