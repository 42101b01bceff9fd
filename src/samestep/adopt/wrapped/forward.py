"""The wrapped forward: this rank's chunks of it, and what they make together, on every rank."""

import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.adopt import output, seeding
from samestep.adopt.adoption import Adoption
from samestep.adopt.site import script_line
from samestep.adopt.wrapped.buffers import Buffers
from samestep.adopt.wrapped.chunks import Chunks, Leaf, cut, deal
from samestep.adopt.wrapped.regions import Item, Region, enter
from samestep.adopt.wrapped.replicas import Replicas, check_in_place_state, in_place_state, uninitialized
from samestep.adopt.wrapped.results import Results, gather_results
from samestep.data.batch import checksum, tensor_checksum
from samestep.data.nested import map_tensors
from samestep.engine.buffers import refuse_sync_batchnorm
from samestep.errors import PeerLostError, UsageError
from samestep.plan.seeds import derive_seed
from samestep.plan.tree import rank_blocks

CHUNK_STREAM = 2**33  # apart from the streams of train steps and loaders
CHECKED_FORWARDS = 3
CHECKED_EVERY = 50
OK, RAISED = 0, 1


@dataclass
class Wrapped:
    """What is remembered about a wrapped module from one forward to the next."""

    replicas: Replicas
    buffers: Buffers
    num_forwards: int = 0

    def is_careful(self) -> bool:
        """Whether this forward is one of those that are checked at length."""
        return self.num_forwards < CHECKED_FORWARDS or self.num_forwards % CHECKED_EVERY == 0


@dataclass
class Work:
    """What this rank's chunks came to."""

    results: Results
    said: list[tuple[int, int, str]] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    failed_chunk: int = 0
    error: Exception | None = None


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


