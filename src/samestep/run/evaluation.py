"""Evaluation: metrics over each sample once, as sums and counts in a fixed order; and prediction.

`_carry_out` makes it one operation of the membership, over a whole epoch of the loader. In it each rank runs its own
microbatches (`_forward_all`), and what they leave is brought together by batch and microbatch, never by rank: sums as
rows of a matrix that is added along the tree, states of metrics merged in the order of microbatches, outputs joined.
So a repetition on fewer ranks has the same bits. Nothing of a microbatch may reach the next one, which another rank may
run: buffers are restored and generators seeded before each.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from samestep.checks import check_type
from samestep.comm.membership import Membership
from samestep.comm.reduction import tree_sum_rows
from samestep.core.microbatches import in_microbatch_order
from samestep.core.seeds import derive_seed
from samestep.data.checksums import version_of
from samestep.data.loader import Loader
from samestep.data.nested import leaves, map_tensors
from samestep.data.randomness import Generators
from samestep.data.tensors import TensorData
from samestep.engine.forward_backward import compiling_alike, without_gradients
from samestep.engine.kernel_flags import enough_memory
from samestep.engine.losses import wide_dtype
from samestep.engine.parameters import move_model
from samestep.engine.precision import autocast, check_precision
from samestep.errors import DeterminismError, UsageError
from samestep.metrics import Metric, StateMetric, as_metric, result, sums
from samestep.text import describe

SMALL_ELEMENTS = 2**16
EVALUATION_STREAM = 2**33  # apart from the streams of train steps and of samples
NEEDS_LESS = 'more microbatches (num_microbatches), strategy="sharded", or a GPU that no other process uses'

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
    check_type("metrics", metrics, isinstance(metrics, Mapping), "metrics by name, such as {'accuracy': accuracy}")
    named = {name: as_metric(metric) for name, metric in metrics.items()}
    if not named:
        raise UsageError("evaluate needs at least one metric, for example {'accuracy': samestep.metrics.accuracy}")
    of_sums = {name: metric for name, metric in named.items() if isinstance(metric, Metric)}
    of_states = {name: metric for name, metric in named.items() if isinstance(metric, StateMetric)}
    values = _carry_out(
        membership, loader, lambda whole: _evaluate(membership, model, whole, of_sums, of_states, forward, precision)
    )
    # In the order in which they were asked for.
    return {key: value for name in named for key, value in values[name].items()}


def _evaluate(
    membership: Membership,
    model: nn.Module,
    loader: Loader,
    of_sums: Mapping[str, Metric],
    of_states: Mapping[str, StateMetric],
    forward: Forward | None,
    precision: str,
) -> dict[str, dict[str, float]]:
    """`evaluate` by the current ranks: the values of each metric."""
    communicator, mine = membership.communicator, membership.mine
    width = 2 * len(of_sums)
    empty = torch.zeros(len(mine), width, dtype=wide_dtype(communicator.device), device=communicator.device)
    # A row for each microbatch: sums of a rank's own would depend on which microbatches it has.
    rows: list[Tensor] = []  # of each batch: [microbatches of this rank, total and count of each metric]
    states: dict[int, dict[str, Any]] = {}  # of this batch, by microbatch
    for metric in of_states.values():
        metric.begin(communicator.device)

    def measure(number: int, microbatch: int, num_samples: int, value: Any, output: Any) -> None:
        while len(rows) <= number:
            rows.append(empty.clone())
        measured = [sums(m, output, value, name=name, num_samples=num_samples) for name, m in of_sums.items()]
        if measured:
            rows[number][mine.index(microbatch)] = torch.stack([part for pair in measured for part in pair])
        if of_states:
            states[microbatch] = {name: metric.states(output, value) for name, metric in of_states.items()}

    def end_batch() -> None:
        if not of_states:
            return
        gathered = [pair for found in communicator.gather_values(states) for pair in found.items()]
        for _, of_metrics in sorted(gathered, key=lambda pair: pair[0]):
            for name, metric in of_states.items():
                metric.push(of_metrics[name])
        states.clear()

    num_batches = _forward_all(membership, model, loader, forward, precision, measure, end_batch)
    rows += [empty.clone() for _ in range(num_batches - len(rows))]
    membership.heartbeat.enter("exchange")
    totals = [0.0] * width
    if rows and width:
        # All ranks' rows in the order of batch and microbatch, [batches · V, k]: the order of the sum must not depend
        # on the ranks.
        sizes = [num_batches * len(microbatches) for microbatches in membership.ranges]
        by_rank = communicator.gather_rows(torch.stack(rows).reshape(-1, width), sizes).split(sizes)
        by_batch = torch.cat([part.view(num_batches, -1, width) for part in by_rank], dim=1)
        order = in_microbatch_order(membership.ranges)
        in_order = by_batch if order is None else by_batch[:, order]
        totals = tree_sum_rows(in_order.reshape(-1, width)).tolist()
    values = {name: metric.values(name) for name, metric in of_states.items()}
    for k, (name, each) in enumerate(of_sums.items()):
        values[name] = {name: result(each, totals[2 * k], totals[2 * k + 1])}
    return values


def predict(
    membership: Membership,
    model: nn.Module,
    loader: Loader,
    *,
    forward: Forward | None = None,
    precision: str = "32-true",
) -> Any:
    """The model's outputs for every sample of a loader; see `samestep.Run.predict`."""
    return _carry_out(membership, loader, lambda whole: _predict(membership, model, whole, forward, precision))


