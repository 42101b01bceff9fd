"""Evaluation: metrics over each sample once, as sums and counts in a fixed order."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from samestep.comm.communicator import DTYPES, Communicator
from samestep.comm.membership import Membership
from samestep.comm.reduction import tree_sum_rows
from samestep.core.microbatches import in_microbatch_order, microbatch_bounds
from samestep.core.seeds import derive_seed
from samestep.data.loader import Loader
from samestep.data.nested import leaves, map_tensors
from samestep.data.randomness import Generators
from samestep.data.transfer import to_host
from samestep.engine.losses import describe, wide_dtype
from samestep.engine.parameters import settle_model
from samestep.engine.precision import autocast, check_precision
from samestep.errors import DeterminismError, UsageError
from samestep.train.metrics import Metric, as_metric, sums

SMALL_ELEMENTS = 2**16
EVALUATION_STREAM = 2**33  # apart from the streams of train steps and of samples

T = TypeVar("T")
Forward = Callable[[nn.Module, Any], Any]
Take = Callable[[int, int, int, Any, Any], None]


def evaluate(
    membership: Membership,
    model: nn.Module,
    loader: Loader,
    metrics: Mapping[str, Any],
    *,
    forward: Forward | None = None,
    precision: str = "32-true",
) -> dict[str, float]:
    """Measures a model on every sample of a loader, once, in evaluation mode and without gradients. Tier `bitwise`.

    Random generators are seeded for each microbatch, for the forward and the metrics, and restored afterwards.
    """
    named = {name: as_metric(metric) for name, metric in metrics.items()}
    if not named:
        raise UsageError("evaluate needs at least one metric, for example {'accuracy': samestep.metrics.accuracy}")
    return carry_out(membership, loader, lambda: _evaluate(membership, model, loader, named, forward, precision))


def _evaluate(
    membership: Membership,
    model: nn.Module,
    loader: Loader,
    named: Mapping[str, Metric],
    forward: Forward | None,
    precision: str,
) -> dict[str, float]:
    """`evaluate` by the ranks as they are now."""
    communicator = membership.communicator
    rows: list[Tensor] = []
    mine = membership.mine
    empty = torch.zeros(len(mine), 2 * len(named), dtype=wide_dtype(communicator.device), device=communicator.device)

    def measure(number: int, microbatch: int, num_samples: int, value: Any, output: Any) -> None:
        while len(rows) <= number:
            rows.append(empty.clone())
        measured = [sums(m, output, value, name=name, num_samples=num_samples) for name, m in named.items()]
        rows[number][mine.index(microbatch)] = torch.stack([part for pair in measured for part in pair])

    num_batches = _forward_all(membership, model, loader, forward, precision, measure)
    rows += [empty.clone() for _ in range(num_batches - len(rows))]
    membership.heartbeat.enter("exchange")
    by_microbatch = _by_microbatch(communicator, membership.ranges, rows)
    totals = tree_sum_rows(by_microbatch).tolist() if rows else [0.0] * (2 * len(named))
    return {
        name: metric.finish(totals[2 * k] / totals[2 * k + 1]) if totals[2 * k + 1] else float("nan")
        for k, (name, metric) in enumerate(named.items())
    }


def predict(
    membership: Membership,
    model: nn.Module,
    loader: Loader,
    *,
    forward: Forward | None = None,
    precision: str = "32-true",
) -> Any:
    """The model's outputs for every sample of a loader, in its order, on every rank. Tier `bitwise`."""
    return carry_out(membership, loader, lambda: _predict(membership, model, loader, forward, precision))


