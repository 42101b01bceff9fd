"""Evaluation: metrics over each sample once, as sums and counts in a fixed order."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samestep.comm.reduction import tree_sum_rows
from samestep.data.batch import Batch, leaves, map_tensors
from samestep.data.loader import Loader
from samestep.data.randomness import Generators
from samestep.devices.transfer import to_host
from samestep.engine.losses import wide_dtype
from samestep.engine.parameters import settle_model
from samestep.engine.precision import autocast, check_precision
from samestep.errors import UsageError
from samestep.plan.seeds import derive_seed
from samestep.train.metrics import as_metric, sums

if TYPE_CHECKING:
    from samestep.train.run import Run

EVALUATION_STREAM = 2**33  # apart from the streams of train steps and of samples

Forward = Callable[[nn.Module, Any], Any]


def evaluate(
    run: "Run",
    model: nn.Module,
    loader: Loader,
    metrics: Mapping[str, Any],
    *,
    forward: Forward | None = None,
    precision: str = "32-true",
) -> dict[str, float]:
    """Measures a model on every sample of a loader, once, in evaluation mode and without gradients. Tier `bitwise`.

    Args:
        run: whose ranks share the work.
        model: measured; its training mode is put back.
        loader: a loader of the run; its whole next epoch is used.
        metrics: name to `Metric`, or to a function `(output, batch) -> Tensor | Mean`.
        forward: `forward(model, batch)` gives the output; by default the model on the batch's first entry.
        precision: as in `train_step`.

    Returns:
        Name to value: the sum over all samples over the count of all samples, on every rank.

    Raises:
        UsageError: there is no metric, or a metric returned something of the wrong shape.
    """
    named = {name: as_metric(metric) for name, metric in metrics.items()}
    if not named:
        raise UsageError("evaluate needs at least one metric, for example {'accuracy': samestep.metrics.accuracy}")
    rows: list[Tensor] = []
    num_rows = 0
    mine = run.ranges[run.rank]
    wide = wide_dtype(run.device)
    with evaluating(run, model, precision):
        for batch, outputs in _outputs(run, model, loader, forward):
            block = torch.zeros(len(mine), 2 * len(named), dtype=wide, device=run.device)
            for shard, output in outputs:
                measured = [part for m in named.values() for part in sums(m, output, batch.shards[shard])]
                block[shard - mine.start] = torch.stack(measured)
            rows.append(block)
            num_rows += 1
    by_shard = _by_shard(run, rows)
    totals = tree_sum_rows(by_shard).tolist() if num_rows else [0.0] * (2 * len(named))
    return {
        name: metric.finish(totals[2 * k] / totals[2 * k + 1]) if totals[2 * k + 1] else float("nan")
        for k, (name, metric) in enumerate(named.items())
    }


def predict(
    run: "Run", model: nn.Module, loader: Loader, *, forward: Forward | None = None, precision: str = "32-true"
) -> Any:
    """The model's outputs for every sample of a loader, in its order, on every rank. Tier `bitwise`.

    Args:
        run: whose ranks share the work.
        model: run in evaluation mode and without gradients; its training mode is put back.
        loader: a loader of the run; its whole next epoch is used.
        forward: `forward(model, batch)` gives the output; by default the model on the batch's first entry.
        precision: as in `train_step`.

    Returns:
        The structure of one output, its tensors joined along dim 0, in host memory.

    Raises:
        UsageError: an output has no sample dimension, or there is none at all.
    """
    pieces: list[tuple[int, Any]] = []
    structure: Any = None
    with evaluating(run, model, precision):
        for number, (batch, outputs) in enumerate(_outputs(run, model, loader, forward)):
            for shard, output in outputs:
                pieces.append((number * run.contract.num_shards + shard, to_host(output)))
            del batch
    if pieces:
        structure = pieces[0][1]
    columns = _gather_columns(run, [(key, leaves(value)) for key, value in pieces])
    if structure is None:
        return columns if len(columns) != 1 else columns[0]
    remaining = iter(columns)
    return map_tensors(lambda _: next(remaining), structure)


@contextmanager
def evaluating(run: "Run", model: nn.Module, precision: str) -> Iterator[None]:
    """Evaluation mode, no gradients, autocast; the modes of all modules are put back."""
    dtype = check_precision(precision)
    settle_model(model, run.device)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), autocast(run.device, dtype):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _outputs(
    run: "Run", model: nn.Module, loader: Loader, forward: Forward | None
) -> Iterator[tuple[Batch, list[tuple[int, Any]]]]:
    """Each batch with the outputs of this rank's shards, drawn from generators seeded a shard."""
    compute = _first_entry if forward is None else forward
    generators = Generators(run.device)
    for number, batch in enumerate(loader):
        outputs = []
        with generators.preserved():
            for shard, value in batch.shards.items():
                generators.seed(derive_seed(run.contract.seed, EVALUATION_STREAM, number, shard))
                outputs.append((shard, compute(model, value)))
        yield batch, outputs


