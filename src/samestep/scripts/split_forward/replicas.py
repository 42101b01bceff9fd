"""Replicas: the wrapped module with other tensors in the places of its parameters and buffers while a chunk runs.

As with `torch.func.functional_call` the module itself runs; `isinstance(w, nn.Parameter)` stays true inside. Attributes
that a chunk writes are restored, as they are lost with the replicas of torch's DataParallel: the next chunk, which may
run on another rank, must not see them.

`Replicas` has the parameters' places, `Buffers` the buffers', `ModuleState` everything else. What cannot be put back is
an error that names it: a parameter that was written, a tensor or list that was changed in place, a gradient that would
leave the chunk by another way than its leaves (`check_graph`). Between two forwards nothing here refers to the module
itself, only to its parameters: a model that the script drops is free at once.
"""

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from samestep.comm.reduction import fold
from samestep.core.tree import Block, TreeSum
from samestep.data.checksums import flattened, tensor_checksum, version_of
from samestep.data.randomness import seed_each
from samestep.engine.buffers import BufferPlace, in_wide, is_mean_buffer, put_means
from samestep.engine.side_effects import Watch, plain_attributes, reachable
from samestep.errors import BufferMergeError, DeterminismError, UsageError
from samestep.scripts.script_state import ScriptState

SMALL_BYTES = 2**20
ACCUMULATE = "torch::autograd::AccumulateGrad"
REENTRANT = "CheckpointFunctionBackward"


class Buffers:
    """The buffers of one wrapped module: every chunk has its own copies, which are merged after the forward."""

    # The running statistics of BatchNorm and InstanceNorm end as the row-weighted mean over all chunks, summed in
    # float64 on the tree, as in a step of the engine. Any other buffer takes the value of the first chunk, as with
    # torch's DataParallel, where the engine would refuse chunks that differ. And where the engine restores one buffer
    # before each microbatch, a chunk has copies: its backward comes later than the next chunk's forward, and its graph
    # may hold on to a buffer that this must find as it was.

    def __init__(self, module: nn.Module) -> None:
        # A place is the number of a child and the key in its table. Between forwards nothing refers to the children.
        self._places: list[tuple[int, str, str, bool]] = []
        for index, (prefix, child) in enumerate(module.named_modules()):
            for key, buffer in child._buffers.items():
                if buffer is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    self._places.append((index, key, name, is_mean_buffer(child, key)))
        self._means: list[BufferPlace] = []
        self._others: list[BufferPlace] = []
        self._changing: set[str] = set()
        self._sum: TreeSum[Tensor] = TreeSum(Tensor.add_)
        self._ends: dict[int, Tensor] = {}  # by the numbers of their places

    def begin_forward(self, children: Sequence[nn.Module]) -> None:
        """Starts a forward of a module with these children, itself the first."""
        self._means = [BufferPlace(children[i], key, name) for i, key, name, is_mean in self._places if is_mean]
        self._others = [BufferPlace(children[i], key, name) for i, key, name, is_mean in self._places if not is_mean]
        self._sum = TreeSum(Tensor.add_)
        self._ends = {}

    def release(self) -> None:
        """Drops the references to the children."""
        self._means, self._others, self._ends = [], [], {}

    def tensors(self) -> list[Tensor]:
        """All buffers that are there, of the module of this forward."""
        return [buffer for place in (*self._means, *self._others) if (buffer := place.get()) is not None]

    def guard(self, children: Sequence[nn.Module]) -> Callable[[], Callable[[], None]]:
        """A function that puts copies in the places of these children's buffers, until the call that it returns.

        Activation checkpointing runs parts of a chunk again in its backward, on the rank that ran it.
        """

        def shield() -> Callable[[], None]:
            places = [BufferPlace(children[index], key, name) for index, key, name, _ in self._places]
            kept = [
                (place, buffer)
                for place in places
                if (buffer := place.get()) is not None and (place.module.training or place.name in self._changing)
            ]
            for place, buffer in kept:
                place.put(buffer.detach().clone())

            def put_back() -> None:
                for place, buffer in kept:
                    place.put(buffer)

            return put_back

        return shield

    @contextmanager
    def copied(
        self, script: ScriptState, chunk: int, device_id: int, num_rows: int, all_of_them: bool
    ) -> Iterator[None]:
        """Runs a chunk with copies in the places of the buffers."""
        means = [place for place in self._means if place.module.training and place.get() is not None]
        others = [place for place in self._others if place.get() is not None]
        originals = {place: buffer for place in (*means, *others) if (buffer := place.get()) is not None}
        versions = {place: version_of(buffer) for place, buffer in originals.items()}
        for place, buffer in originals.items():
            # A large buffer of a module in evaluation mode, a table say, that no forward was seen to change is shared,
            # since a copy costs its size. If it is written after all, `_keep_first` raises.
            small = buffer.numel() * buffer.element_size() <= SMALL_BYTES
            if small or all_of_them or place.module.training or place in means or place.name in self._changing:
                place.put(script.mark(buffer.detach().clone(), device_id))
        copies = {place: place.get() for place in originals}
        try:
            yield
            if means:
                left = [buffer for place in means if (buffer := place.get()) is not None]
                self._sum.push(Block(chunk, 1), in_wide(left, script.communicator.device) * num_rows)
            for index, place in enumerate(self._others):
                if place in originals:
                    self._keep_first(index, place, originals[place], copies[place], versions[place], chunk)
        finally:
            for place, buffer in originals.items():
                place.put(buffer)

    @property
    def sums(self) -> list[Tensor]:
        """The sums of the running statistics of this process's chunks, a vector a block."""
        return list(self._sum.sums)

    def put_ends(self, device: torch.device) -> None:
        """Writes the values of other buffers that the first chunk has changed."""
        for index, end in self._ends.items():
            place = self._others[index]
            target = place.get()
            if target is None or target.shape != end.shape or target.dtype != end.dtype:
                place.put(end.to(device))
            else:
                target.data.copy_(end)

    def put_means(self, sums: Sequence[Tensor], blocks: Sequence[Block], num_rows: int) -> None:
        """Writes the mean over all rows of the running statistics, from the sum of each block."""
        there = [buffer for place in self._means if place.module.training and (buffer := place.get()) is not None]
        merged = fold(blocks, list(sums)) / num_rows
        for buffer, value in zip(there, merged.split([each.numel() for each in there]), strict=True):
            put_means([buffer.data], value)

    def _keep_first(
        self, index: int, place: BufferPlace, original: Tensor, copy: Tensor | None, version: int, chunk: int
    ) -> None:
        """Keeps the first chunk's value of a buffer that has no rule."""
        end = place.get()
        if end is original:
            if version_of(original) != version:
                raise BufferMergeError(
                    f"buffer {place.name} was changed inside the wrapped forward for the first time after many that "
                    "left it alone; change it in every forward, or outside"
                )
            return
        # NaN equals itself here: what counts is whether the chunk has written anything.
        if end is copy and end is not None and (end.dtype, end.shape) == (original.dtype, original.shape):
            ours, before = flattened(end).view(torch.uint8), flattened(original).view(torch.uint8)
            if torch.equal(ours, before):
                return
        self._changing.add(place.name)
        # Chunk 0 is the driver's: what it leaves is in no message.
        if chunk == 0 and end is not None:
            self._ends[index] = end.detach().clone()


