"""A wrapped forward, shared out over this process and the workers.

    1  look     is the module what the workers have? (`_shared`; then `_task` says what is to be computed, and by whom)
    2  send     what they lack, and their pieces (`_send`): all that may not pickle is pickled before a byte leaves
    3  compute  own chunks, up to the first that fails; then all answers are read, whatever has failed
    4  check    raise the error of the first chunk that has one; in careful forwards compute chunks of workers again
    5  merge    the buffers, when no chunk has failed: a forward with a failed chunk leaves them as they were
    6  join     the results, as one node of the script's graph

An error before the first byte leaves the workers as they were, and has the module sent anew; later ones, whatever a
chunk raises, leave them in step. One in the midst of a message does not, and ends the run (`Link.whole`).
"""

import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.core.seeds import derive_seed
from samestep.core.tree import rank_blocks
from samestep.data.checksums import checksum, versions_of
from samestep.engine.buffers import refuse_sync_batchnorm
from samestep.errors import DeterminismError, SamestepError, UsageError
from samestep.scripts import output
from samestep.scripts.backward import generator_state
from samestep.scripts.script_state import ScriptState
from samestep.scripts.split_forward.calls import Call, Forward, Split, Work, planned, run_chunks
from samestep.scripts.split_forward.chunks import Chunks, Leaf, deal, is_tensor, put_together
from samestep.scripts.split_forward.compare import hooked
from samestep.scripts.split_forward.derivatives import Node, SharedCall
from samestep.scripts.split_forward.driver import LACKING, Answers, Driver, Shared, changes_what_it_reads, other_bits
from samestep.scripts.split_forward.pieces import Item, TensorForm, describe, forms_of, item_of
from samestep.scripts.split_forward.replicas import uninitialized
from samestep.scripts.workers.flags import refuse_modes
from samestep.scripts.workers.image import Content, Image, bytes_of
from samestep.scripts.workers.link import decode, encode, whole_messages
from samestep.scripts.workers.pickling import Unpickler, pickled_answer, raise_again, unpacked_error

CHUNK_STREAM = 2**33  # apart from the streams of train steps and loaders
# What no look finds shows when bits are compared: of each worker at first, later of one in each fiftieth forward.
CHECKED_FORWARDS = 3
CHECKED_EVERY = 50


def shared_forward(
    script: ScriptState,
    module: nn.Module,
    chunks: Chunks,
    dim: int | None,
    device_ids: Sequence[int],
    output_devices: Sequence[int],
    is_root: bool,
) -> Any:
    """Runs a module's forward in chunks, on this process and the workers. Tier `bitwise` in their number.

    Args:
        script: the script.
        module: the module.
        chunks: the arguments, cut.
        dim: along which results are joined; None if the script does it.
        device_ids: the simulated device of each chunk, as far as they go.
        output_devices: the devices of the results.
        is_root: whether the script has not wrapped the module itself.

    Raises:
        UsageError: the module, its arguments or its results cannot be shared out.
        DeterminismError: the forward changes what other chunks read, or a worker's bits are others.
    """
    if torch.autograd.forward_ad._current_level >= 0:
        raise UsageError("forward-mode differentiation does not pass a wrapped forward; use reverse mode or the module")
    # Before anything is noted as sent.
    refuse_modes()
    if child := hooked(module):
        script.notice(
            f"a hook of the script's is on {child} of the wrapped {type(module).__name__}, and sees this device's "
            "microbatches alone: what it collects depends on the number of devices; return it from the forward"
        )
    driver: Driver = script.driver
    if not is_root and (devices := script.devices()):
        script.notice(f"{type(module).__name__} is computed by {devices}")
    with whole_messages(), torch._C.DisableTorchFunction():  # simulated devices do not matter here
        device = script.communicator.device
        shared, content = _shared(driver, module, is_root, device)
        try:
            # A module that the script has wrapped gets what `torch.nn.parallel.scatter` gives it.
            values = [
                leaf.value.to(device) if isinstance(leaf.value, Tensor) and not is_root else leaf.value
                for leaf in chunks.leaves
            ]
            task = _task(script, driver, shared, content is not None, chunks, values, device_ids, is_root)
            try:
                _send(driver, shared, content, chunks, values, task)
            except BaseException as error:  # before all was sent: the workers have not what is noted
                driver.forget(module, shared.image)
                if isinstance(error, TypeError | AttributeError | pickle.PicklingError):
                    raise UsageError(
                        f"an argument of a wrapped forward cannot be sent to the workers ({error}); give the forward "
                        "tensors and plain values, or share nothing out (--logical-devices 1)"
                    ) from error
                raise
            copied = [v for leaf, v in zip(chunks.leaves, values, strict=True) if is_tensor(v) and not leaf.sizes]
            versions = versions_of(copied)
            work = run_chunks(
                *(script, module, shared.split, task, task.ranges[0], _columns(chunks, values, task.ranges[0])),
                put_back=lambda: _put_back(script, shared.image),
                captures=driver.link.world_size > 1,
            )
            entering = shared.split.items(task, device) if task.records else ()  # while the workers still compute
            answers = [decode(each) for each in driver.link.answers()]
            try:
                again = partial(_again, script, shared, module, task, chunks, values)
                _raise_first(work, answers, task, shared.image, again)
                if versions_of(copied) != versions:
                    raise changes_what_it_reads("forward", "an argument that every chunk gets whole, in place")
                rows = _rows(shared, work, answers)
                # The chunks have called cached functions too; what counts are the script's calls between forwards.
                shared.image.records.note_counts()
                if task.is_careful:  # before buffers change
                    _check_again(driver, shared, module, task, again, rows, device)
            finally:
                # Also of a forward that has failed, on any number of devices: the seed of the next one counts it.
                script.num_forwards += 1
                script.num_since_reseed += 1
                shared.num_forwards += 1
            _merge(script, shared, task, work, answers)
            return _joined(script, driver, shared, task, entering, work, rows, values, dim, output_devices)
        finally:
            shared.split.release()


