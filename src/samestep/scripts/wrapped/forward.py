"""The wrapped forward: this rank's chunks of it, and what they make together, on every rank."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.core.seeds import derive_seed
from samestep.core.tree import rank_blocks
from samestep.data.batch import checksum, tensor_checksum
from samestep.data.nested import map_tensors
from samestep.engine.buffers import refuse_sync_batchnorm
from samestep.engine.diagnosis import explain_lone_sample
from samestep.engine.site import script_line
from samestep.errors import DeterminismError, UsageError
from samestep.scripts import output, seeding
from samestep.scripts.adoption import Adoption
from samestep.scripts.backward import generator_state
from samestep.scripts.failures import raise_together
from samestep.scripts.wrapped.buffers import Buffers
from samestep.scripts.wrapped.chunks import Chunks, Leaf, already_cut, cut, deal
from samestep.scripts.wrapped.exchange import Item
from samestep.scripts.wrapped.generators import OwnGenerators
from samestep.scripts.wrapped.regions import Region, enter
from samestep.scripts.wrapped.replicas import Replicas, check_in_place_state, in_place_state, uninitialized
from samestep.scripts.wrapped.results import Results, gather_results

CHUNK_STREAM = 2**33  # apart from the streams of train steps and loaders
CHECKED_FORWARDS = 3
CHECKED_EVERY = 50
OK, RAISED = 0, 1


@dataclass
class Wrapped:
    """What is remembered about a wrapped module from one forward to the next."""

    replicas: Replicas
    buffers: Buffers
    own_generators: OwnGenerators
    num_forwards: int = 0

    def hold(self, module: nn.Module) -> bool:
        """Takes hold of the module for a forward; false if it is not as it was."""
        if not self.replicas.hold(module):
            return False
        self.buffers.begin([child for _, child in self.replicas.modules])
        return True

    def release(self) -> None:
        """Lets go of the module, so that this does not keep it alive."""
        self.replicas.release()
        self.buffers.release()

    def is_careful(self) -> bool:
        """Whether this forward is one of those that are checked at length."""
        return self.num_forwards < CHECKED_FORWARDS or self.num_forwards % CHECKED_EVERY == 0


@dataclass
class Work:
    """What this rank's chunks came to."""

    results: Results
    packed: Tensor | None = None
    said: list[tuple[int, int, str]] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    failed_chunk: int = 0
    error: BaseException | None = None


@dataclass(frozen=True)
class Entrance:
    """What this rank's chunks run on.

    Attributes:
        region: the ranks, the chunks, and what entered.
        token: 0-d; None if nothing that requires grad entered.
        inputs: this rank's pieces of each leaf of the arguments, by chunk.
        stand_ins: of each trained parameter, by its number, by chunk.
    """

    region: Region
    token: Tensor | None
    inputs: list[list[Any]]
    stand_ins: dict[int, list[Tensor]]


