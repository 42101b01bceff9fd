"""Evaluation: metrics over each sample once, as sums and counts in a fixed order; and prediction."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.comm.reduction import tree_sum_rows
from samestep.core.microbatches import in_microbatch_order, microbatch_bounds
from samestep.core.seeds import derive_seed
from samestep.data.batch import version_of
from samestep.data.loader import Loader
from samestep.data.nested import leaves, map_tensors
from samestep.data.randomness import Generators
from samestep.engine.losses import describe, wide_dtype
from samestep.engine.parameters import settle_model
from samestep.engine.precision import autocast, check_precision
from samestep.errors import DeterminismError, UsageError
from samestep.metrics import Metric, as_metric, result, sums

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
    """The metrics of a model over every sample of a loader; see `samestep.Run.evaluate`."""
    named = {name: as_metric(metric) for name, metric in metrics.items()}
    if not named:
        raise UsageError("evaluate needs at least one metric, for example {'accuracy': samestep.metrics.accuracy}")
    return _carry_out(membership, loader, lambda: _evaluate(membership, model, loader, named, forward, precision))


def _evaluate(
    membership: Membership,
    model: nn.Module,
    loader: Loader,
    named: Mapping[str, Metric],
    forward: Forward | None,
    precision: str,
) -> dict[str, float]:
    """`evaluate` by the current ranks."""
    communicator = membership.communicator
    mine = membership.mine
    empty = torch.zeros(len(mine), 2 * len(named), dtype=wide_dtype(communicator.device), device=communicator.device)
    rows: list[Tensor] = []  # of each batch: [microbatches of this rank, total and count of each metric]

    def measure(number: int, microbatch: int, num_samples: int, value: Any, output: Any) -> None:
        while len(rows) <= number:
            rows.append(empty.clone())
        measured = [sums(m, output, value, name=name, num_samples=num_samples) for name, m in named.items()]
        rows[number][mine.index(microbatch)] = torch.stack([part for pair in measured for part in pair])

    num_batches = _forward_all(membership, model, loader, forward, precision, measure)
    rows += [empty.clone() for _ in range(num_batches - len(rows))]
    membership.heartbeat.enter("exchange")
    totals = [0.0] * (2 * len(named))
    if rows:
        # All ranks' rows in the order of batch and microbatch, [batches · V, k]: the order of the sum must not depend
        # on the ranks.
        sizes = [num_batches * len(microbatches) for microbatches in membership.ranges]
        width = 2 * len(named)
        by_rank = communicator.gather_rows(torch.stack(rows).reshape(-1, width), sizes).split(sizes)
        by_batch = torch.cat([part.view(num_batches, -1, width) for part in by_rank], dim=1)
        order = in_microbatch_order(membership.ranges)
        in_order = by_batch if order is None else by_batch[:, order]
        totals = tree_sum_rows(in_order.reshape(-1, width)).tolist()
    return {name: result(metric, totals[2 * k], totals[2 * k + 1]) for k, (name, metric) in enumerate(named.items())}


def predict(
    membership: Membership,
    model: nn.Module,
    loader: Loader,
    *,
    forward: Forward | None = None,
    precision: str = "32-true",
) -> Any:
    """The model's outputs for every sample of a loader; see `samestep.Run.predict`."""
    return _carry_out(membership, loader, lambda: _predict(membership, model, loader, forward, precision))


