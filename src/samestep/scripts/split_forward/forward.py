"""The wrapped forward: runs this rank's chunks, and joins the results of all ranks."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.callsite import script_line
from samestep.core.seeds import derive_seed
from samestep.core.tree import rank_blocks
from samestep.data.batch import checksum
from samestep.data.nested import map_tensors
from samestep.engine.buffers import refuse_sync_batchnorm
from samestep.engine.diagnosis import explain_lone_sample
from samestep.engine.kernel_flags import num_shortages
from samestep.errors import DeterminismError, UsageError
from samestep.scripts import output
from samestep.scripts.backward import check_memory, generator_state, raise_together
from samestep.scripts.shared_script import SharedScript
from samestep.scripts.split_forward.chunks import Chunks, Leaf, already_cut, cut, deal
from samestep.scripts.split_forward.compare import hooked
from samestep.scripts.split_forward.regions import Item, Region, Results, enter, gather_results
from samestep.scripts.split_forward.replicas import (
    Buffers,
    OwnGenerators,
    Replicas,
    check_in_place_state,
    in_place_state,
    uninitialized,
)

CHUNK_STREAM = 2**33  # apart from the streams of train steps and loaders
CHECKED_FORWARDS = 3
CHECKED_EVERY = 50
OK, RAISED = 0, 1
COMPARED = {
    "inputs": "inputs",
    "parameters": "parameters",
    "generator": "random generators",
    "since_reseed": "forwards",
}


@dataclass
class Wrapped:
    """State of a wrapped module between two forwards."""

    replicas: Replicas
    buffers: Buffers
    own_generators: OwnGenerators
    num_forwards: int = 0

    def hold(self, module: nn.Module) -> bool:
        """Takes hold of the module for a forward; false if it is not as it was."""
        if not self.replicas.hold(module):
            return False
        self.buffers.begin_forward([child for _, child in self.replicas.modules])
        return True

    def release(self) -> None:
        """Drops the references to the module, so that this does not keep it alive."""
        self.replicas.release()
        self.buffers.release()

    def is_careful(self) -> bool:
        """Whether this forward is one of those that are checked at length."""
        return self.num_forwards < CHECKED_FORWARDS or self.num_forwards % CHECKED_EVERY == 0


class Header(NamedTuple):
    """Words that each rank sends after its chunks."""

    status: int  # OK or RAISED
    failed_chunk: int
    output_bytes: int
    means_touched: int  # running statistics may have changed
    others_touched: int  # number of other buffers that changed
    inputs: int  # checksum, in forwards that are checked at length
    parameters: int  # checksum, too
    generator: int  # checksum
    since_reseed: int
    num_leaves: int
    template: int  # checksum


@dataclass
class Work:
    """This rank's part of a forward: the inputs and the results of its chunks."""

    region: Region  # the ranks, the chunks, and the tensors that entered
    token: Tensor | None  # 0-d; None if nothing that requires grad entered
    inputs: list[list[Any]]  # this rank's pieces of each leaf of the arguments, by chunk
    stand_ins: dict[int, list[Tensor]]  # of each trained parameter, by its number, by chunk
    results: Results
    said: list[tuple[int, int, str]] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    failed_chunk: int = 0
    error: BaseException | None = None


def chunked_forward(
    script: SharedScript,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    num_microbatches: int,
    dim: int = 0,
    scatter: str = "tensors",
    device_ids: Sequence[int] = (),
    output_device: int = 0,
) -> Any:
    """Runs a module's forward in chunks, split over the ranks. Tier `bitwise` in the number of ranks.

    With one microbatch, inside another wrapped forward, or off the script's main thread the module is simply called.
    """
    if num_microbatches == 1 or not script.may_meet():
        return module(*args, **kwargs)
    with torch._C.DisableTorchFunction():  # simulated devices do not matter here
        chunks = cut(args, kwargs, num_microbatches, dim, scatter)
    return _forward(script, module, chunks, dim, device_ids, [output_device])


