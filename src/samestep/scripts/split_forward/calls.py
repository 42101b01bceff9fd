"""Calls: chunks of a module's forward and their derivatives, as the driver and every worker compute them.

A call is what one process computes of a forward, or of a derivative of one: of each of its chunks the leaves that
entered and the results that left. A derivative of a call is a call again, so that gradients have gradients.

Driver and workers run the same two functions, `run_chunks` and `differentiate`, and so have the same bits. A chunk's
graph begins at leaves of its own, made of the pieces of the arguments and of the parameters (stand-ins, which share the
memory of these), and ends at its results: a backward of a chunk touches nothing that another chunk has. What happens to
the whole (joining, merging, the sums over all processes) is the caller's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing

from samestep.comm.buckets import make_buckets
from samestep.comm.communicator import Communicator
from samestep.core.seeds import derive_seed
from samestep.data.checksums import checksum
from samestep.data.nested import map_tensors
from samestep.engine.diagnosis import explain_lone_sample
from samestep.engine.kernel_flags import num_shortages
from samestep.engine.side_effects import Watch
from samestep.errors import DeterminismError
from samestep.patch import Patch, applied
from samestep.scripts import output
from samestep.scripts.backward import check_memory, generator_state
from samestep.scripts.script_state import ScriptState
from samestep.scripts.split_forward.chunks import Chunks
from samestep.scripts.split_forward.compare import HOOKS, without_objects
from samestep.scripts.split_forward.pieces import BUCKET_BYTES, Item, PieceSums, Results, content
from samestep.scripts.split_forward.replicas import (
    Buffers,
    OwnGenerators,
    Replicas,
    check_in_place_state,
    in_place_state,
)

DRAWN = (
    "random numbers were drawn in the backward of a wrapped forward (by a hook, by a custom Function, or by "
    "checkpointing with preserve_rng_state=False): they would depend on which device runs which chunk. Draw them in "
    "the forward"
)


@dataclass(frozen=True)
class Forward:
    """What all processes know of a forward."""

    number: int  # of the call
    chunks: Chunks  # of the arguments, whose leaves have no values
    ranges: tuple[range, ...]  # the chunks of each rank
    tracked: tuple[int, ...]  # the leaves of the arguments that require gradients
    entering: tuple[Item, ...]  # these, as items
    trained: tuple[int, ...]  # the parameters that do, by their numbers
    ids: tuple[int, ...]  # the device of each chunk
    seed: int
    is_careful: bool  # checked at length
    is_root: bool  # the script has not wrapped the module: its hooks see the whole batch, objects cannot be joined
    records: bool  # whether gradients are wanted
    place: int  # how many forwards came before


def planned(task: Forward) -> Forward:
    """A forward but for what each has of its own: the same for forwards of equal arguments."""
    # The workers keep the last plan of each module, and get another only if it differs. The template,
    # whose values may not compare, is pickled and compared beside it.
    return replace(task, number=0, seed=0, place=0, chunks=replace(task.chunks, template=None))


@dataclass(frozen=True)
class Derivative:
    """What all processes know of a derivative of a call."""

    call: int  # the call whose derivative it is
    number: int | None  # of the call that it is itself, if it has a derivative
    given: tuple[int, ...]  # the results whose gradients are given
    items: tuple[Item, ...]  # of these gradients
    ranges: tuple[range, ...]  # the chunks of each rank
    keeps: bool  # whether the graph is needed again
    is_careful: bool  # whether checksums of the gradients are compared
    is_watched: bool  # whether draws from the generators of NumPy and Python are looked for


@dataclass
class ChunkCall:
    """One chunk of a call."""

    inputs: list[Tensor]  # leaves
    outputs: list[Tensor | None]  # those that require gradients
    # Puts the stand-ins in place for a backward, if a custom Function is in the graph, which may call backward itself.
    placed: Callable[[], AbstractContextManager[None]] | None = None


@dataclass
class Call:
    """What this process has of a call."""

    chunks: dict[int, ChunkCall]
    items: tuple[Item, ...]  # of the inputs
    has_derivative: bool = False  # or is one


@dataclass
class Work:
    """What this process has computed of a forward."""

    results: Results
    said: list[tuple[int, int, Any]] = field(default_factory=list)  # (chunk, stream, text)
    lost: set[str] = field(default_factory=set)  # attributes that a chunk has written
    failed_chunk: int = 0
    error: BaseException | None = None
    calls: dict[int, ChunkCall] = field(default_factory=dict)


@dataclass
class Split:
    """A split module between two forwards, in any process."""

    replicas: Replicas
    buffers: Buffers
    generators: OwnGenerators

    @classmethod
    def of(cls, module: nn.Module, generators: Sequence[Any]) -> "Split":
        """A new one, held; `generators` are further ones from which the forward may draw."""
        made = cls(Replicas(module), Buffers(module), OwnGenerators([module], generators))
        held = made.hold(module)
        assert held, "a module has the children that it has"
        return made

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

    def items(self, task: Forward, device: torch.device) -> tuple[Item, ...]:
        """The items of all that enters a forward: inputs that require gradients, then parameters."""
        weights = [(number, self.replicas.parameters[number].detach()) for number in task.trained]
        own = [
            Item(
                *("copied", tuple(weight.shape), weight.dtype),
                like=weight if weight.device == device else None,
                is_sparse=number in self.replicas.sparse,
            )
            for number, weight in weights
        ]
        return with_likes((*task.entering, *own), device)


def with_likes(items: Sequence[Item], device: torch.device) -> tuple[Item, ...]:
    """The items, those that every chunk has whole with a tensor of that form, on the device, which takes no memory."""
    return tuple(
        replace(item, like=torch.empty((), dtype=item.dtype, device=device).expand(item.shape))
        if item.kind == "copied" and item.like is None
        else item
        for item in items
    )


def run_chunks(
    script: ScriptState,
    module: nn.Module,
    split: Split,
    task: Forward,
    mine: Sequence[int],
    pieces: Sequence[Sequence[Any]],
    put_back: Callable[[], None],
    captures: bool,
) -> Work:
    """Runs chunks one after another, up to the first that raises.

    Args:
        script: the state of this process.
        module: the module, as it is in this process.
        split: the same, held.
        task: the forward.
        mine: the chunks.
        pieces: of each leaf of the arguments, by chunk.
        put_back: undoes what a chunk has changed of what its code refers to, or raises.
        captures: whether output is kept, to be printed in the order of the chunks.
    """
    work, replicas = Work(Results(script.communicator.device)), split.replicas
    passed = OwnGenerators([task.chunks.template])
    states, shortages = replicas.states(task.is_careful), num_shortages(script.communicator.device)
    # Autograd numbers its nodes as they are made: one with a smaller number than this was made outside of the chunks.
    oldest = (torch.zeros((), requires_grad=True) * 1).grad_fn if task.is_careful else None
    try:
        with (
            # The chunks leave no draw behind, so that the script's own draws do not depend on how many chunks run here.
            split.generators.preserved(),
            passed.preserved(),
            script.generators.preserved(),
            _graph_of_its_own(),
            applied([NOT_REENTRANT]),
            torch.set_grad_enabled(task.records),
        ):
            for position, chunk in enumerate(mine):
                work.failed_chunk = chunk
                taken = [column[position] for column in pieces]
                # What a chunk has changed is put back before the next one: on another process it would not be there.
                _run_chunk(script, module, split, task, chunk, taken, work, states, captures, passed)
                put_back()
            check_memory(script, shortages, f"wrapped forward {task.place} on {name_of(script)}")
            if oldest is not None and task.records:
                results = [leaf for call in work.calls.values() for leaf in call.outputs if leaf is not None]
                entered_ids = {id(leaf) for call in work.calls.values() for leaf in call.inputs}
                replicas.check_graph(results, oldest._sequence_nr(), entered_ids)
    except BaseException as error:  # whatever the forward raises: workers have their chunks of it, too
        work.error = _explained(error, module, task, work.failed_chunk)
    return work


def _run_chunk(
    script: ScriptState,
    module: nn.Module,
    split: Split,
    task: Forward,
    chunk: int,
    pieces: list[Any],
    work: Work,
    states: Sequence[tuple[int, ...]],
    captures: bool,
    passed: OwnGenerators,
) -> None:
    """Runs one chunk; `states` are the states of the parameters before, `passed` generators among the arguments."""
    replicas, chunks = split.replicas, task.chunks
    seed = derive_seed(task.seed, chunk)
    script.generators.seed(seed)
    split.generators.seed(seed)
    passed.seed(seed)
    entered, stand_ins, args, kwargs = _entering(script, replicas, task, chunk, pieces)
    # Writes in place are found by looking at everything, which is done in careful forwards alone.
    before = None
    if task.is_careful:
        before = in_place_state(replicas.modules), checksum(chunks.template), content((args, kwargs))
    applications: list[Any] = []
    with ExitStack() as stack:
        stack.enter_context(applied([_noting_functions(applications)]))
        # All around runs without torch functions; the script's code needs the mode that shows it simulated devices.
        stack.enter_context(torch._C._EnableTorchFunction())
        if captures:
            stack.enter_context(_captured(chunk, work.said))
        stack.enter_context(script.chunk(chunk))
        stack.enter_context(script.on_device(task.ids[chunk]))
        rows = chunks.num_rows(chunk)
        stack.enter_context(split.buffers.copied(script, chunk, task.ids[chunk], rows, task.is_careful))
        # Within `copied`: this puts attributes back, and leaves the buffers' values, which `copied` reads afterwards.
        stack.enter_context(replicas.swapped(stand_ins, work.lost))
        if task.is_root:
            stack.enter_context(_without_hooks(module))
        result = module(*args, **kwargs)
        if task.is_root:
            result = without_objects(result)
        if before is not None:
            check_in_place_state(before[0], in_place_state(replicas.modules))
    # A module that the script has not wrapped may have its results anywhere; a wrapper gathers them on its device.
    work.results.add(result, moves=not task.is_root)
    replicas.check_unwritten(states, task.is_careful)
    if before is not None:
        _check_arguments(before[1], checksum(chunks.template))
        if task.is_root and content((args, kwargs)) != before[2]:
            raise DeterminismError(
                "an argument was written inside the wrapped forward, of which every chunk has a copy; return the value"
            )
    leaves = work.results.leaves[-1]
    work.calls[chunk] = ChunkCall(entered, [leaf if leaf.requires_grad else None for leaf in leaves])
    if applications:
        children = [child for _, child in replicas.modules]
        work.calls[chunk].placed = partial(replicas.placed, children, stand_ins)


def _explained(error: BaseException, module: nn.Module, task: Forward, chunk: int) -> BaseException:
    """The error of a chunk, or one that says more if it comes of a chunk's single row."""
    chunks = task.chunks
    if chunks.num_rows(chunk) != 1:
        return error
    num_rows = sum(map(chunks.num_rows, range(chunks.num_chunks)))
    where = f"of the {num_rows} rows of wrapped forward {task.place} chunk {chunk} (of {chunks.num_chunks})"
    return explain_lone_sample(error, module, where, "cut batches into fewer chunks (--logical-devices)") or error


