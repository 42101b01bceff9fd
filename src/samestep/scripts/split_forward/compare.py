"""Compares a module's results on a whole batch with those on its microbatches, before its forward is cut.

Both run without gradients (with them if the forward differentiates), once for each form of the arguments. Random draws
and BatchNorm are neutral meanwhile: they depend on the microbatch by design. What remains equal can be joined, each
tensor by a rule that the comparison finds: rows one after another, or a mean or a sum over the microbatches, as of a
loss.

`compare` finds the rules (`JoinRules`), `auto_wrap` keeps them for the form of the arguments, and `JoinRules.joined`
applies them to what `chunked_forward` has put one after another. The comparison leaves no trace (`_isolated`): neither
draws, output, attributes nor buffers, so that the forward after it is the script's first one.
"""

import copy
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samestep.callsite import is_script_file
from samestep.data.checksums import flattened, lacks_bytes
from samestep.data.nested import leaves as entries_of
from samestep.engine.forward_backward import without_gradients
from samestep.engine.side_effects import CLOSED
from samestep.patch import Patch, applied
from samestep.scripts import output
from samestep.scripts.script_state import ScriptState
from samestep.scripts.split_forward.chunks import Chunks, advice, is_tensor, put_together, take_apart
from samestep.scripts.split_forward.pieces import content, describe, without_dim
from samestep.scripts.split_forward.replicas import ModuleState, OwnGenerators

IGNORED = (-100, -1, 0)  # labels that losses leave out: of transformers, of nanoGPT, and of padding or a mask
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# Of 10 bits of mantissa, which cuDNN's convolutions have by default.
TF32_TOLERANCE = 1e-2
NEAREST = 4  # how many times the error of the best rule another one may have
NOISE = 0.5
PIECE = 1 << 22  # bytes
COUNTED_DIMS = 2  # of labels and masks
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# A cache has its tensors in objects for the layers.
OBJECT_DEPTH = 3
TORCH_CALL = nn.Module.__call__  # as it is while no script runs
OWN = (*HOOKS, "_compiled_call_impl")  # attributes that the comparison sets itself


class NotSplittable(Exception):
    """The results on microbatches cannot be joined to those on the whole batch; the text says why."""


class WritesState(NotSplittable):
    """The module writes attributes or buffers that microbatches would leave with other values."""