def given_forward(
    script: SharedScript,
    module: nn.Module,
    calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    device_ids: Sequence[int],
) -> list[Any]:
    """Runs a module's forward on chunks that the script cut itself, split over the ranks. Tier `bitwise`."""
    if not script.may_meet():
        return [module(*args, **kwargs) for args, kwargs in calls]
    results: list[Any] = _forward(script, module, already_cut(calls), None, device_ids, device_ids)
    return results


def _forward(
    script: SharedScript,
    module: nn.Module,
    chunks: Chunks,
    dim: int | None,
    device_ids: Sequence[int],
    output_devices: Sequence[int],
) -> Any:
    """The wrapped forward: chunks run, the ranks exchange headers and results, results are joined."""
    if torch.autograd.forward_ad._current_level >= 0:
        raise UsageError(
            "forward-mode differentiation does not pass a wrapped forward; use reverse mode, or the module"
        )
    if child := hooked(module):
        script.notice(
            f"a hook of the script's is on {child} of the wrapped {type(module).__name__}, and sees this rank's "
            "microbatches alone: what it collects depends on the number of devices; return it from the forward"
        )
    wrapped = _wrapped(script, module)
    try:
        with torch._C.DisableTorchFunction():
            work = _enter(script, wrapped, chunks)
            state, since = generator_state(), script.num_since_reseed
        ids = [device_ids[chunk % len(device_ids)] if device_ids else chunk for chunk in range(chunks.num_chunks)]
        with wrapped.own_generators.preserved(), script.generators.preserved():
            _run_chunks(script, module, wrapped, chunks, work, ids, derive_seed(state, CHUNK_STREAM, since))
        with torch._C.DisableTorchFunction():
            headers, parts = _meet(script, wrapped, chunks, work, (state, since))
            leaves = [(header.num_leaves, header.template) for header in headers]
            return gather_results(script, work.results, leaves, parts, work.region, work.token, dim, output_devices)
    finally:
        wrapped.release()


def _meet(
    script: SharedScript, wrapped: Wrapped, chunks: Chunks, work: Work, generator: tuple[int, int]
) -> tuple[list[Header], list[Tensor]]:
    """Gathers the headers and packed results of all ranks, raises the first error, and merges output and buffers."""
    watched = [0, 0]
    if wrapped.is_careful():
        state = [*wrapped.replicas.parameters, *wrapped.buffers.tensors()]
        watched = [checksum([leaf.value for leaf in chunks.leaves]), checksum(state)]
    said = pickle.dumps(work.said) if work.said else b""
    checked = [*wrapped.buffers.touched, *watched, *generator]
    status = OK if work.error is None else RAISED
    own = Header(status, work.failed_chunk, len(said), *checked, *work.results.words())
    words, parts = script.gather("a wrapped forward", own, work.results.packed)
    headers = [Header(*row[: len(own)]) for row in words]
    script.num_forwards += 1
    script.num_since_reseed += 1
    wrapped.num_forwards += 1
    for name, what in COMPARED.items():
        if len({getattr(header, name) for header in headers}) > 1:
            why, number = f"the {what} of a wrapped forward differ between the ranks", getattr(own, name)
            script.raise_diverged(why, f"{number:x} at {script_line()}")
    failed = [(header.failed_chunk, rank) for rank, header in enumerate(headers) if header.status == RAISED]
    failure = min(failed, default=None)
    last_chunk = chunks.num_chunks if failure is None else failure[0]
    _print_output(script, said, [header.output_bytes for header in headers], last_chunk)
    if failure is not None:
        raise_together(script, work.error, failure[1], f"chunk {failure[0]} of a wrapped forward")
    num_rows = sum(map(chunks.num_rows, range(chunks.num_chunks)))
    touched = [[header.means_touched, header.others_touched, num_rows] for header in headers]
    wrapped.buffers.merge(script, touched, rank_blocks(work.region.ranges, chunks.num_chunks))
    if work.lost:
        script.notice(
            f"{', '.join(sorted(work.lost)[:5])}: written inside the wrapped forward, and lost after it, as with "
            "torch's DataParallel on several devices; return the value, or register a buffer"
        )
    return headers, parts