def _predict(membership: Membership, model: nn.Module, loader: Loader, forward: Forward | None, precision: str) -> Any:
    """`predict` by the ranks as they are now."""
    communicator = membership.communicator
    pieces: list[tuple[int, Any]] = []

    def keep(number: int, microbatch: int, num_samples: int, value: Any, output: Any) -> None:
        for leaf in leaves(output):
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != num_samples:
                raise UsageError(
                    f"predict needs outputs with the samples along dim 0, got {describe(leaf)} for {num_samples} "
                    "samples; say what to keep with forward=lambda model, batch: …"
                )
        pieces.append((number * membership.num_microbatches + microbatch, to_host(output)))

    _forward_all(membership, model, loader, forward, precision, keep)
    membership.heartbeat.enter("exchange")
    columns = iter(_gather_columns(communicator, [(key, leaves(value)) for key, value in pieces]))
    form = json.dumps(_form(pieces[0][1])) if communicator.rank == 0 and pieces else ""
    sent = _exchange(communicator, torch.tensor(list(form.encode()), dtype=torch.int64))
    structure = pieces[0][1] if pieces else _structure(json.loads(bytes(sent.tolist())))
    return map_tensors(lambda _: next(columns), structure)


def carry_out(membership: Membership, loader: Loader, attempt: Callable[[], T]) -> T:
    """Runs an operation on the loader's next epoch, again from its start if a rank is lost meanwhile."""
    start = loader.bookmark()

    def once() -> T:
        if membership.version != version:
            loader.go_back(start)
        _check_same_length(membership, loader)
        return attempt()

    version = membership.version
    before = membership.heartbeat.enter("evaluate")
    try:
        return membership.perform(once)
    finally:
        membership.heartbeat.enter(before)


def _check_same_length(membership: Membership, loader: Loader) -> None:
    """Raises a `DeterminismError` unless all ranks have as many samples: by that each takes its part of them."""
    before = membership.heartbeat.enter("exchange")  # a rank that waits for another does not hang
    counts = [row[0] for row in membership.communicator.gather_words([loader.num_samples or 0])]
    membership.heartbeat.enter(before)
    if len(set(counts)) > 1:
        raise DeterminismError(
            f"the ranks were handed datasets of {counts} samples to evaluate on or to predict for; needed: the same "
            "dataset on every rank"
        )


@contextmanager
def evaluating(model: nn.Module, device: torch.device, precision: str) -> Iterator[Callable[[], None]]:
    """Evaluation mode, no gradients, autocast; the modes of all modules and their buffers are put back.

    Gives a function that puts the buffers back at once: what one microbatch leaves in them must not reach the next one,
    of which another rank knows nothing.
    """
    dtype = check_precision(precision)
    settle_model(model, device)
    modes = [(module, module.training) for module in model.modules()]
    places = [(module, key, buffer) for module in model.modules() for key, buffer in module._buffers.items()]
    kept = [(m, k, b, None if b is None else b.clone(), 0 if b is None else b._version) for m, k, b in places]

    def put_back() -> None:
        for module, key, buffer, start, version in kept:
            module._buffers[key] = buffer
            # Neither batch normalisation in training mode nor writes to `.data` move the version: small ones are
            # put back in any case.
            if buffer is not None and start is not None:
                small = buffer.numel() <= SMALL_ELEMENTS
                if small or buffer._version != version or module.training:
                    buffer.data.copy_(start)

    model.eval()
    try:
        with torch.no_grad(), autocast(device, dtype):
            yield put_back
    finally:
        put_back()
        for module, mode in modes:
            module.training = mode


def _forward_all(
    membership: Membership, model: nn.Module, loader: Loader, forward: Forward | None, precision: str, take: Take
) -> int:
    """Runs this rank's microbatches of every batch; calls `take(number, microbatch, num_samples, value, output)`."""
    compute = _first_entry if forward is None else forward
    device = membership.communicator.device
    generators = Generators(device)
    num_batches = 0
    with evaluating(model, device, precision) as put_back:
        for number, batch in enumerate(loader):
            membership.heartbeat.enter("evaluate")
            bounds = microbatch_bounds(batch.length, membership.num_microbatches)
            rounds = membership.num_rounds(batch.length)
            with generators.preserved():
                for microbatch, value in batch.microbatches.items():
                    generators.seed(derive_seed(loader.seed, EVALUATION_STREAM, number, microbatch))
                    output = compute(model, value)
                    if microbatch in membership.mine:
                        take(number, microbatch, bounds[microbatch + 1] - bounds[microbatch], value, output)
                    put_back()
                    rounds -= 1
                if rounds > 0:  # the others need this rank's part of the model once more
                    compute(model, value)
                    put_back()
            num_batches += 1
    return num_batches