def _predict(membership: Membership, model: nn.Module, loader: Loader, forward: Forward | None, precision: str) -> Any:
    """`predict` by the current ranks."""
    # Of each microbatch, by its place in the data: whether it has an entry a sample, and these or else its tensors.
    # None if it may be either, as one sample in a list with one row.
    outputs: dict[int, tuple[bool | None, list[Any]]] = {}
    structures: list[Any] = []  # one is enough: all are alike

    def keep(number: int, microbatch: int, num_samples: int, value: Any, output: Any) -> None:
        place = number * membership.num_microbatches + microbatch
        is_by_sample = _is_by_sample(output, num_samples)
        if is_by_sample is not False:
            outputs[place] = is_by_sample, [_plain(entry, _host_copy) for entry in output]
        else:
            for leaf in leaves(output):
                if not _has_rows(leaf, num_samples):
                    raise UsageError(
                        f"predict needs outputs with the samples along dim 0, or a list with an entry a sample, got "
                        f"{describe(leaf)} for {num_samples} samples; say what to keep with "
                        "forward=lambda model, batch: …"
                    )
            outputs[place] = False, [_host_copy(leaf) for leaf in leaves(output)]
        if not is_by_sample and not structures:
            structures.append(map_tensors(lambda _: torch.empty(0), output))

    _forward_all(membership, model, loader, forward, precision, keep)
    membership.heartbeat.enter("exchange")
    ours = [_plain(each, lambda leaf: leaf) for each in structures], outputs
    of_all = membership.communicator.gather_values(ours)
    in_order = [found for _, found in sorted((pair for _, each in of_all for pair in each.items()), key=itemgetter(0))]
    kinds = {is_by_sample for is_by_sample, _ in in_order}
    if {True, False} <= kinds:
        raise UsageError(
            "predict got a list with an entry a sample for some microbatches, and tensors of all samples for others; "
            "say what to keep with forward=lambda model, batch: …"
        )
    # As many outputs as samples, whatever the number of samples, are not outputs.
    if True in kinds or (kinds == {None} and len({len(entries) for _, entries in in_order}) > 1):
        return [entry for _, entries in in_order for entry in entries]
    structure = next((each for each in (structures, *(found for found, _ in of_all)) if each), [None])[0]
    rows = [leaves(found) for _, found in in_order]
    if not rows or not rows[0]:
        raise UsageError("the model returned no tensor to predict with")
    for column in zip(*rows, strict=True):
        if len({leaf.shape[1:] for leaf in column}) > 1:
            shapes = ", ".join(sorted({str(list(leaf.shape)) for leaf in column}))
            raise UsageError(
                f"predict got outputs of shapes {shapes} for the microbatches, which cannot be joined; have the model "
                "return a list with an entry a sample, or tensors of one shape, by forward=lambda model, batch: …"
            )
    columns = iter([torch.cat(column) for column in zip(*rows, strict=True)])
    return map_tensors(lambda _: next(columns), structure)


def _has_rows(leaf: Any, num_samples: int) -> bool:
    """Whether it is a tensor with the samples along dim 0."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == num_samples


def _is_by_sample(output: Any, num_samples: int) -> bool | None:
    """Whether an output is a list with an entry a sample, such as a detector's list of dicts; None if it may be one."""
    if not isinstance(output, list | tuple) or len(output) != num_samples:
        return False
    if not all(_has_rows(leaf, num_samples) for leaf in leaves(output)):
        return True
    # Two tensors with two rows each are two outputs, or the outputs of two samples.
    return True if any(isinstance(entry, Mapping) for entry in output) else None