def _predict(membership: Membership, model: nn.Module, loader: Loader, forward: Forward | None, precision: str) -> Any:
    """`predict` by the current ranks."""
    outputs: dict[int, list[Tensor]] = {}  # the tensors in each microbatch's output, by its place in the data
    structures: list[Any] = []

    def keep(number: int, microbatch: int, num_samples: int, value: Any, output: Any) -> None:
        for leaf in leaves(output):
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != num_samples:
                raise UsageError(
                    f"predict needs outputs with the samples along dim 0, got {describe(leaf)} for {num_samples} "
                    "samples; say what to keep with forward=lambda model, batch: …"
                )
        # Copies: an output may be a view of a whole batch, or of a buffer that the next microbatch overwrites.
        copies = [leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for leaf in leaves(output)]
        outputs[number * membership.num_microbatches + microbatch] = copies
        if not structures:  # one is enough: all are alike
            structures.append(map_tensors(lambda _: torch.empty(0), output))

    _forward_all(membership, model, loader, forward, precision, keep)
    membership.heartbeat.enter("exchange")
    of_all = _gather(membership.communicator, ([_skeleton(each) for each in structures], outputs))
    structure = next((each for each in (structures, *(found for found, _ in of_all)) if each), [None])[0]
    in_order = [tensors for _, tensors in sorted(pair for _, found in of_all for pair in found.items())]
    columns = iter([torch.cat(column) for column in zip(*in_order, strict=True)])
    if not in_order or not in_order[0]:
        raise UsageError("the model returned no tensor to predict with")
    return map_tensors(lambda _: next(columns), structure)


def _gather(communicator: Communicator, value: Any) -> list[Any]:
    """A value of each rank, tensors in dicts, lists and tuples, on every rank."""
    buffer = BytesIO()
    torch.save(value, buffer)
    data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    sizes = [row[0] for row in communicator.gather_words([len(data)])]
    parts = communicator.gather_rows(data.view(-1, 1), sizes).view(-1).split(sizes)
    return [torch.load(BytesIO(part.numpy().tobytes()), weights_only=True) for part in parts]


def _carry_out(membership: Membership, loader: Loader, attempt: Callable[[], T]) -> T:
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
    """Raises a `DeterminismError` unless all ranks have as many samples: each computes its part from that number."""
    before = membership.heartbeat.enter("exchange")  # a rank that waits for another does not hang
    counts = [row[0] for row in membership.communicator.gather_words([loader.num_samples or 0])]
    membership.heartbeat.enter(before)
    if len(set(counts)) > 1:
        raise DeterminismError(
            f"the ranks have datasets of {counts} samples to evaluate on or to predict for; needed: the same dataset "
            "on every rank"
        )


@contextmanager
def _evaluating(model: nn.Module, device: torch.device, precision: str) -> Iterator[Callable[[], None]]:
    """Evaluation mode, no gradients, autocast; modes and buffers of all modules are restored.

    Yields a function that restores the buffers at once: what one microbatch writes to them must not reach the next one,
    which another rank may run.
    """
    dtype = check_precision(precision)
    settle_model(model, device)
    modes = [(module, module.training) for module in model.modules()]
    places = [(module, key, buffer) for module in model.modules() for key, buffer in module._buffers.items()]
    kept = [(m, k, b, None if b is None else b.clone(), 0 if b is None else version_of(b)) for m, k, b in places]

    def restore_buffers() -> None:
        for module, key, buffer, start, version in kept:
            module._buffers[key] = buffer
            # Neither batch normalisation in training mode nor writes to `.data` move the version: small buffers are
            # restored in any case.
            if buffer is not None and start is not None:
                small = buffer.numel() <= SMALL_ELEMENTS
                if small or version_of(buffer) != version or module.training:
                    buffer.data.copy_(start)

    model.eval()
    try:
        with torch.no_grad(), autocast(device, dtype):
            yield restore_buffers
    finally:
        restore_buffers()
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
    with _evaluating(model, device, precision) as restore_buffers:
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
                    restore_buffers()
                    rounds -= 1
                if rounds > 0:  # the others need this rank's shard of the model once more
                    compute(model, value)
                    restore_buffers()
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


def _skeleton(value: Any) -> Any:
    """The structure of nested mappings, lists and tuples as plain dicts, lists and tuples, with empty tensors."""
    if isinstance(value, Mapping):
        return {key: _skeleton(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(map(_skeleton, value))
    return torch.empty(0)