def _shared(driver: Driver, module: nn.Module, is_root: bool, device: torch.device) -> tuple[Shared, Content | None]:
    """A module's state, held, and what the workers must have of it anew."""
    known = driver.modules.get(module)
    if known is not None and known.split.hold(module) and not known.image.has_changed(module, is_root):
        return known, None
    refuse_sync_batchnorm(module)
    if uninitialized(module):
        raise UsageError("the wrapped model has lazy layers: run one forward of the plain model before wrapping")
    if known is None:
        driver.num_images += 1
        image = Image(driver.num_images, device)
        # By the number: a reference to the module or its image would keep them alive.
        weakref.finalize(module, driver.dropped.append, image.number)
        content = image.content(module, is_root)
        known = Shared(Split.of(module, image.records.generators), image)
        driver.modules[module] = known
    else:
        content = known.image.content(module, is_root)
        known.split = Split.of(module, known.image.records.generators)
    return known, content


def _task(
    script: ScriptState,
    driver: Driver,
    shared: Shared,
    is_new: bool,
    chunks: Chunks,
    values: Sequence[Any],
    device_ids: Sequence[int],
    is_root: bool,
) -> Forward:
    records, parameters = torch.is_grad_enabled(), shared.split.replicas.parameters
    tracked = tuple(k for k, v in enumerate(values) if records and isinstance(v, Tensor) and v.requires_grad)
    count = shared.num_forwards
    is_careful = count < CHECKED_FORWARDS or count % CHECKED_EVERY == 0 or shared.image.is_suspect(is_new)
    return Forward(
        number=driver.new_number(),
        chunks=replace(chunks, leaves=tuple(replace(leaf, value=None) for leaf in chunks.leaves)),
        ranges=deal(chunks.num_chunks, driver.link.world_size),
        tracked=tracked,
        entering=tuple(_item(chunks.leaves[k], values[k]) for k in tracked),
        trained=tuple(k for k, parameter in enumerate(parameters) if records and parameter.requires_grad),
        ids=tuple(device_ids[k % len(device_ids)] if device_ids else k for k in range(chunks.num_chunks)),
        # From the host's generator without a draw, so the script's next draw is plain python's. `seeding.patches`
        # has what that means for states that are saved and put back.
        seed=derive_seed(generator_state(), CHUNK_STREAM, script.num_since_reseed),
        is_careful=is_careful,
        is_root=is_root,
        records=records,
        place=script.num_forwards,
    )


def _item(leaf: Leaf, value: Tensor) -> Item:
    if not leaf.sizes:
        return Item("copied", tuple(value.shape), value.dtype)
    return Item("cut", tuple(value.shape), value.dtype, leaf.dim, leaf.sizes)


def _columns(chunks: Chunks, values: Sequence[Any], mine: Sequence[int], copies: bool = True) -> list[list[Any]]:
    """The pieces of each leaf of the arguments, by chunk; those that only travel need no copy."""
    columns: list[list[Any]] = []
    for leaf, value in zip(chunks.leaves, values, strict=True):
        if isinstance(value, Tensor):
            item = _item(leaf, value)
            columns.append([item.piece(value, chunk, copies) for chunk in mine])
        else:
            starts = [sum(leaf.sizes[:chunk]) for chunk in mine]
            columns.append([list(value[at : at + leaf.sizes[k]]) for at, k in zip(starts, mine, strict=True)])
    return columns