def _host_copy(leaf: Any) -> Any:
    """A tensor in memory of its own on the host: an output may be a view of a batch, or of a buffer."""
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
    if leaf is None or isinstance(leaf, str | bytes | int | float):
        return leaf
    raise UsageError(
        f"predict takes tensors, numbers and strings, however nested, got {describe(leaf)}; say what to keep with "
        "forward=lambda model, batch: …"
    )


def _carry_out(membership: Membership, loader: Loader, attempt: Callable[[Loader], T]) -> T:
    """Runs an operation on a whole epoch of a loader, again from its start if a rank is lost meanwhile."""

    def once() -> T:
        with loader.whole_epoch() as whole:
            _check_same_length(membership, whole)
            return attempt(whole)

    return membership.perform(once, "evaluate")


def _check_same_length(membership: Membership, loader: Loader) -> None:
    """Raises a `DeterminismError` unless all ranks have as many samples: each computes its part from that number."""
    words = [loader.num_samples or 0]
    rows = membership.heartbeat.call("exchange", lambda: membership.communicator.gather_words(words))
    counts = [row[0] for row in rows]
    if len(set(counts)) > 1:
        raise DeterminismError(f"the ranks have datasets of {counts} samples; needed: the same dataset on every rank")


@contextmanager
def _evaluating(model: nn.Module, device: torch.device, precision: str) -> Iterator[Callable[[], None]]:
    """Evaluation mode, no gradients, autocast; modes and buffers of all modules are restored.

    Yields a function that restores the buffers at once: what one microbatch writes to them must not reach the next one,
    which another rank may run.
    """
    dtype = check_precision(precision)
    move_model(model, device)
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
        with torch.no_grad(), autocast(device, dtype), compiling_alike():
            yield restore_buffers
    finally:
        restore_buffers()
        # Also of modules that do more there, such as to merge weights and to undo it.
        model.train(modes[0][1])
        for module, mode in modes:
            module.training = mode


def _forward_all(
    membership: Membership,
    model: nn.Module,
    loader: Loader,
    forward: Forward | None,
    precision: str,
    take: Take,
    end_batch: Callable[[], None] | None = None,
) -> int:
    """Runs this rank's microbatches of every batch; calls `take(number, microbatch, num_samples, value, output)`."""
    compute = _first_entry if forward is None else forward
    device = membership.communicator.device
    generators = Generators(device)
    num_batches = 0
    where = f"an evaluation or prediction on rank {membership.rank}"
    with enough_memory(device, where, NEEDS_LESS), _evaluating(model, device, precision) as restore_buffers:

        def run(value: Any, seed: int) -> Any:
            def begin() -> Any:
                restore_buffers()
                generators.seed(seed)
                return compute(model, value)

            return map_tensors(Tensor.detach, without_gradients(begin))

        for number, batch in enumerate(loader):
            membership.heartbeat.enter("evaluate")
            bounds = batch.bounds(membership.num_microbatches)
            rounds = membership.plan.num_rounds(batch.num_leaves(membership.num_microbatches))
            value = None if batch.stand_in is None else batch.stand_in[0]
            # By batch and microbatch, never by rank: a metric that draws does so alike whichever rank measures.
            with generators.preserved():
                for microbatch, value in batch.microbatches.items():
                    output = run(value, derive_seed(loader.seed, EVALUATION_STREAM, number, microbatch))
                    if microbatch in membership.mine:
                        take(number, microbatch, bounds[microbatch + 1] - bounds[microbatch], value, output)
                    rounds -= 1
                # The others need this rank's shard of the model once more.
                for _ in range(rounds):
                    run(value, 0)
                if end_batch is not None:
                    membership.heartbeat.enter("exchange")
                    generators.seed(derive_seed(loader.seed, EVALUATION_STREAM, number))
                    end_batch()
            num_batches += 1
    return num_batches


def check_forward(loader: Loader, forward: Forward | None) -> None:
    """Raises a `UsageError`, before training, if the batches to evaluate on are dicts that no `forward` takes."""
    if forward is None and isinstance(loader.dataset, TensorData) and isinstance(loader.dataset.tensors, Mapping):
        raise _no_forward("dict")


def _no_forward(kind: str) -> UsageError:
    return UsageError(f"a batch is a {kind}; say how to run the model on it: forward=lambda model, batch: …")


def _first_entry(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, tuple | list):
        return model(batch[0])
    if isinstance(batch, Tensor):
        return model(batch)
    raise _no_forward(type(batch).__name__)


def _plain(value: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """Nested mappings, lists and tuples as plain dicts, lists and tuples, a function applied to their leaves."""
    if isinstance(value, Mapping):
        return {key: _plain(entry, of_leaf) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(_plain(entry, of_leaf) for entry in value)
    return of_leaf(value)