class Replicas:
    """A wrapped module's places for parameters and attributes."""

    def __init__(self, module: nn.Module) -> None:
        _refuse_scripted(module)
        self.modules: tuple[tuple[str, nn.Module], ...] = ()
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self.sparse: set[int] = set()
        self._prefixes: list[str] = []
        self._identities: list[int] = []
        self._slots: list[tuple[int, str, int]] = []
        numbers: dict[int, int] = {}
        for index, (prefix, child) in enumerate(module.named_modules()):
            self._prefixes.append(prefix)
            self._identities.append(id(child))
            for key, parameter in child._parameters.items():
                if parameter is None:
                    continue
                # A tied weight is in several places: they get one stand-in, whose gradient is the sum of all uses.
                if id(parameter) not in numbers:
                    numbers[id(parameter)] = len(self.parameters)
                    self.parameters.append(parameter)
                    self.names.append(f"{prefix}.{key}" if prefix else key)
                self._slots.append((index, key, numbers[id(parameter)]))
                if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
                    self.sparse.add(numbers[id(parameter)])

    def hold(self, module: nn.Module) -> bool:
        """Takes references to the module's children for a forward; false if they, or their parameters, have changed.

        Between forwards nothing here refers to them, so that a dropped model frees its memory.
        """
        children = tuple(module.modules())
        if [id(child) for child in children] != self._identities:
            return False
        count = sum(parameter is not None for child in children for parameter in child._parameters.values())
        if count != len(self._slots) or any(
            children[index]._parameters.get(key) is not self.parameters[number] for index, key, number in self._slots
        ):
            return False
        self.modules = tuple(zip(self._prefixes, children, strict=True))
        return True

    def release(self) -> None:
        """Drops the references to the children."""
        self.modules = ()

    @contextmanager
    def swapped(self, stand_ins: dict[int, Tensor], lost: set[str]) -> Iterator[None]:
        """Runs a chunk with stand-ins, by the parameter's number; adds names of attributes that it wrote to `lost`."""
        children = [child for _, child in self.modules]
        before = [ModuleState(child) for child in children]
        for number, stand_in in stand_ins.items():
            # A copy that the forward makes of a module has parameters of its own: autograd copies no result.
            stand_in.__dict__.update(_is_param=True, __deepcopy__=self.parameters[number].__deepcopy__)
        try:
            with self.placed(children, stand_ins):
                yield
        finally:
            for prefix, child, attributes in zip(self._prefixes, children, before, strict=True):
                lost |= attributes.put_back(child, prefix)

    @contextmanager
    def placed(self, children: Sequence[nn.Module], stand_ins: dict[int, Tensor]) -> Iterator[None]:
        """Runs a block with stand-ins in the places of these children's parameters."""
        # Recurrent layers keep their weights in a list as well, in the order of the kernel's arguments.
        recurrent = [child for child in children if isinstance(child, nn.RNNBase)]
        weights = [list(child._flat_weights) for child in recurrent]
        by_id = {id(self.parameters[number]): stand_in for number, stand_in in stand_ins.items()}
        places = [(children[index]._parameters, key, number) for index, key, number in self._slots]
        kept = [table.get(key) for table, key, _ in places]
        for table, key, number in places:
            if number in stand_ins:
                table[key] = stand_ins[number]  # type: ignore[assignment]
        for layer, originals in zip(recurrent, weights, strict=True):
            layer._flat_weights = [by_id.get(id(weight), weight) for weight in originals]
        placed = [layer._flat_weights for layer in recurrent]
        try:
            yield
        finally:
            for layer, originals, ours in zip(recurrent, weights, placed, strict=True):
                if layer._flat_weights is ours:
                    layer._flat_weights = originals
            for (table, key, _), parameter in zip(places, kept, strict=True):
                table[key] = parameter

    def states(self, at_length: bool) -> list[tuple[int, ...]]:
        """The version and address of each parameter, which a write changes; at length, its checksum too."""
        return [
            # A write by `.data` moves no version, and shows in the bytes alone.
            (version_of(parameter), parameter.data_ptr(), int(tensor_checksum(parameter)) if at_length else 0)
            for parameter in self.parameters
        ]

    def check_unwritten(self, states: Sequence[tuple[int, ...]], at_length: bool) -> None:
        """Raises if a parameter was written since `states` were taken."""
        for name, before, now in zip(self.names, states, self.states(at_length), strict=True):
            if before != now:
                raise DeterminismError(
                    f"parameter {name} was written to inside the wrapped forward; chunks that run on other devices "
                    "would not see it. Write it outside: after optimizer.step(), or in the training loop"
                )

    def check_graph(self, outputs: Sequence[Tensor], oldest: int, leaves: Collection[int] = ()) -> None:
        """Raises if a gradient would leave a chunk by another way than its stand-ins and inputs, `leaves` by id."""
        names = {id(parameter): name for parameter, name in zip(self.parameters, self.names, strict=True)}
        waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            name = node.name()
            if name == ACCUMULATE:
                if id(node.variable) not in leaves:
                    self._check_leaf(node, names, outputs)
            elif name == REENTRANT:
                raise DeterminismError(
                    "activation checkpointing inside the wrapped forward uses the reentrant form, which computes "
                    "gradients behind autograd's back; pass use_reentrant=False to torch.utils.checkpoint"
                )
            elif node._sequence_nr() < oldest:
                raise DeterminismError(
                    f"the wrapped forward uses a tensor that was computed outside of it ({name}) and requires grad; "
                    "its gradient would be a part only. Pass it to the forward as an input"
                )
            waiting += [following for following, _ in node.next_functions if following is not None]

    def _check_leaf(self, node: Any, names: dict[int, str], outputs: Sequence[Tensor]) -> None:
        """Raises for a leaf that lives longer than the forward: a parameter, or a tensor with another reference."""
        # Looked at before a variable of ours holds the leaf: whether a variable, a closure or a container does, and not
        # only the graph, or a call that is running.
        is_held = any(not isinstance(referrer, FrameType) for referrer in gc.get_referrers(node.variable))
        leaf: Tensor = node.variable
        if id(leaf) in names:
            raise DeterminismError(
                f"parameter {names[id(leaf)]} was used inside the wrapped forward as it is, not by the module's "
                "attribute: its gradient would be a part only. A parameter kept in a plain list, dict or closure is "
                "not seen; use nn.ParameterList, or self.weight"
            )
        if isinstance(leaf, nn.Parameter) and is_held:  # not one of a copy that the forward made and dropped
            raise DeterminismError(
                f"a parameter of shape {list(leaf.shape)} that is none of the wrapped module's was used inside its "
                "forward: its gradient would be a part only. Modules in a plain list or dict, a closure or a global "
                "are not seen; use nn.ModuleList, nn.ModuleDict, or make them attributes"
            )
        if not any(leaf is output for output in outputs) and is_held:
            held = [
                f"the attribute {name} holds a tensor"
                for name, value in plain_attributes(self.modules)
                if _holds(value, leaf)
            ]
            raise DeterminismError(
                f"{held[0] if held else f'a tensor of shape {list(leaf.shape)}, made outside of the wrapped forward,'} "
                "that requires grad and is no parameter of the wrapped module was used in it; its gradient would be a "
                "part only. Register it (nn.Parameter), or pass it to the forward as an input"
            )