def _send(
    driver: Driver, shared: Shared, content: Content | None, chunks: Chunks, values: Sequence[Any], task: Forward
) -> None:
    """Tells the workers of a forward: what has changed since the last one, and the pieces of each."""
    image, link = shared.image, driver.link
    # Without workers too: it notes the versions from which `Image.written` tells what a chunk has changed.
    stale = image.stale(content is not None or task.is_careful)
    if link.world_size == 1:
        return
    template = pickled_answer(task.chunks.template, ())
    parts = []
    for mine in task.ranges[1:]:
        columns = _columns(chunks, values, mine, copies=False)
        lists = [None if isinstance(v, Tensor) else column for v, column in zip(values, columns, strict=True)]
        tensors: list[Any] = [
            p for v, column in zip(values, columns, strict=True) if isinstance(v, Tensor) for p in column
        ]
        parts.append(encode(pickled_answer(lists, ()), tensors))
    # At last, when nothing is left that may not pickle.
    known, shared.plan = shared.plan, (planned(task), template)
    # Mostly the workers have it from the forward before, and the message is short.
    plan = None if known == shared.plan else shared.plan
    own = task.number, task.seed, task.place
    what = ("forward", own, plan, image.number, content, stale, driver.new_flags(), driver.unneeded())
    link.send(encode(what), parts, [bytes_of(image.storages[number]) for number in stale])


def _put_back(script: ScriptState, image: Image) -> None:
    """Puts back what a chunk has changed of what its code refers to, or raises."""
    for what, put_back in image.written():
        if put_back is None:
            raise changes_what_it_reads("forward", f"{what}, to which its code refers")
        put_back()
        if not what:
            continue
        script.notice(
            f"{what}: written inside the wrapped forward, and lost after it, as with torch's DataParallel on several "
            "devices; return the value, or register a buffer"
        )


def _raise_first(
    work: Work, answers: Answers, task: Forward, image: Image, again: Callable[[Sequence[int]], Work]
) -> None:
    """Prints what the chunks have said, in their order, up to the first that has failed, whose error is raised.

    What a worker alone raises is another error: it lacks something.
    """
    failures = [] if work.error is None else [(work.failed_chunk, work.error)]
    said = list(work.said)
    for head, _ in answers:
        said += head["said"]
        if head["error"] is not None:
            failures.append((head["failed_chunk"], unpacked_error(head["error"], image.classes)))
    # The first of all chunks that failed anywhere, which is the one that one device would have stopped at: each process
    # stops at its own first.
    failed_chunk, error = min(failures, key=lambda pair: pair[0], default=(task.chunks.num_chunks, None))
    output.replay([(stream, text) for chunk, stream, text in said if chunk <= failed_chunk])
    if error is None:
        return
    if (
        error is not work.error
        and isinstance(error, Exception)
        and not isinstance(error, SamestepError | MemoryError | torch.OutOfMemoryError)
        and failed_chunk < task.chunks.num_chunks
        and again([failed_chunk]).error is None
    ):
        raise DeterminismError(
            f"chunk {failed_chunk} of a forward raises {type(error).__name__} on a worker ({error}), and not when this "
            f"process computes it again: {LACKING}"
        ) from error
    raise_again(error)


def _merge(script: ScriptState, shared: Shared, task: Forward, work: Work, answers: Answers) -> None:
    """Merges the buffers of all chunks into the module, and names the attributes that they have lost."""
    buffers, chunks = shared.split.buffers, task.chunks
    sums = [*buffers.sums, *(tensor for head, tensors in answers for tensor in tensors[: head["num_sums"]])]
    if sums and (num_rows := sum(map(chunks.num_rows, range(chunks.num_chunks)))):
        blocks = [block for blocks in rank_blocks(task.ranges, chunks.num_chunks) for block in blocks]
        buffers.put_means([total.clone() for total in sums], blocks, num_rows)
    buffers.put_ends(script.communicator.device)
    if lost := work.lost.union(*(head["lost"] for head, _ in answers)):
        script.notice(
            f"{', '.join(sorted(lost)[:5])}: written inside the wrapped forward, and lost after it, as with "
            "torch's DataParallel on several devices; return the value, or register a buffer"
        )


@dataclass
class Row:
    """The results of one chunk."""

    leaves: list[Tensor]
    forms: list[TensorForm]
    template: Any


def _rows(shared: Shared, work: Work, answers: Answers) -> list[Row]:
    """The results of all chunks."""
    results = work.results
    rows = [Row(*row) for row in zip(results.leaves, forms_of(results.leaves), results.templates, strict=True)]
    # By rank, which is the order of the chunks.
    for head, tensors in answers:
        if head["templates"]:
            forms, templates = Unpickler(head["templates"], shared.image.classes).load()
            rest = iter(tensors[head["num_sums"] :])
            rows += [Row([next(rest) for _ in f], f, template) for f, template in zip(forms, templates, strict=True)]
    return rows