def _check_arguments(before: int, now: int) -> None:
    """Raises if a chunk changed arrays among its arguments, which all chunks of this process share."""
    if before != now:
        raise DeterminismError(
            "an array, list or number among the arguments was changed inside the wrapped forward; chunks that run on "
            "other devices would not see it. Pass a copy, or return the value"
        )


def _checkpointed(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Reentrant checkpointing in the other form: a backward in a backward would miss the gradients of stand-ins."""
    checkpointing.check_backward_validity(args)
    if any(isinstance(each, Tensor) and each.requires_grad for each in args):
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
        return checkpointing.checkpoint(function, *args, **options)
    with torch.no_grad():  # its results have no gradients unless an argument has
        return function(*args)


def _noting_functions(found: list[Any]) -> Patch:
    """Notes uses of Functions that are written in Python, but for torch's own."""
    apply = vars(torch.autograd.Function)["apply"].__func__

    def noted(kind: type, *args: Any, **kwargs: Any) -> Any:
        if not kind.__module__.startswith("torch."):
            found.append(kind)
        return apply(kind, *args, **kwargs)

    return Patch(torch.autograd.Function, "apply", classmethod(noted))


NOT_REENTRANT = Patch(checkpointing.CheckpointFunction, "apply", staticmethod(_checkpointed))


def name_of(script: ScriptState) -> str:
    """The name of this process for the user, by its device."""
    device = script.communicator.device
    return f"CPU worker {script.rank_in_run}" if device.type == "cpu" else str(device)


def _entering(
    script: ScriptState, replicas: Replicas, task: Forward, chunk: int, leaves: list[Any]
) -> tuple[list[Tensor], dict[int, Tensor], tuple[Any, ...], dict[str, Any]]:
    """What enters a chunk: the leaves of its graph, the stand-ins of parameters, and the arguments."""
    entered, stand_ins, index = [], {}, task.ids[chunk]
    for number in task.tracked:
        leaf = leaves[number].detach().requires_grad_()
        entered.append(leaf)
        leaves[number] = leaf.clone()  # which the forward may write to
    for number in task.trained:
        weight = replicas.parameters[number].detach()
        # A leaf on the parameter's memory: its gradient ends here, and reaches `.grad` as a sum over all chunks only.
        stand_in = (weight.clone() if weight.ndim == 0 else weight).requires_grad_()
        entered.append(stand_in)
        stand_ins[number] = script.mark(stand_in, index)
    marked = [map_tensors(lambda tensor: script.mark(tensor, index), leaf) for leaf in leaves]
    args, kwargs = task.chunks.arguments(marked, chunk)
    return entered, stand_ins, args, kwargs


def differentiate(
    script: ScriptState,
    call: Call,
    task: Derivative,
    mine: Sequence[int],
    pieces: Sequence[Sequence[Tensor]],
    sums: PieceSums | None,
    guard: Callable[[], Callable[[], None]],
    said: list[tuple[int, int, Any]] | None = None,
) -> tuple[Call, list[list[Tensor | None]], list[int]]:
    """Differentiates chunks one after another.

    Args:
        script: the state of this process.
        call: the call.
        task: its derivative.
        mine: the chunks.
        pieces: of each given gradient, by chunk.
        sums: take the gradients of what every chunk had whole.
        guard: protects the module's buffers from a checkpoint that repeats parts of the forward.
        said: takes what hooks print, as `Work.said`; printed at once if None.

    Returns:
        The derivative as a call, the gradients of each input that was cut, by chunk, and checksums of all, if careful.
    """
    cut = [k for k, item in enumerate(call.items) if item.kind != "copied"]
    copied = [k for k, item in enumerate(call.items) if item.kind == "copied"]
    columns: list[list[Tensor | None]] = [[] for _ in cut]
    made, checksums = Call({}, (*task.items, *call.items)), []
    # Generators must end as they began: a draw in a backward would be another one with other chunks before it.
    state, put_back = generator_state(script.generators.of_torch), guard()
    others = checksum(Watch().states()) if task.is_watched else None
    shortages = num_shortages(script.communicator.device)
    try:
        with script.on_this_rank(), applied([NOT_REENTRANT]), torch.enable_grad():
            for position, chunk in enumerate(mine):
                part, given = call.chunks[chunk], [column[position].detach() for column in pieces]
                if task.number is not None:
                    given = [gradient.requires_grad_() for gradient in given]
                # Not those that have a derivative or whose checksums are wanted, or that another backward adds to.
                collector = sums if task.number is None and not task.is_careful and part.placed is None else None
                leaves = [part.inputs[k] for k in copied]
                with (
                    nullcontext() if said is None else _captured(chunk, said),
                    nullcontext() if collector is None else collector.collecting(chunk, leaves),
                ):
                    gradients = _gradients(part, task, given)
                plain = [None if gradient is None else gradient.detach() for gradient in gradients]
                if task.number is not None:
                    outputs = [g if g is not None and g.requires_grad else None for g in gradients]
                    made.chunks[chunk] = ChunkCall([*given, *part.inputs], outputs)
                for column, k in zip(columns, cut, strict=True):
                    column.append(plain[k])
                if task.is_careful:
                    checksums.append(checksum([g.to_dense() if g is not None and g.is_sparse else g for g in plain]))
                if sums is not None and collector is None:
                    sums.push_chunk(chunk, [plain[k] for k in copied])
    finally:
        put_back()
    check_memory(script, shortages, f"the backward of a wrapped forward on {name_of(script)}")
    # Those of NumPy and Python, which take longer to read, after careful forwards alone.
    if state != generator_state(script.generators.of_torch) or (
        others is not None and others != checksum(Watch().states())
    ):
        raise DeterminismError(DRAWN)
    return made, columns, checksums


def _gradients(part: ChunkCall, task: Derivative, given: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of the inputs of a chunk, by the gradients of its results."""
    pairs = [(out, grad) for k, grad in zip(task.given, given, strict=True) if (out := part.outputs[k]) is not None]
    if not pairs:
        return [None] * len(part.inputs)
    results, seeds = zip(*pairs, strict=True)
    with torch._C._EnableTorchFunction():
        # With `create_graph` torch retains the graph too.
        options = {"create_graph": True} if task.number is not None else {"retain_graph": task.keeps}
        with part.placed() if part.placed is not None else nullcontext():
            gradients: list[Tensor | None] = list(
                torch.autograd.grad(results, part.inputs, seeds, allow_unused=True, **options)
            )
    for k, leaf in enumerate(part.inputs):
        if leaf.grad is not None:  # a backward within the backward has left it
            first = gradients[k]
            gradients[k], leaf.grad = leaf.grad if first is None else first + leaf.grad, None
    return gradients


def make_sums(communicator: Communicator, items: Sequence[Item], ranges: Sequence[range]) -> PieceSums | None:
    """The sums, for the driver, of the gradients of items that every chunk has whole; None if there is no such item."""
    likes = [item.like for item in items if item.like is not None]
    buckets = make_buckets(likes, BUCKET_BYTES, communicator.world_size) if likes else ()
    # The driver alone puts them into the script's graph.
    return PieceSums(communicator, ranges, likes, buckets, at_first=True) if likes else None


def summed(sums: PieceSums | None) -> tuple[list[bool], list[Tensor]]:
    """Of each item whether a chunk of this process has used it, and its sum over all processes, which call this."""
    if sums is None:
        return [], []
    # All processes sum all buckets: which items others have used is known only when their answers are read, after this.
    used, sums.used = sums.used, [True] * len(sums.used)
    return used, [total for total in sums.finish() if total is not None]


@contextmanager
def _graph_of_its_own() -> Iterator[None]:
    """Keeps the script's hooks on saved tensors, as of a checkpoint around the module, away from the chunks."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


@contextmanager
def _captured(chunk: int, into: list[tuple[int, int, Any]]) -> Iterator[None]:
    """Captures the output of a chunk."""
    with output.captured() as said:
        try:
            yield
        finally:
            into += [(chunk, stream, text) for stream, text in said]


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Runs a chunk without the root's hooks."""
    before = {name: module.__dict__[name] for name in HOOKS}
    module.__dict__.update({name: type(table)() for name, table in before.items()})
    try:
        yield
    finally:
        module.__dict__.update(before)