class ModuleState:
    """A module's attributes, children and names of tensors before a chunk."""

    def __init__(self, child: nn.Module) -> None:
        self._entries = dict(child.__dict__)
        self._children = dict(child._modules)
        # Of these the names alone: `placed` and `copied` put the values back.
        self._tensors = (set(child._parameters), set(child._buffers))
        self._not_saved = set(child._non_persistent_buffers_set)

    def assigned(self, child: nn.Module) -> list[tuple[str, Any, Any]]:
        """The attributes that were assigned or made since, with their values before and now; not of torch's modules."""
        if type(child).__module__.startswith("torch."):
            return []
        now = child.__dict__.items()
        return [(key, self._entries.get(key), value) for key, value in now if self._entries.get(key) is not value]

    def put_back(self, child: nn.Module, prefix: str) -> set[str]:
        """Restores everything, and returns the names that the chunk wrote or made."""
        now, entries, written = child.__dict__, self._entries, set()
        if not _is_same(now, entries):
            if not type(child).__module__.startswith("torch."):  # old-style weight_norm writes its weight each time
                written |= {key for key, value in now.items() if key not in entries or entries[key] is not value}
                written |= entries.keys() - now.keys()
            # In place: torch and the script may hold the table itself.
            now.clear()
            now.update(entries)
        if not _is_same(child._modules, self._children):
            written |= child._modules.keys() ^ self._children.keys()
            child._modules.clear()
            child._modules.update(self._children)
        tables: tuple[dict[str, Any], dict[str, Any]] = (child._parameters, child._buffers)
        for table, names in zip(tables, self._tensors, strict=True):
            if len(table) != len(names):
                made = table.keys() - names
                written |= made
                for key in made:
                    del table[key]
        if child._non_persistent_buffers_set != self._not_saved:
            child._non_persistent_buffers_set.clear()
            child._non_persistent_buffers_set.update(self._not_saved)
        return {f"{prefix}.{key}" if prefix else key for key in written}