def _first_entry(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, tuple | list):
        return model(batch[0])
    if isinstance(batch, Tensor):
        return model(batch)
    raise UsageError(
        f"a batch is a {type(batch).__name__}; say how to run the model on it: forward=lambda model, batch: …"
    )


def _by_shard(run: "Run", blocks: list[Tensor]) -> Tensor:
    """All ranks' rows in the order of batch and shard: [batches · V, k]."""
    if not blocks:
        return torch.zeros(0, 0, device=run.device)
    sizes = [len(shards) for shards in run.ranges]
    width = blocks[0].shape[1]
    ours = torch.stack(blocks)  # [batches, V of this rank, k]
    everyone = run.communicator.gather_rows(ours.reshape(-1, width), [len(blocks) * size for size in sizes])
    parts = everyone.split([len(blocks) * size for size in sizes])
    return torch.cat([part.view(len(blocks), -1, width) for part in parts], dim=1).reshape(-1, width)


def _gather_columns(run: "Run", pieces: list[tuple[int, list[Any]]]) -> list[Tensor]:
    """Joins each output tensor over all shards of all batches, on the host of every rank."""
    communicator = run.communicator
    num_columns = max(row[0] for row in communicator.gather_words([max((len(v) for _, v in pieces), default=0)]))
    if num_columns == 0:
        raise UsageError("the model returned no tensor to predict with")
    keys = _exchange(run, torch.tensor([key for key, _ in pieces], dtype=torch.int64))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    columns = []
    for column in range(num_columns):
        tensors = [values[column] for _, values in pieces]
        if any(not isinstance(tensor, Tensor) or tensor.ndim == 0 for tensor in tensors):
            raise UsageError("predict needs outputs with the samples along dim 0; reduce nothing in the forward")
        sizes = _exchange(run, torch.tensor([len(tensor) for tensor in tensors], dtype=torch.int64)).tolist()
        parts = _exchange_tensors(run, tensors).split(sizes)
        columns.append(torch.cat([parts[index] for index in order]))
    return columns


def _exchange(run: "Run", numbers: Tensor) -> Tensor:
    counts = [row[0] for row in run.communicator.gather_words([numbers.numel()])]
    return run.communicator.gather_rows(numbers.view(-1, 1), counts).view(-1)


def _exchange_tensors(run: "Run", tensors: list[Tensor]) -> Tensor:
    """Joins tensors that agree in all but dim 0 over the ranks, as bytes: a rank without one learns the form here."""
    communicator = run.communicator
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    dtypes += [torch.int8, torch.uint8, torch.bool, torch.complex64]
    form = [0] * 10
    if tensors:
        if tensors[0].ndim > 8:
            raise UsageError(f"predict gathers outputs of at most 8 dimensions, got {tensors[0].ndim}")
        form = [1 + dtypes.index(tensors[0].dtype), tensors[0].ndim, *tensors[0].shape[1:]]
        form += [0] * (10 - len(form))
    known = next(row for row in communicator.gather_words(form) if row[0])
    dtype, shape = dtypes[known[0] - 1], known[2 : 1 + known[1]]
    width = max(1, dtype.itemsize * int(torch.Size(shape).numel()))
    ours = torch.cat(tensors) if tensors else torch.empty(0, *shape, dtype=dtype)
    raw = ours.contiguous().view(-1).view(torch.uint8).view(-1, width)
    counts = [row[0] for row in communicator.gather_words([len(raw)])]
    gathered = communicator.gather_rows(raw, counts)
    return gathered.reshape(-1).clone().view(dtype).view(-1, *shape)