def _first_entry(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, tuple | list):
        return model(batch[0])
    if isinstance(batch, Tensor):
        return model(batch)
    raise UsageError(
        f"a batch is a {type(batch).__name__}; say how to run the model on it: forward=lambda model, batch: …"
    )


def _form(value: Any) -> Any:
    """The structure of nested dicts, lists and tuples, as JSON; a tensor is null."""
    if isinstance(value, Mapping):
        return ["dict", [[key, _form(entry)] for key, entry in value.items()]]
    if isinstance(value, list | tuple):
        return ["tuple" if isinstance(value, tuple) else "list", [_form(entry) for entry in value]]
    return None


def _structure(form: Any) -> Any:
    """The structure of a `_form`, for a rank without a sample of its own; named tuples become plain ones."""
    if form is None:
        return torch.empty(0)
    kind, entries = form
    if kind == "dict":
        return {key: _structure(entry) for key, entry in entries}
    return (tuple if kind == "tuple" else list)(_structure(entry) for entry in entries)


def _by_microbatch(communicator: Communicator, ranges: Sequence[range], blocks: list[Tensor]) -> Tensor:
    """All ranks' rows in the order of batch and microbatch: [batches · V, k]."""
    if not blocks:
        return torch.zeros(0, 0, device=communicator.device)
    sizes = [len(microbatches) for microbatches in ranges]
    width = blocks[0].shape[1]
    ours = torch.stack(blocks)  # [batches, V of this rank, k]
    everyone = communicator.gather_rows(ours.reshape(-1, width), [len(blocks) * size for size in sizes])
    parts = everyone.split([len(blocks) * size for size in sizes])
    by_rank = torch.cat([part.view(len(blocks), -1, width) for part in parts], dim=1)
    order = in_microbatch_order(ranges)
    return (by_rank if order is None else by_rank[:, order]).reshape(-1, width)


def _gather_columns(communicator: Communicator, pieces: list[tuple[int, list[Any]]]) -> list[Tensor]:
    """Joins each output tensor over all microbatches of all batches, on the host of every rank."""
    num_columns = max(row[0] for row in communicator.gather_words([max((len(v) for _, v in pieces), default=0)]))
    if num_columns == 0:
        raise UsageError("the model returned no tensor to predict with")
    keys = _exchange(communicator, torch.tensor([key for key, _ in pieces], dtype=torch.int64))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    columns = []
    for column in range(num_columns):
        tensors = [values[column] for _, values in pieces]
        sizes = _exchange(communicator, torch.tensor([len(tensor) for tensor in tensors], dtype=torch.int64)).tolist()
        parts = _exchange_tensors(communicator, tensors).split(sizes)
        columns.append(torch.cat([parts[index] for index in order]))
    return columns


def _exchange(communicator: Communicator, numbers: Tensor) -> Tensor:
    counts = [row[0] for row in communicator.gather_words([numbers.numel()])]
    return communicator.gather_rows(numbers.view(-1, 1), counts).view(-1)


def _exchange_tensors(communicator: Communicator, tensors: list[Tensor]) -> Tensor:
    """Joins tensors that agree in all but dim 0 over the ranks, as bytes: a rank without one learns the form here."""
    form = [0] * 10
    if tensors:
        if tensors[0].ndim > 8 or tensors[0].dtype not in DTYPES:
            raise UsageError(f"predict cannot gather {describe(tensors[0])}; convert it in the forward")
        form = [1 + DTYPES.index(tensors[0].dtype), tensors[0].ndim, *tensors[0].shape[1:]]
        form += [0] * (10 - len(form))
    known = next(row for row in communicator.gather_words(form) if row[0])
    dtype, shape = DTYPES[known[0] - 1], known[2 : 1 + known[1]]
    width = max(1, dtype.itemsize * int(torch.Size(shape).numel()))
    ours = torch.cat(tensors) if tensors else torch.empty(0, *shape, dtype=dtype)
    raw = ours.contiguous().view(-1).view(torch.uint8).view(-1, width)
    counts = [row[0] for row in communicator.gather_words([len(raw)])]
    gathered = communicator.gather_rows(raw, counts)
    return gathered.reshape(-1).clone().view(dtype).view(-1, *shape)