def in_place_state(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, tuple[int, int]]:
    """Versions of tensors and lengths of lists in plain attributes, which change without an assignment."""
    found: dict[str, tuple[int, int]] = {}
    for name, value in plain_attributes(modules):
        if isinstance(value, Tensor):
            found[name] = (id(value), version_of(value))
        elif type(value) is list:
            # The length is enough: entries that a chunk replaces are found by `Records`.
            found[name] = (id(value), len(value))
    return found


def check_in_place_state(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> None:
    """Raises if a tensor or list in a plain attribute was changed in place by a chunk."""
    for name, (identity, state) in before.items():
        if name in now and now[name][0] == identity and now[name][1] != state:
            raise DeterminismError(
                f"the attribute {name} was changed in place inside the wrapped forward; chunks that run on other "
                "devices would not see it. Make it a buffer (register_buffer), or return it and change it outside"
            )


def _refuse_scripted(module: nn.Module) -> None:
    """Raises for a module whose forward TorchScript runs: its parameters cannot be exchanged."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise UsageError(f"{name or 'the wrapped module'} is compiled by torch.jit; use torch.compile, or none")


def _is_same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a table still holds the very same objects, in the same order."""
    return now.keys() == before.keys() and all(map(is_, now.values(), before.values()))


def _holds(value: Any, leaf: Tensor, depth: int = 3) -> bool:
    """Whether a plain attribute is a tensor, or a list, tuple or dict that holds it."""
    if value is leaf:
        return True
    if depth and isinstance(value, list | tuple):
        return any(_holds(entry, leaf, depth - 1) for entry in value)
    if depth and isinstance(value, dict):
        return any(_holds(entry, leaf, depth - 1) for entry in value.values())
    return False


def uninitialized(module: nn.Module) -> bool:
    """Whether a lazy layer has not seen its first input yet."""
    return any(torch.nn.parameter.is_lazy(parameter) for parameter in module.parameters())


class OwnGenerators:
    """Generators that some objects refer to, and further ones: seeded for each chunk, restored afterwards."""

    def __init__(self, owners: Sequence[Any], further: Sequence[Any] = ()) -> None:
        found = {id(each): each for each in (*reachable(owners), *further)}
        self._generators: Sequence[Any] = list(found.values())

    def seed(self, seed: int) -> None:
        seed_each(self._generators, seed)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores the state of each after a block."""
        watch = Watch(self._generators, has_global=False)
        states = watch.states()
        try:
            yield
        finally:
            watch.put_states(states)