def _run_chunks(
    script: SharedScript, module: nn.Module, wrapped: Wrapped, chunks: Chunks, work: Work, ids: Sequence[int], seed: int
) -> None:
    """Runs this rank's chunks one after another, up to the first that raises."""
    careful, replicas = wrapped.is_careful(), wrapped.replicas
    states, shortages = replicas.states(careful), num_shortages(script.communicator.device)
    oldest = (torch.zeros((), requires_grad=True) * 1).grad_fn if careful else None
    try:
        for position, chunk in enumerate(work.region.mine):
            work.failed_chunk, index = chunk, ids[chunk]
            chunk_seed = derive_seed(seed, chunk)
            script.generators.seed(chunk_seed)
            wrapped.own_generators.seed(chunk_seed)
            pieces = [_marked(script, column[position], index) for column in work.inputs]
            args, kwargs = chunks.arguments(pieces, chunk)
            stand_ins = {n: script.mark(column[position], index) for n, column in work.stand_ins.items()}
            copied = wrapped.buffers.copied(script, chunk, index, chunks.num_rows(chunk), careful)
            swapped = replicas.swapped(stand_ins, work.lost)
            with _captured(script, chunk, work), script.chunk(chunk), script.on_device(index), copied, swapped:
                before = (in_place_state(replicas.modules), checksum(chunks.template)) if careful else None
                result = module(*args, **kwargs)
                if before is not None:
                    check_in_place_state(before[0], in_place_state(replicas.modules))
                    _check_arguments(before[1], checksum(chunks.template))
            with torch._C.DisableTorchFunction():
                work.results.add(result)
                replicas.check_unwritten(states, careful)
        check_memory(script, shortages, f"wrapped forward {script.num_forwards} on rank {script.rank}")
        if oldest is not None and torch.is_grad_enabled():
            tracked = [leaf for leaves in work.results.leaves for leaf in leaves if leaf.requires_grad]
            replicas.check_graph(tracked, work.token, oldest._sequence_nr())
        with torch._C.DisableTorchFunction():
            # A result that cannot be described or packed is an error of this rank, shared like others.
            work.results.words()
            if script.world_size > 1:
                work.results.pack()
    except (Exception, SystemExit) as error:
        work.error = error
        if chunks.num_rows(work.failed_chunk) == 1:
            num_rows = sum(map(chunks.num_rows, range(chunks.num_chunks)))
            where = (
                f"of the {num_rows} rows of wrapped forward {script.num_forwards} chunk {work.failed_chunk} "
                f"(of {chunks.num_chunks})"
            )
            advice = "cut batches into fewer chunks (--logical-devices)"
            work.error = explain_lone_sample(error, module, where, advice) or error


@contextmanager
def _captured(script: SharedScript, chunk: int, work: Work) -> Iterator[None]:
    """Captures the output of a chunk, to be printed in the chunks' order; one rank is in order anyway."""
    if script.world_size == 1:
        yield
        return
    with output.captured() as said:
        try:
            yield
        finally:
            work.said += [(chunk, stream, text) for stream, text in said]


def _wrapped(script: SharedScript, module: nn.Module) -> Wrapped:
    """The state of a module, a new one if its children or parameters have changed."""
    known = script.wrapped.get(module)
    if isinstance(known, Wrapped) and known.hold(module):
        return known
    refuse_sync_batchnorm(module)
    if uninitialized(module):
        raise UsageError(
            "the wrapped model has lazy layers that have not seen an input: run one forward of the plain model before "
            "wrapping it, as torch's DataParallel demands too"
        )
    wrapped = Wrapped(Replicas(module), Buffers(module), OwnGenerators(module))
    script.wrapped[module] = wrapped
    held = wrapped.hold(module)
    assert held, "a module has the children that it has"
    return wrapped