@dataclass(frozen=True)
class Rule:
    """How a result's tensor on the whole batch comes of those on the microbatches."""

    kind: str  # "rows": joined; "same": equal in all; "sum"; "mean", weighted by `counts`
    # The weights of a mean: rows, or the entries of this leaf of the arguments that are not `ignored`.
    leaf: int | None = None
    ignored: int = 0
    is_shifted: bool = False  # without the first entry of each row, as of labels that a causal model shifts

    def weights(self, chunks: Chunks) -> list[int]:
        """The weight of each chunk, divided by the greatest common divisor: bits depend on proportions alone."""
        if self.kind == "sum":
            return [1] * chunks.num_chunks
        if self.leaf is None:
            counts = [chunks.num_rows(chunk) for chunk in range(chunks.num_chunks)]
        else:
            leaf = chunks.leaves[self.leaf]
            counted = leaf.value.movedim(leaf.dim, 0) != self.ignored
            counted = (counted[..., 1:] if self.is_shifted else counted).reshape(len(counted), -1)
            by_row = counted.sum(1).tolist()
            ends = list(itertools.accumulate(leaf.sizes))
            counts = [sum(by_row[end - size : end]) for size, end in zip(leaf.sizes, ends, strict=True)]
        divisor = math.gcd(*counts)
        return [count // divisor for count in counts] if divisor else counts


@dataclass
class JoinRules:
    """The rules that are left for each tensor of the results; one where the comparison could tell them apart."""

    rules: list[list[Rule]]
    ndims: list[int]  # of each tensor

    def is_clear(self, chunks: Chunks) -> bool:
        """Whether all rules that are left for a tensor give the same on these chunks."""
        return all(
            len(rules) == 1 or len({(rule.kind == "sum", *rule.weights(chunks)) for rule in rules}) == 1
            for rules in self.rules
        )

    def narrow(self, other: "JoinRules") -> None:
        """Keeps the rules that hold in another comparison too."""
        pairs = zip(self.rules, other.rules, strict=True)
        self.rules = [[rule for rule in ours if rule in theirs] or theirs for ours, theirs in pairs]

    def joined(self, result: Any, chunks: Chunks, dim: int) -> Any:
        """The results on the whole batch, of those that `chunked_forward` put one after another."""
        leaves, template = take_apart(result, is_tensor, dataclasses=True)
        if len(leaves) != len(self.rules):
            raise NotSplittable("it returns other tensors than in an earlier forward with like arguments")
        return put_together(
            template,
            [
                leaf if rules[0].kind == "rows" else _combined(leaf, rules[0], chunks, dim if ndim else None)
                for leaf, rules, ndim in zip(leaves, self.rules, self.ndims, strict=True)
            ],
        )


class BlockedObject:
    """An object among a forward's results that has tensors of one microbatch: it cannot be joined, only passed on."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"got .{name} of a {self._name} that a shared out forward returned, which has the tensors of one "
            "microbatch; needed: a forward that returns the tensors, or --logical-devices 1, which shares nothing out"
        )


def without_objects(result: Any) -> Any:
    """A result with a `BlockedObject` for each object that holds tensors and is no container, such as a cache."""

    def visit(entry: Any) -> Any:
        return BlockedObject(type(entry).__name__) if holds_tensors(entry) else entry

    leaves, template = take_apart(result, lambda entry: is_tensor(entry) or holds_tensors(entry), dataclasses=True)
    return put_together(template, [leaf if is_tensor(leaf) else visit(leaf) for leaf in leaves])


def holds_tensors(value: Any, depth: int = OBJECT_DEPTH) -> bool:
    """Whether an object that is no container has tensors in its attributes."""
    attributes = getattr(value, "__dict__", None)
    if (
        isinstance(value, Tensor | list | tuple | dict | type | nn.Module)
        or not isinstance(attributes, dict)
        or not depth
    ):
        return False
    if hasattr(type(value), "__dataclass_fields__"):
        return False
    return any(
        isinstance(part, Tensor) or holds_tensors(part, depth - 1)
        for entry in attributes.values()
        for part in entries_of(entry)
    )


def compare(script: ScriptState, module: nn.Module, chunks: Chunks, dim: int) -> JoinRules:
    """Finds the rules by which a module's results are joined; raises `NotSplittable` if there are none.

    Where memory does not hold the results of the whole batch, its first and last microbatch stand for it.
    """
    with _isolated(script, module, chunks.template) as run:
        found = _found(run, module, chunks, dim)
    if torch.is_grad_enabled() and not found.is_clear(chunks):
        # Where a last layer of zeros makes the losses of all microbatches alike, the rules that are left give the same
        # loss, and other gradients.
        owned = chunks.template
        with suppress(Exception), _shaken(module), _isolated(script, module, owned) as run:  # it may fail with noise
            found.narrow(_found(run, module, chunks, dim))
    return found


def _found(run: Callable[..., Any], module: nn.Module, chunks: Chunks, dim: int) -> JoinRules:
    """The rules that hold with the parameters as they are."""
    numbers = range(chunks.num_chunks)
    try:
        args, kwargs = _arguments(chunks, numbers)
        before = content((args, kwargs))
        whole, written = run(args, kwargs)
    except torch.OutOfMemoryError:
        # The last one may be smaller than the first: then a mean by rows and one of means differ.
        numbers = range(0, chunks.num_chunks, chunks.num_chunks - 1)
        args, kwargs = _arguments(chunks, numbers)
        before = content((args, kwargs))
        whole, written = run(args, kwargs)
    # Each microbatch has a copy of its part, and all of them share what has no rows: under python the script sees the
    # write, once.
    if content((args, kwargs)) != before:
        raise WritesState("its forward writes to an argument, and microbatches have copies of it")
    _check_written(module, written, {})
    parts = []
    try:
        for number in numbers:
            part, by_part = run(*_arguments(chunks, [number]))
            _check_written(module, written, by_part)
            parts.append(part)
    except WritesState:
        raise
    except Exception as error:
        hint = advice(chunks.leaves, chunks.template, dim)
        raise NotSplittable(
            f"on a microbatch it raises {type(error).__name__}: {error}{hint and '. '}{hint}"
        ) from error
    wholes, template = take_apart(whole, is_tensor, dataclasses=True)
    columns: list[list[Tensor]] = [[] for _ in wholes]
    for each in parts:
        leaves, its_template = take_apart(each, is_tensor, dataclasses=True)
        if len(leaves) != len(wholes) or describe(its_template) != describe(template):
            raise NotSplittable("it returns a structure, a number or a text that depends on the microbatch")
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    candidates = _candidates(module, chunks)

    def weights(rule: Rule) -> list[int]:
        of_all = rule.weights(chunks)
        return [of_all[number] for number in numbers]

    with torch._C.DisableTorchFunction():  # simulated devices do not matter here
        pairs = zip(wholes, columns, strict=True)
        rules = [_rules(leaf, column, candidates, weights, dim) for leaf, column in pairs]
    return JoinRules(rules, [leaf.ndim for leaf in wholes])


@contextmanager
def _shaken(module: nn.Module) -> Iterator[None]:
    """Runs a block with noise on the parameters, of the size of usual weights."""
    draws = torch.Generator().manual_seed(0)
    parameters = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch._C.DisableTorchFunction():  # simulated devices do not matter here
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=draws, device="cpu")
                # By `.data`: a graph of the script's may have saved them, and a new version would end its backward.
                parameter.data.add_(noise.to(parameter) * NOISE / math.sqrt(math.prod(parameter.shape[1:])))
        yield
    finally:
        with torch._C.DisableTorchFunction():
            for parameter, before in zip(parameters, kept, strict=True):
                parameter.data.copy_(before)


def _arguments(chunks: Chunks, numbers: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of some of the chunks, together."""
    pieces = []
    for leaf in chunks.leaves:
        rows = leaf.value.split(list(leaf.sizes), leaf.dim) if leaf.sizes else ()
        taken = [rows[number] for number in numbers] if rows else [leaf.value]
        piece = (taken[0].clone() if len(taken) == 1 else torch.cat(taken, leaf.dim)).detach()
        # A forward that differentiates itself, as a force field's, takes gradients of its inputs.
        pieces.append(piece.requires_grad_(leaf.value.requires_grad))
    args, kwargs = _with_copies(chunks.arguments(pieces))
    return args, kwargs


def _with_copies(arguments: Any) -> Any:
    """Arguments with copies of the arrays and objects among them, to which the forward may write."""

    def is_written(entry: Any) -> bool:
        is_object = hasattr(entry, "__dict__") and not isinstance(entry, (Tensor, list, tuple, dict, *CLOSED))
        return isinstance(entry, np.ndarray | PackedSequence) or (is_object and not is_dataclass(entry))

    objects, template = take_apart(arguments, is_written, dataclasses=True)
    for number, entry in enumerate(objects):
        with suppress(Exception):  # one that cannot be copied
            objects[number] = entry if isinstance(entry, PackedSequence) else copy.deepcopy(entry)
    return put_together(template, objects)


def _candidates(module: nn.Module, chunks: Chunks) -> list[Rule]:
    """The rules that a mean or sum over the batch may follow, the most likely first."""
    shifts = (True, False) if type(module).__name__.endswith(("ForCausalLM", "LMHeadModel")) else (False, True)
    counted = [
        Rule("mean", number, ignored, is_shifted)
        for ignored in IGNORED
        for is_shifted in shifts
        for number, leaf in reversed(list(enumerate(chunks.leaves)))
        if leaf.sizes and leaf.value.ndim <= COUNTED_DIMS
        if ignored == 0 or not leaf.value.is_floating_point()
        if leaf.value.ndim > 1 or not is_shifted
    ]
    # Where several are left the first is taken: labels that are ignored before rows, and later arguments, which are
    # mostly the labels, before earlier ones.
    by_label = [rule for rule in counted if rule.ignored != 0]
    return [*by_label, Rule("mean"), *[rule for rule in counted if rule.ignored == 0], Rule("sum")]


def _rules(
    whole: Tensor, parts: list[Tensor], candidates: list[Rule], weights: Callable[[Rule], list[int]], dim: int
) -> list[Rule]:
    """The rules by which the parts of one tensor give the whole; raises `NotSplittable` if there are none."""
    shapes = {tuple(part.shape) for part in parts}
    is_alike = all(len(shape) == whole.ndim for shape in shapes) and -whole.ndim <= dim < whole.ndim
    if is_alike and len({without_dim(shape, dim % whole.ndim) for shape in shapes}) == 1:
        joined = torch.cat(parts, dim)
        if joined.shape == whole.shape and _error(joined, whole) <= _tolerance(whole):
            return [Rule("rows")]
    if shapes == {tuple(whole.shape)}:
        stacked = torch.stack(parts)
        if not (whole.is_floating_point() or whole.is_complex()):
            totals = {"same": parts[0], "sum": stacked.sum(0).to(whole.dtype)}
            if all(torch.equal(part, whole) for part in parts):
                return [Rule("same")]
            if torch.equal(totals["sum"], whole):
                return [Rule("sum")]
        else:
            errors = [(rule, _error(_weighted(stacked, weights(rule), rule), whole)) for rule in candidates]
            best = min(error for _, error in errors)
            if best <= _tolerance(whole):
                # To be within the tolerance is not enough: a mean by rows may be as near one by labels as that.
                limit = NEAREST * max(best, torch.finfo(whole.dtype).eps)
                return [rule for rule, error in errors if error <= limit]
    shape = list(whole.shape)
    if shape:
        raise NotSplittable(
            f"its result of shape {shape} has other values if the batch is cut: rows depend on each other (a statistic "
            "or loss over the batch), or the batch lies along another dim"
        )
    raise NotSplittable(
        f"it returns {', '.join(f'{part.item():.6g}' for part in parts)}, and for the whole batch {whole.item():.6g}: "
        "neither their sum nor their mean, by rows or by labels that are not ignored (a loss over pairs of rows, or "
        "divided by a count that no input shows)"
    )


def _error(found: Tensor, whole: Tensor) -> float:
    """The largest difference between two tensors of a shape, relative to their largest number."""
    if not whole.numel():
        return 0.0
    wide = torch.promote_types(whole.dtype, torch.float32)
    found, whole = found.to(wide), whole.to(wide)
    difference = torch.where((found == whole) | (found.isnan() & whole.isnan()), 0.0, (found - whole).abs())
    finite = torch.where(whole.isfinite(), whole, 0.0).abs().max()
    error = float(difference.max() / finite) if finite else float(difference.max())
    return math.inf if math.isnan(error) else error


def _tolerance(whole: Tensor) -> float:
    """The largest difference that rounding explains, by the lowest precision in the forward."""
    device = whole.device.type
    if torch.is_autocast_enabled(device):
        return max(TOLERANCES.get(kind, 0.0) for kind in (whole.dtype, torch.get_autocast_dtype(device)))
    if device == "cuda" and whole.dtype == torch.float32:
        return TF32_TOLERANCE
    return TOLERANCES.get(whole.dtype, 0.0)


def _combined(leaf: Tensor, rule: Rule, chunks: Chunks, dim: int | None) -> Tensor:
    """The whole of a tensor whose parts `chunked_forward` joined along `dim`, or stacked if they are 0-d."""
    stacked = leaf if dim is None else leaf.unflatten(dim, (chunks.num_chunks, -1)).movedim(dim, 0)
    return stacked[0] if rule.kind == "same" else _weighted(stacked, rule.weights(chunks), rule)


def _weighted(stacked: Tensor, weights: Sequence[int], rule: Rule) -> Tensor:
    """The mean or sum of tensors over dim 0; one of weight 0, such as a mean over no labels, has no part in it."""
    wide = torch.promote_types(stacked.dtype, torch.float32)
    if rule.kind == "sum":
        return stacked.to(wide if stacked.is_floating_point() else stacked.dtype).sum(0).to(stacked.dtype)
    by_chunk = stacked.new_tensor(weights, dtype=wide).view(-1, *[1] * (stacked.ndim - 1))
    # Not by the weight alone: the mean over no labels is NaN, also times 0.
    counted = torch.where(by_chunk > 0, stacked.to(wide), 0.0)
    return ((counted * by_chunk).sum(0) / sum(weights)).to(stacked.dtype)


@contextmanager
def _isolated(script: ScriptState, module: nn.Module, *owners: Any) -> Iterator[Callable[..., Any]]:
    """Gives a function that calls the module and leaves no trace: neither attributes, buffers, output nor draws.

    `owners` are further objects that may refer to generators.
    """
    # Uncompiled: the shapes of the comparison alone would be compiled, and fused draws pass no dispatcher.
    inner = module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None
    model = module if inner is None else inner
    children = list(model.modules())
    parameters = KeptParameters(children)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return without_gradients(lambda: attempt(args, kwargs))

    def attempt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        before = [ModuleState(child) for child in children]
        buffers = [dict(child._buffers) for child in children]
        # The same draws for the whole batch and each part, of what `_Neutral` does not see.
        script.generators.seed(0)
        try:
            for child in children:
                for name in HOOKS:
                    table = OrderedDict((k, hook) for k, hook in getattr(child, name).items() if not _by_script(hook))
                    child.__dict__[name] = table
                child.__dict__["_compiled_call_impl"] = None
                for key, buffer in child._buffers.items():
                    child._buffers[key] = None if buffer is None else buffer.clone()
            leaves, template = take_apart(without_objects(model(*args, **kwargs)), is_tensor, dataclasses=True)
            written = _written(model, before, buffers) | parameters.written(model)
            return put_together(template, [leaf.detach() for leaf in leaves]), written
        finally:
            for child, attributes, kept in zip(children, before, buffers, strict=True):
                attributes.put_back(child, "")
                child._buffers.update(kept)

    with ExitStack() as stack:
        stack.callback(parameters.put_back)
        stack.enter_context(script.on_this_rank())
        stack.enter_context(OwnGenerators([model, *owners]).preserved())
        stack.enter_context(script.generators.preserved())
        stack.enter_context(applied([Patch(nn.Module, "__call__", TORCH_CALL)]))
        stack.enter_context(output.silenced())
        stack.enter_context(_Neutral())  # type: ignore[no-untyped-call]
        yield run


class KeptParameters:
    """The parameters of some modules and their values, which a forward may replace, or write to by `.data`."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = [(each._parameters, dict(each._parameters)) for each in modules]
        found = {id(each): each for _, kept in self._tables for each in kept.values() if each is not None}
        with torch._C.DisableTorchFunction():  # simulated devices do not matter here
            values = [each for each in found.values() if not (is_lazy(each) or lacks_bytes(each.data))]
            self._values = [(each, each.data, _copy(each.data)) for each in values]
        self._is_compared = False

    def written(self, model: nn.Module) -> dict[str, Any]:
        """The parameters that the first forward has replaced or written to, by their names."""
        changed = set[int]()
        if not self._is_compared:
            self._is_compared = True
            with torch._C.DisableTorchFunction():
                changed = {id(each) for each, _, value in self._values if not _has_bits(each, value)}
        found = {}
        for (prefix, _), (table, kept) in zip(model.named_modules(), self._tables, strict=True):
            for key, value in table.items():
                if id(value) in changed or value is not kept.get(key):
                    found[f"{prefix}.{key}" if prefix else key] = value
        return found

    def put_back(self) -> None:
        for table, kept in self._tables:
            table.update(kept)
        with torch._C.DisableTorchFunction():
            for parameter, own, value in self._values:
                if not _has_bits(parameter, value):
                    own.copy_(value)
                    parameter.data = own


def _copy(tensor: Tensor) -> Tensor:
    """A copy for a moment: on the host where the device has no room, as beside large frozen weights."""
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:
        return tensor.cpu()


def _has_bits(tensor: Tensor, value: Tensor) -> bool:
    """Whether a tensor has the bits of another one, compared in pieces, which need little memory."""
    if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
        return False
    pairs = zip(*(flattened(each.data).view(torch.uint8).split(PIECE) for each in (tensor, value)), strict=True)
    return all(torch.equal(one.to(other.device), other) for one, other in pairs)


def _written(model: nn.Module, before: Sequence[ModuleState], buffers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The attributes and buffers of a module and its children that a forward gave other values, by their names."""
    found: dict[str, Any] = {}
    for (prefix, child), attributes, kept in zip(model.named_modules(), before, buffers, strict=True):
        changed = {key: value for key, value in child._buffers.items() if not _is_like(value, kept.get(key))}
        changed |= {
            key: value for key, was, value in attributes.assigned(child) if key not in OWN and not _is_like(value, was)
        }
        found |= {f"{prefix}.{key}" if prefix else key: value for key, value in changed.items()}
    return found


def _check_written(module: nn.Module, whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Raises for an attribute that was written, which chunks lose, and for a buffer that is not the whole batch's."""
    buffers = {name.removeprefix("_orig_mod.") for name, _ in module.named_buffers()}
    for name in sorted(whole.keys() | part.keys()):
        # An attribute is lost with any chunk; a buffer may be written if each part leaves what the whole batch does.
        if name not in buffers or (part and not _is_like(part.get(name), whole.get(name))):
            raise WritesState(f"its forward writes {name}, which microbatches would leave with another value")


def _is_like(one: Any, other: Any) -> bool:
    """Whether two values are one object, equal tensors, or equal values of Python."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _error(one, other) <= _tolerance(other)
    return one is other or (
        isinstance(one, bool | int | float | str | tuple) and type(one) is type(other) and one == other
    )


def hooked(module: nn.Module) -> str:
    """The name of a child with a hook of the script's own, which would see microbatches; empty if there is none."""
    for name, child in module.named_modules():
        if name and any(_by_script(hook) for table in HOOKS for hook in getattr(child, table).values()):
            return str(name)
    return ""


def _by_script(hook: Any) -> bool:
    """Whether a hook is the script's own: it may count or keep what it sees; libraries' hooks may be needed."""
    function = getattr(hook, "func", hook)  # of a partial
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code is None or is_script_file(code.co_filename)


@cache
def _arguments_of(operation: Any) -> dict[str, int]:
    """The positions of an operation's arguments, by their names."""
    return {argument.name: number for number, argument in enumerate(operation._schema.arguments)}


class _Neutral(TorchDispatchMode):
    """Makes draws constant and BatchNorm use its running statistics: neither tells a batch from its parts."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        places, given = _arguments_of(operation), list(args)
        named = kwargs or {}

        def assign(name: str, value: Any) -> None:
            if places[name] < len(given):
                given[places[name]] = value
            else:
                named[name] = value

        # Kernels of attention and recurrent layers draw inside, by an argument.
        for name in ("dropout_p", "dropout"):
            if name in places:
                assign(name, 0.0)
        if "training" in places and "running_mean" in places and "batch_norm" in str(operation):
            channels = given[0].shape[1]
            like = given[1] if given[1] is not None else given[0]
            for name, default in (("running_mean", 0.0), ("running_var", 1.0)):
                if given[places[name]] is None:
                    assign(name, like.new_full((channels,), default))
            assign("training", False)
        elif torch.Tag.nondeterministic_seeded in operation.tags:
            # Filled as other draws are, its result would no longer depend on its input.
            if operation.overloadpacket is torch.ops.aten.native_dropout:
                return given[0].clone(), torch.ones_like(given[0], dtype=torch.bool)
            drawn = operation(*given, **named)
            for leaf in tree_leaves(drawn):
                if isinstance(leaf, Tensor):
                    leaf.fill_(0.5 if leaf.is_floating_point() else 0)
            return drawn
        return operation(*given, **named)