def _again(
    script: ScriptState,
    shared: Shared,
    module: nn.Module,
    task: Forward,
    chunks: Chunks,
    values: Sequence[Any],
    numbers: Sequence[int],
) -> Work:
    """Computes chunks of workers here."""
    # Not the forward's split, whose buffers have the sums of its own chunks.
    split = Split.of(module, shared.image.records.generators)
    columns = _columns(chunks, values, numbers)
    with output.silenced():
        return run_chunks(
            *(script, module, split, task, numbers, columns),
            put_back=lambda: _put_back(script, shared.image),
            captures=True,
        )


def _check_again(
    driver: Driver,
    shared: Shared,
    module: nn.Module,
    task: Forward,
    again: Callable[[Sequence[int]], Work],
    rows: Sequence[Row],
    device: torch.device,
) -> None:
    """Computes a chunk of each worker, or later of one, again, and compares bits: what a worker has may be stale."""
    busy = [mine for mine in task.ranges[1:] if mine]
    if not busy:
        return
    count = shared.num_checks
    shared.num_checks += 1
    # One worker in turn where only the interval asks for it; all of them after a change, or if code asks for a clock.
    if count >= CHECKED_FORWARDS and shared.num_forwards % CHECKED_EVERY == 0:
        busy = [busy[count % len(busy)]]
    numbers = [mine[count % len(mine)] for mine in busy]
    work = again(numbers)
    if work.error is not None:
        raise work.error
    for chunk, leaves in zip(numbers, work.results.leaves, strict=True):
        if checksum([leaf.detach() for leaf in leaves]) != checksum(rows[chunk].leaves):
            raise other_bits(f"chunk {chunk} of a forward of {type(module).__name__}")
    items = shared.split.items(task, device)
    driver.again[task.number] = {chunk: Call({chunk: work.calls[chunk]}, items) for chunk in numbers}


def _joined(
    script: ScriptState,
    driver: Driver,
    shared: Shared,
    task: Forward,
    entering: tuple[Item, ...],
    work: Work,
    rows: Sequence[Row],
    values: Sequence[Any],
    dim: int | None,
    devices: Sequence[int],
) -> Any:
    """Joins the results of all chunks; those that require gradients lead back to what entered."""
    first, template = rows[0], describe(rows[0].template)
    if any(
        len(row.leaves) != len(first.leaves)
        or (row.template is not first.template and describe(row.template) != template)
        for row in rows
    ):
        raise UsageError(
            "the chunks of a wrapped forward returned different things: other containers, other keys, or numbers and "
            "strings that differ; return tensors, whose entries are joined"
        )
    numbers = range(len(first.leaves))
    items = tuple(item_of([row.forms[k] for row in rows], dim) for k in numbers)
    wholes: list[Tensor | None] = [
        item.joined([row.leaves[k].detach().contiguous() for row in rows])
        for k, item in zip(numbers, items, strict=True)
    ]
    tracked = frozenset(k for k in numbers if any(row.forms[k].requires_grad for row in rows))
    # The sums over all chunks are on the device, whatever is elsewhere.
    device = script.communicator.device
    inputs = [
        values[k].to(device) if item.kind == "copied" else values[k]
        for k, item in zip(task.tracked, task.entering, strict=True)
    ]
    inputs += [shared.split.replicas.parameters[k].to(device) for k in task.trained]
    if task.records and tracked and inputs:
        guard = shared.split.buffers.guard([child for _, child in shared.split.replicas.modules])
        driver.calls[task.number] = Call(work.calls, entering)
        node = Node(
            script, task.number, entering, items, tracked, task.ranges, guard, shared.image, task.is_careful, wholes
        )
        wholes = list(SharedCall.apply(node, *inputs))  # type: ignore[no-untyped-call]
    else:
        # There will be no node whose end releases it.
        driver.release(task.number)
    if dim is not None or not items:
        joined = [script.mark(whole, devices[0]) for whole in wholes if whole is not None]
        return (
            put_together(first.template, joined)
            if dim is not None
            else [put_together(first.template, [])] * len(devices)
        )
    columns = [whole.split(list(item.sizes)) for item, whole in zip(items, wholes, strict=True) if whole is not None]
    pairs = list(zip(items, columns, strict=True))
    return [
        put_together(first.template, [script.mark(c[chunk].view(item.shapes[chunk]).clone(), at) for item, c in pairs])
        for chunk, at in enumerate(devices)
    ]