def _check_arguments(before: int, now: int) -> None:
    """Raises if a chunk changed arrays among its arguments, which all chunks of this rank share."""
    if before != now:
        raise DeterminismError(
            "an array, list or number among the arguments was changed inside the wrapped forward; chunks that run on "
            "other devices would not see it. Pass a copy, or return the value"
        )


def _enter(script: SharedScript, wrapped: Wrapped, chunks: Chunks) -> Work:
    """Cuts the arguments, and makes stand-ins for the parameters."""
    device, replicas = script.communicator.device, wrapped.replicas
    ranges = deal(chunks.num_chunks, script.world_size)
    mine = ranges[script.rank]
    values = [leaf.value.to(device) if isinstance(leaf.value, Tensor) else leaf.value for leaf in chunks.leaves]
    items = [
        _input_item(leaf, value) if isinstance(value, Tensor) else None
        for leaf, value in zip(chunks.leaves, values, strict=True)
    ]
    recorded = torch.is_grad_enabled()
    tracked = [k for k, value in enumerate(values) if recorded and isinstance(value, Tensor) and value.requires_grad]
    trained = [k for k, parameter in enumerate(replicas.parameters) if recorded and parameter.requires_grad]
    entering = [item for k in tracked if (item := items[k]) is not None]
    for k in trained:
        like = replicas.parameters[k].detach()
        entering.append(Item("copied", tuple(like.shape), like.dtype, like=like, is_sparse=k in replicas.sparse))
    guard = wrapped.buffers.guard([child for _, child in replicas.modules])
    region = Region(script, ranges, tuple(entering), device, guard)
    token: Tensor | None = None
    columns: list[list[Tensor]] = []
    if entering:
        token, columns = enter(region, [values[k] for k in tracked] + [replicas.parameters[k] for k in trained])
    inputs: list[list[Any]] = []
    for k, (leaf, value, item) in enumerate(zip(chunks.leaves, values, items, strict=True)):
        if k in tracked:
            inputs.append(columns[tracked.index(k)])
        elif item is None:
            starts = [sum(leaf.sizes[:chunk]) for chunk in mine]
            inputs.append([list(value[i : i + leaf.sizes[chunk]]) for i, chunk in zip(starts, mine, strict=True)])
        else:
            inputs.append([item.piece(value, chunk) for chunk in mine])
    stand_ins = dict(zip(trained, columns[len(tracked) :], strict=True))
    return Work(region, token, inputs, stand_ins, Results(device))


def _marked(script: SharedScript, piece: Any, index: int) -> Any:
    """A piece, its tensors on the chunk's device."""
    return map_tensors(lambda tensor: script.mark(tensor, index), piece)


def _input_item(leaf: Leaf, value: Tensor) -> Item:
    if not leaf.sizes:
        return Item("copied", tuple(value.shape), value.dtype, like=value.detach())
    return Item("cut", tuple(value.shape), value.dtype, leaf.dim, leaf.sizes)


def _print_output(script: SharedScript, said: bytes, sizes: Sequence[int], last_chunk: int) -> None:
    """Prints on rank 0 the output of all chunks, in their order, up to the one that failed."""
    if not any(sizes):
        return
    rows = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else torch.empty(0, dtype=torch.uint8)
    gathered = script.communicator.gather_rows(rows.view(-1, 1), sizes).view(-1).split(list(sizes))
    if script.rank == 0:
        entries = [entry for part in gathered if part.numel() for entry in pickle.loads(bytes(part.tolist()))]
        output.replay([(stream, text) for chunk, stream, text in entries if chunk <= last_chunk])