def chunked_forward(
    adoption: Adoption,
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
    """Runs a module's forward in chunks, shared out over the ranks. Tier `bitwise` in the number of ranks.

    With one microbatch, inside another wrapped forward, or off the script's main thread the module is simply called.

    Args:
        adoption: of this process.
        module: whose forward.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_microbatches: V; chunks are cut as `torch.chunk` does.
        dim: the dim along which tensors are cut and results are joined.
        scatter: "tensors" (torch's rule) or "elements" (lists are cut by element).
        device_ids: the device of each chunk, as the script counts them.
        output_device: the device of the results, as the script counts them; -1 is the host.

    Returns:
        What the chunks returned, joined by torch's rules: tensors along `dim`, a 0-d tensor as a vector with one entry
        a chunk, containers entry by entry.

    Raises:
        UsageError: arguments that cannot be cut, or results that cannot be joined.
        DeterminismError: ranks that have drifted apart, or a gradient that would be a part only.
        Exception: what a chunk raised, on all ranks.
    """
    if num_microbatches == 1 or not adoption.may_meet():
        return module(*args, **kwargs)
    with torch._C.DisableTorchFunction():  # where virtual devices are is of no interest here
        chunks = cut(args, kwargs, num_microbatches, dim, scatter)
    return _shared_out(adoption, module, chunks, dim, device_ids, [output_device])


def given_forward(
    adoption: Adoption,
    module: nn.Module,
    calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    device_ids: Sequence[int],
) -> list[Any]:
    """Runs a module's forward on chunks that the script cut itself, shared out over the ranks. Tier `bitwise`.

    Args:
        adoption: of this process.
        module: whose forward.
        calls: the (args, kwargs) of each chunk.
        device_ids: the device of each chunk and of its results, as the script counts them.

    Returns:
        What each chunk returned, on every rank.

    Raises:
        UsageError: results of different structure.
        DeterminismError: as of `chunked_forward`.
        Exception: what a chunk raised, on all ranks.
    """
    if not adoption.may_meet():
        return [module(*args, **kwargs) for args, kwargs in calls]
    results: list[Any] = _shared_out(adoption, module, already_cut(calls), None, device_ids, device_ids)
    return results


def _shared_out(
    adoption: Adoption,
    module: nn.Module,
    chunks: Chunks,
    dim: int | None,
    device_ids: Sequence[int],
    output_devices: Sequence[int],
) -> Any:
    """The forward of chunks, with the module held for its time."""
    if torch.autograd.forward_ad._current_level >= 0:
        raise UsageError(
            "forward-mode differentiation does not pass a wrapped forward; use reverse mode, or the module"
        )
    seeding.say_seed(adoption)
    wrapped = _wrapped(adoption, module)
    try:
        return _forward(adoption, module, wrapped, chunks, dim, device_ids, output_devices)
    finally:
        wrapped.release()


def _forward(
    adoption: Adoption,
    module: nn.Module,
    wrapped: Wrapped,
    chunks: Chunks,
    dim: int | None,
    device_ids: Sequence[int],
    output_devices: Sequence[int],
) -> Any:
    """The wrapped forward: chunks run, the ranks meet, results are joined."""
    with torch._C.DisableTorchFunction():  # virtual devices look on from inside the chunks only
        ranges = deal(chunks.num_chunks, adoption.world_size)
        entrance = _enter(adoption, wrapped, chunks, ranges)
        state = generator_state()
        since = adoption.num_since_reseed
    work = Work(Results(entrance.region.device))
    ids = [device_ids[chunk % len(device_ids)] if device_ids else chunk for chunk in range(chunks.num_chunks)]
    with adoption.generators.preserved(), wrapped.own_generators.preserved():
        _run_chunks(adoption, module, wrapped, chunks, entrance, work, ids, derive_seed(state, CHUNK_STREAM, since))
    with torch._C.DisableTorchFunction():
        careful = wrapped.is_careful()
        watched = [checksum([leaf.value for leaf in chunks.leaves]), _state_checksum(wrapped)] if careful else [0, 0]
        said = pickle.dumps(work.said) if work.said else b""
        status = [OK if work.error is None else RAISED, work.failed_chunk, len(said)]
        own_words = [*status, *wrapped.buffers.touched, *watched, state, since, *work.results.words()]
        rows, parts = adoption.hand_out("a wrapped forward", own_words, work.packed)
        adoption.num_forwards += 1
        adoption.num_since_reseed += 1
        wrapped.num_forwards += 1
        _check_watched(adoption, rows)
        failure = min(((row[1], rank) for rank, row in enumerate(rows) if row[0] == RAISED), default=None)
        _speak(adoption, said, [row[2] for row in rows], chunks.num_chunks if failure is None else failure[0])
        if failure is not None:
            raise_together(adoption, work.error, failure[1], f"chunk {failure[0]} of a wrapped forward")
        num_rows = sum(chunks.num_rows(chunk) for chunk in range(chunks.num_chunks))
        touched = [[row[3], row[4], num_rows] for row in rows]
        wrapped.buffers.merge(adoption, touched, rank_blocks(ranges, chunks.num_chunks))
        _say_lost(adoption, work.lost)
        words = [(row[9], row[10]) for row in rows]
        return gather_results(
            adoption,
            work.results,
            words,
            parts,
            entrance.region,
            entrance.token,
            dim=dim,
            output_devices=output_devices,
        )


def _run_chunks(
    adoption: Adoption,
    module: nn.Module,
    wrapped: Wrapped,
    chunks: Chunks,
    entrance: Entrance,
    work: Work,
    ids: Sequence[int],
    seed: int,
) -> None:
    """Runs this rank's chunks one after another, up to the first that raises."""
    careful = wrapped.is_careful()
    states = wrapped.replicas.states(careful)
    oldest = (torch.zeros((), requires_grad=True) * 1).grad_fn if careful else None
    try:
        for position, chunk in enumerate(entrance.region.mine):
            work.failed_chunk = chunk
            chunk_seed = derive_seed(seed, chunk)
            adoption.generators.seed(chunk_seed)
            wrapped.own_generators.seed(chunk_seed)
            pieces = [_marked(adoption, column[position], ids[chunk]) for column in entrance.inputs]
            args, kwargs = chunks.arguments(pieces, chunk)
            stand_ins = {
                number: adoption.mark(column[position], ids[chunk]) for number, column in entrance.stand_ins.items()
            }
            copied = wrapped.buffers.copied(adoption, chunk, ids[chunk], chunks.num_rows(chunk), careful)
            swapped = wrapped.replicas.swapped(stand_ins, work.lost)
            place = adoption.on_device(ids[chunk])
            with _listening(adoption, chunk, work), adoption.chunk(chunk), place, copied, swapped:
                before = (in_place_state(wrapped.replicas.modules), checksum(chunks.template)) if careful else None
                result = module(*args, **kwargs)
                if before is not None:
                    check_in_place_state(before[0], in_place_state(wrapped.replicas.modules))
                    _check_arguments(before[1], checksum(chunks.template))
            with torch._C.DisableTorchFunction():
                work.results.add(result)
                wrapped.replicas.check_unwritten(states, careful)
        if oldest is not None and torch.is_grad_enabled():
            tracked = [leaf for leaves in work.results.leaves for leaf in leaves if leaf.requires_grad]
            wrapped.replicas.check_graph(tracked, entrance.token, oldest._sequence_nr())
        with torch._C.DisableTorchFunction():
            # What cannot be described or packed is an error of this rank's, told like the others.
            work.results.words()
            work.packed = work.results.packed(adoption.world_size)
    except (Exception, SystemExit) as error:
        work.error = _explained(error, module, chunks, work.failed_chunk, adoption.num_forwards) or error


def _explained(error: BaseException, module: nn.Module, chunks: Chunks, chunk: int, number: int) -> UsageError | None:
    """What to raise for an error that torch raised because a chunk has one row; None for the error itself."""
    if chunks.num_rows(chunk) != 1:
        return None
    num_rows = sum(map(chunks.num_rows, range(chunks.num_chunks)))
    where = f"of the {num_rows} rows of wrapped forward {number} chunk {chunk} (of {chunks.num_chunks})"
    return explain_lone_sample(error, module, where, "cut batches into fewer chunks (--num-microbatches)")


@contextmanager
def _listening(adoption: Adoption, chunk: int, work: Work) -> Iterator[None]:
    """Keeps what a chunk prints, to be said in the chunks' order; one rank alone is in order anyway."""
    if adoption.world_size == 1:
        yield
        return
    with output.captured() as said:
        try:
            yield
        finally:
            work.said += [(chunk, stream, text) for stream, text in said]


def _wrapped(adoption: Adoption, module: nn.Module) -> Wrapped:
    """What is remembered about a module, anew if its children or parameters are others."""
    known = adoption.wrapped.get(module)
    if isinstance(known, Wrapped) and known.hold(module):
        return known
    refuse_sync_batchnorm(module)
    if uninitialized(module):
        raise UsageError(
            "the wrapped model has lazy layers that have not seen an input: run one forward of the plain model before "
            "wrapping it, as torch's DataParallel demands too"
        )
    wrapped = Wrapped(Replicas(module), Buffers(module), OwnGenerators(module))
    adoption.wrapped[module] = wrapped
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


def _enter(adoption: Adoption, wrapped: Wrapped, chunks: Chunks, ranges: tuple[range, ...]) -> Entrance:
    """Cuts the arguments, and makes stand-ins for the parameters."""
    device, replicas = adoption.communicator.device, wrapped.replicas
    mine = ranges[adoption.rank]
    values = [leaf.value.to(device) if isinstance(leaf.value, Tensor) else leaf.value for leaf in chunks.leaves]
    items = [
        _input_item(leaf, value) if isinstance(value, Tensor) else None
        for leaf, value in zip(chunks.leaves, values, strict=True)
    ]
    recorded = torch.is_grad_enabled()
    tracked = [k for k, value in enumerate(values) if recorded and isinstance(value, Tensor) and value.requires_grad]
    trained = [k for k, parameter in enumerate(replicas.parameters) if recorded and parameter.requires_grad]
    entering = [item for k in tracked if (item := items[k]) is not None]
    entering += [_parameter_item(replicas.parameters[k], k in replicas.sparse) for k in trained]
    region = Region(
        adoption, ranges, tuple(entering), device, wrapped.buffers.guard([child for _, child in replicas.modules])
    )
    token: Tensor | None = None
    columns: list[list[Tensor]] = []
    if entering:
        token, columns = enter(region, [values[k] for k in tracked] + [replicas.parameters[k] for k in trained])
    inputs: list[list[Any]] = []
    for k, (leaf, value, item) in enumerate(zip(chunks.leaves, values, items, strict=True)):
        if k in tracked:
            inputs.append(columns[tracked.index(k)])
        elif item is None:
            inputs.append([_elements(leaf, chunk) for chunk in mine])
        else:
            inputs.append([item.piece(value, chunk) for chunk in mine])
    return Entrance(region, token, inputs, dict(zip(trained, columns[len(tracked) :], strict=True)))


def _input_item(leaf: Leaf, value: Tensor) -> Item:
    if not leaf.sizes:
        return Item("copied", tuple(value.shape), value.dtype, like=value.detach())
    return Item("cut", tuple(value.shape), value.dtype, leaf.dim, leaf.sizes)


def _parameter_item(parameter: nn.Parameter, is_sparse: bool) -> Item:
    shape = tuple(parameter.shape)
    return Item("copied", shape, parameter.dtype, like=parameter.detach(), is_sparse=is_sparse)


def _elements(leaf: Leaf, chunk: int) -> list[Any]:
    """A chunk's elements of a list."""
    start = sum(leaf.sizes[:chunk])
    return list(leaf.value[start : start + leaf.sizes[chunk]])


def _marked(adoption: Adoption, piece: Any, device_id: int) -> Any:
    """A piece, its tensors on the chunk's device."""
    return map_tensors(lambda tensor: adoption.mark(tensor, device_id), piece)


def _state_checksum(wrapped: Wrapped) -> int:
    """A 63-bit checksum of all parameters and buffers."""
    total = 0
    for tensor in (*wrapped.replicas.parameters, *wrapped.buffers.tensors()):
        total = (total * 1_000_003 + int(tensor_checksum(tensor))) % 2**63
    return total


def _check_watched(adoption: Adoption, rows: Sequence[Sequence[int]]) -> None:
    """Raises if the ranks called the forward with other inputs, parameters or random states."""
    for column, what in ((5, "the inputs"), (6, "the parameters"), (7, "the random generators"), (8, "the forwards")):
        if len({row[column] for row in rows}) > 1:
            number = rows[adoption.rank][column]
            adoption.drifted(f"{what} of a wrapped forward differ between the ranks", f"{number:x} at {script_line()}")


def _speak(adoption: Adoption, said: bytes, sizes: Sequence[int], last_chunk: int) -> None:
    """Prints on rank 0 what the chunks of all ranks printed, in their order, up to the one that failed."""
    if not any(sizes):
        return
    rows = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else torch.empty(0, dtype=torch.uint8)
    gathered = adoption.communicator.gather_rows(rows.view(-1, 1), sizes).view(-1).split(list(sizes))
    if adoption.rank == 0:
        entries = [entry for part in gathered if part.numel() for entry in pickle.loads(bytes(part.tolist()))]
        output.replay([(stream, text) for chunk, stream, text in entries if chunk <= last_chunk])


def _say_lost(adoption: Adoption, lost: set[str]) -> None:
    """Says once that attributes written by the forward are gone."""
    if lost:
        adoption.notice(
            f"{', '.join(sorted(lost)[:5])}: written inside the wrapped forward, and lost after it, as with torch's "
            "DataParallel on several devices; return the value, or register a buffer"
        )