def sharded_forward(
    adoption: Adoption,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    num_shards: int,
    dim: int = 0,
    scatter: str = "tensors",
    device_ids: Sequence[int] = (),
    output_device: int = 0,
) -> Any:
    """Runs a module's forward in chunks, shared out over the ranks. Tier `bitwise` in the number of ranks.

    With one shard, inside another wrapped forward, or off the script's main thread the module is simply called.

    Args:
        adoption: of this process.
        module: whose forward.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_shards: V; chunks are cut as `torch.chunk` does.
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
    if num_shards == 1 or not adoption.may_meet():
        return module(*args, **kwargs)
    seeding.say_seed(adoption)
    with torch._C.DisableTorchFunction():  # virtual devices look on from inside the chunks only
        wrapped = _wrapped(adoption, module)
        chunks = cut(args, kwargs, num_shards, dim, scatter)
        ranges = deal(chunks.num_chunks, adoption.world_size)
        entrance = _enter(adoption, wrapped.replicas, chunks, ranges)
        state = zlib.crc32(torch.default_generator.get_state().numpy().tobytes())
        since = adoption.num_since_reseed
        wrapped.buffers.begin()
    work = Work(Results(entrance.region.device))
    ids = [device_ids[chunk % len(device_ids)] if device_ids else chunk for chunk in range(chunks.num_chunks)]
    with adoption.generators.preserved():
        _run_chunks(adoption, module, wrapped, chunks, entrance, work, ids, derive_seed(state, CHUNK_STREAM, since))
    with torch._C.DisableTorchFunction():
        careful = wrapped.is_careful()
        watched = [checksum([args, dict(kwargs)]), _parameters_checksum(wrapped.replicas)] if careful else [0, 0]
        said = pickle.dumps(work.said) if work.said else b""
        status = [OK if work.error is None else RAISED, work.failed_chunk, len(said)]
        own_words = [*status, *wrapped.buffers.touched, *watched, state, since, *work.results.words()]
        rows, parts = adoption.hand_out("a wrapped forward", own_words, work.results.packed(adoption.world_size))
        adoption.num_forwards += 1
        adoption.num_since_reseed += 1
        wrapped.num_forwards += 1
        _check_watched(adoption, rows)
        failure = min(((row[1], rank) for rank, row in enumerate(rows) if row[0] == RAISED), default=None)
        _speak(adoption, said, [row[2] for row in rows], chunks.num_chunks if failure is None else failure[0])
        if failure is not None:
            _raise_together(adoption, work, *failure)
        num_rows = sum(chunks.num_rows(chunk) for chunk in range(chunks.num_chunks))
        touched = [[row[3], row[4], max(num_rows, 1)] for row in rows]
        wrapped.buffers.merge(adoption, touched, rank_blocks(ranges, chunks.num_chunks))
        _say_lost(adoption, work.lost)
        words = [(row[9], row[10]) for row in rows]
        value = gather_results(adoption, work.results, words, parts, dim, entrance.region, entrance.token)
        return map_tensors(lambda tensor: adoption.mark(tensor, output_device), value)


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
    versions = wrapped.replicas.versions()
    try:
        for position, chunk in enumerate(entrance.region.mine):
            work.failed_chunk = chunk
            adoption.generators.seed(derive_seed(seed, chunk))
            pieces = [_marked(adoption, column[position], ids[chunk]) for column in entrance.inputs]
            args, kwargs = chunks.arguments(pieces)
            stand_ins = {
                number: adoption.mark(column[position], ids[chunk]) for number, column in entrance.stand_ins.items()
            }
            copied = wrapped.buffers.copied(adoption, chunk, ids[chunk], chunks.num_rows(chunk), wrapped.is_careful())
            swapped = wrapped.replicas.swapped(stand_ins, work.lost)
            place = adoption.on_device(ids[chunk])
            with _listening(adoption, chunk, work), adoption.chunk(chunk), place, copied, swapped:
                before = in_place_state(wrapped.replicas.modules) if wrapped.is_careful() else {}
                result = module(*args, **kwargs)
                if before:
                    check_in_place_state(before, in_place_state(wrapped.replicas.modules))
            with torch._C.DisableTorchFunction():
                work.results.add(result)
                wrapped.replicas.check_unwritten(versions)
        if wrapped.is_careful() and torch.is_grad_enabled():
            tracked = [leaf for leaves in work.results.leaves for leaf in leaves if leaf.requires_grad]
            wrapped.replicas.check_graph(tracked, entrance.token)
    except Exception as error:
        work.error = error


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
    if isinstance(known, Wrapped) and known.replicas.is_current(module):
        return known
    refuse_sync_batchnorm(module)
    if uninitialized(module):
        raise UsageError(
            "the wrapped model has lazy layers that have not seen an input: run one forward of the plain model before "
            "wrapping it, as torch's DataParallel demands too"
        )
    wrapped = Wrapped(Replicas(module), Buffers(module))
    adoption.wrapped[module] = wrapped
    return wrapped


def _enter(adoption: Adoption, replicas: Replicas, chunks: Chunks, ranges: tuple[range, ...]) -> Entrance:
    """Cuts the arguments, and makes stand-ins for the parameters."""
    device = adoption.communicator.device
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
    region = Region(adoption, ranges, tuple(entering), device)
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


def _parameters_checksum(replicas: Replicas) -> int:
    """A 63-bit checksum of all parameters."""
    total = 0
    for parameter in replicas.parameters:
        total = (total * 1_000_003 + int(tensor_checksum(parameter))) % 2**63
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


def _raise_together(adoption: Adoption, work: Work, chunk: int, rank: int) -> None:
    """Raises on every rank what the first failed chunk raised."""
    if adoption.world_size == 1:
        assert work.error is not None, "somebody raised"
        raise work.error
    data = None
    if adoption.rank == rank:
        assert work.error is not None, "this rank raised"
        try:
            data = pickle.dumps(work.error)
            pickle.loads(data)
        except Exception:  # whatever the script's own exception raises when it is copied
            data = pickle.dumps(RuntimeError(f"{type(work.error).__name__}: {work.error}"))
    copy = pickle.loads(adoption.share("the failure of a wrapped forward", data, rank))
    if adoption.rank == rank:
        assert work.error is not None, "this rank raised"
        raise work.error
    raise copy from PeerLostError(f"chunk {chunk} raised it on rank {rank}", (rank,))


def _say_lost(adoption: Adoption, lost: set[str]) -> None:
    """Says once that attributes written by the forward are gone."""
    if lost:
        adoption.notice(
            f"{', '.join(sorted(lost)[:5])}: written inside the wrapped forward, and lost after it, as with torch's "
            "DataParallel on several devices; return the value, or register a buffer"
        )
