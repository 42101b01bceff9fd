"""The plan: which modules are divided, and how. Reading one changes nothing, and needs no other rank."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from torch import nn

from samestep.engine.strategies import TensorParallel
from samestep.errors import UsageError

COLWISE, GATHERED, PACKED, ROWWISE = "colwise", "colwise_gathered", "packed_colwise", "rowwise"
HEADS, DROPOUT, SEQUENCE, REGION = "heads", "dropout", "sequence", "sequence_region"
STYLES: dict[str, tuple[type[nn.Module], ...]] = {
    COLWISE: (nn.Linear, nn.Embedding),
    GATHERED: (nn.Linear, nn.Embedding),
    PACKED: (nn.Linear,),
    ROWWISE: (nn.Linear, nn.Embedding),
    HEADS: (nn.MultiheadAttention,),
    DROPOUT: (nn.Dropout,),
    SEQUENCE: (nn.LayerNorm, nn.RMSNorm, nn.Dropout),
    REGION: (nn.Module,),
}
"""What each style divides."""
ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Identity)
FORMS = {
    COLWISE: re.compile("([1-9][0-9]*)"),
    PACKED: re.compile("([2-9]|[1-9][0-9]+)(?:x([1-9][0-9]*))?"),
    DROPOUT: re.compile("(-?[0-7])"),
    REGION: re.compile("([0-7])"),
}
"""What may follow a style and a colon."""
DEFAULT_DIM = {DROPOUT: -1, REGION: 1}
_ENCODER_FORWARD = ("forward", "_sa_block", "_ff_block")


@dataclass(frozen=True)
class Division:
    """How one module is divided.

    Attributes:
        style: one of `STYLES`; a `ParallelStyle` of torch's own, for which samestep answers for nothing.
        number: "packed_colwise": how many matrices lie in one; "dropout" and "sequence_region": the dimension that is
            divided. Else 0.
        heads: "colwise" and "packed_colwise": of how many heads a matrix is, which stay together; 0 for none.
        sequence_dim: along which its inputs or outputs are divided by positions; None where each rank has them all.
    """

    style: Any
    number: int = 0
    heads: int = 0
    sequence_dim: int | None = None


def read_plan(model: nn.Module, options: TensorParallel, size: int) -> dict[str, Division]:
    """How each module is divided, by its name.

    Args:
        model: with its whole parameters.
        options: the plan, or the model says it itself.
        size: ranks that share each matrix.

    Raises:
        UsageError: there is no plan, or it names no module, another kind of module, or one that cannot be divided so.
    """
    found = _resolve(model, dict(options.plan) if options.plan is not None else _own_plan(model))
    regions = {name: each.number for name, each in found.items() if each.style == REGION}
    if options.sequence and not regions:
        raise UsageError(
            f'sequence=True needs modules in the plan whose inside works on a part of the positions: "{REGION}"'
        )
    divisions = {}
    for name, each in found.items():
        dim = next((dim for region, dim in regions.items() if _is_in(name, region)), None) if options.sequence else None
        if each.style in (SEQUENCE, REGION) and dim is None:
            continue
        division = replace(each, sequence_dim=dim)
        if each.style == SEQUENCE and isinstance(model.get_submodule(name), nn.Dropout):
            assert dim is not None, "else it is left as it is"
            division = Division(DROPOUT, dim)
        divisions[name] = division
        _check_division(name, model.get_submodule(name), division, size)
    _refuse_shared(model, divisions)
    return divisions


def describe_plan(divisions: Mapping[str, Division]) -> str:
    """A hash of what is divided and how."""
    lines = []
    for name, each in divisions.items():
        style = each.style if each.style in STYLES else type(each.style).__name__
        lines.append(f"{name} {style} {each.number} {each.heads} {each.sequence_dim}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _own_plan(model: nn.Module) -> dict[str, Any]:
    """What a model says itself, and what divides the encoder layers in it."""
    declared = getattr(model, "tensor_plan", None)
    plan = dict(declared()) if callable(declared) else {}
    for name, module in model.named_modules():
        inner = {}
        if isinstance(module, nn.TransformerEncoderLayer):
            inner = encoder_layer_plan(module)
        elif isinstance(module, nn.Sequential) and not callable(declared):
            inner = chain_plan(module)
        plan |= {f"{name}.{key}" if name and key else name or key: style for key, style in inner.items()}
    if not plan:
        raise UsageError(
            f"strategy='tensor' cannot see how {type(model).__name__} is to be divided: give "
            'samestep.TensorParallel(plan={"blocks.*.feed_in": "colwise", "blocks.*.feed_out": "rowwise"}), or the '
            "model a method tensor_plan() that returns such a dict; an nn.TransformerEncoderLayer, and linear layers "
            "one after another in an nn.Sequential, need none"
        )
    return plan


def encoder_layer_plan(layer: nn.TransformerEncoderLayer) -> dict[str, str]:
    """What divides an encoder layer: attention by heads, the network behind it by features.

    Nothing where a subclass computes otherwise, or layers have been exchanged: what lies between them is not known.
    """
    if any(getattr(type(layer), name) is not getattr(nn.TransformerEncoderLayer, name) for name in _ENCODER_FORWARD):
        return {}
    if not (_is_plain(layer.linear1) and _is_plain(layer.linear2) and isinstance(layer.dropout, nn.Dropout)):
        return {}
    places = 1 if layer.self_attn.batch_first else 0
    return {
        "": f"{REGION}:{places}",
        "self_attn": HEADS,
        "linear1": COLWISE,
        "dropout": f"{DROPOUT}:-1",
        "linear2": ROWWISE,
        "norm1": SEQUENCE,
        "norm2": SEQUENCE,
        "dropout1": SEQUENCE,
        "dropout2": SEQUENCE,
    }


def chain_plan(chain: nn.Sequential) -> dict[str, str]:
    """What divides linear layers of a chain two by two: the first by its outputs, the second by its inputs.

    What lies between them treats every feature alike.
    """
    if type(chain).forward is not nn.Sequential.forward:
        return {}
    plan: dict[str, str] = {}
    first, between = "", dict[str, str]()
    for name, module in chain.named_children():
        if isinstance(module, nn.Linear) and _is_plain(module):
            if first:
                plan |= {first: COLWISE, **between, name: ROWWISE}
            first, between = "" if first else name, {}
        elif isinstance(module, nn.Dropout):
            between[name] = f"{DROPOUT}:-1"
        elif not isinstance(module, ELEMENTWISE):
            first, between = "", {}
    return plan


def _resolve(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Division]:
    """The modules that each pattern names, in the model's order; the first pattern that names one counts."""
    names = [name for name, _ in model.named_modules()]
    found: dict[str, Division] = {}
    for pattern, style in plan.items():
        matching = [name for name in names if _matches(name, pattern)]
        if not matching:
            raise UsageError(f"the plan names {pattern!r}, which is no module of {type(model).__name__}{_near(names)}")
        division = _read_style(pattern, style)
        for name in matching:
            found.setdefault(name, division)
    return {name: found[name] for name in names if name in found}


def _read_style(pattern: str, style: Any) -> Division:
    """A style by its name and number, or as it is."""
    if not isinstance(style, str):
        from torch.distributed.tensor.parallel import ParallelStyle  # not before: it loads half of torch.distributed

        if isinstance(style, ParallelStyle):
            return Division(style)
    name, colon, text = style.partition(":") if isinstance(style, str) else ("", "", "")
    if name not in STYLES:
        raise UsageError(
            f"the plan has {style!r} for {pattern!r}; it is one of {', '.join(map(repr, STYLES))}, or a ParallelStyle "
            "of torch.distributed.tensor.parallel"
        )
    if not colon and name != PACKED:
        return Division(name, DEFAULT_DIM.get(name, 0))
    match = FORMS[name].fullmatch(text) if name in FORMS else None
    if match is None:
        raise UsageError(
            f"the plan has {style!r} for {pattern!r}; what follows the colon is how many matrices lie in one, and of "
            f'how many heads each is ("{PACKED}:3", "{PACKED}:3x12", "{COLWISE}:12"), or the dimension that is divided '
            f'("{DROPOUT}:-1", "{REGION}:1")'
        )
    numbers = [int(number) if number else 0 for number in match.groups()]
    if name == COLWISE:
        return Division(name, heads=numbers[0])
    return Division(name, *numbers)


def _check_division(name: str, module: nn.Module, division: Division, size: int) -> None:
    """Raises a `UsageError` if a module cannot be divided so among so many ranks."""
    style, title = division.style, f"{name or 'the model'} ({type(module).__name__})"
    if style not in STYLES:
        return
    kinds = STYLES[style]
    if not isinstance(module, kinds):
        needed = " or ".join(kind.__name__ for kind in kinds)
        raise UsageError(f'the plan has "{style}" for {title}, which must be of class {needed}')
    if style == HEADS:
        _check_attention(title, module)
    elif isinstance(module, nn.Linear | nn.Embedding) and not _is_plain(module):
        raise UsageError(
            f"{title} has more than a weight and a bias, or computes these from other parameters (weight_norm, "
            "spectral_norm, a parametrization, an adapter), which do not lie on the ranks as it would: leave it out of "
            "the plan, or take that off"
        )
    for what, number in _divided_sizes(module, division):
        if number % size:
            raise UsageError(
                f'{title} has {number} {what}, which {size} ranks along "tensor" cannot share equally: use '
                f"{_divisors(number)} of them, or leave it out of the plan"
            )


def _is_plain(module: nn.Module) -> bool:
    """Whether a linear layer or a table has a weight, perhaps a bias, and nothing of which these are made."""
    names = {name for name, parameter in module.named_parameters() if parameter is not None}
    return "weight" in names and names <= {"weight", "bias"} and isinstance(module, nn.Linear | nn.Embedding)


def _divided_sizes(module: nn.Module, division: Division) -> Iterable[tuple[str, int]]:
    """What is divided of a module, and how much of it there is."""
    style = division.style
    if isinstance(module, nn.MultiheadAttention):
        yield "heads", module.num_heads
    elif isinstance(module, nn.Linear):
        if style == ROWWISE:
            yield "inputs", module.in_features
        else:
            count = division.number if style == PACKED else 1
            if module.out_features % (count * max(1, division.heads)):
                of = f"{division.heads} heads in each of {count}" if division.heads else f"{count}"
                raise UsageError(f"{module.out_features} outputs are not those of {of} equal matrices")
            if division.heads:
                yield "heads", division.heads
            yield "outputs" if count == 1 else "outputs in each matrix", module.out_features // count
    elif isinstance(module, nn.Embedding):
        yield ("entries", module.num_embeddings) if style == ROWWISE else ("features", module.embedding_dim)


def _check_attention(title: str, module: nn.Module) -> None:
    """Raises a `UsageError` for kinds of attention that are not divided by heads."""
    assert isinstance(module, nn.MultiheadAttention), "other modules were refused"
    if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
        raise UsageError(
            f'{title} has keys or values of another size (kdim, vdim), add_bias_kv or add_zero_attn, which "{HEADS}" '
            "does not divide; leave it out of the plan"
        )


def _refuse_shared(model: nn.Module, divisions: Mapping[str, Division]) -> None:
    """Raises a `UsageError` that names the first divided parameter which another module has, too."""
    owners: dict[int, list[tuple[str, tuple[int, str]]]] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((path, (id(module), key)))
    for name, division in divisions.items():
        if division.style in (DROPOUT, REGION):
            continue
        for parameter in model.get_submodule(name).parameters():
            shared = [path for path, _ in owners[id(parameter)]]
            is_one = len({member for _, member in owners[id(parameter)]}) == 1
            if len(shared) > 1 and not (division.style == SEQUENCE and is_one and _have_parts(shared, divisions)):
                raise UsageError(
                    f"parameter {names[id(parameter)]} is used in {' and in '.join(shared)}, and would be divided in "
                    "one of them only: leave them out of the plan, or give each a parameter of its own"
                )


def _have_parts(paths: Sequence[str], divisions: Mapping[str, Division]) -> bool:
    """Whether all modules at these places work on a part of the positions, along one dimension."""
    regions = {name: each.number for name, each in divisions.items() if each.style == REGION}
    dims = [next((dim for region, dim in regions.items() if _is_in(path, region)), None) for path in paths]
    return None not in dims and len(set(dims)) == 1


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a module: part by part, as torch reads them; the model itself has no part."""
    own, wanted = name.split("."), pattern.split(".")
    return bool(name) == bool(pattern) and len(own) == len(wanted) and all(map(fnmatch, own, wanted))


def _is_in(name: str, region: str) -> bool:
    return not region or name == region or name.startswith(f"{region}.")


def _divisors(number: int) -> str:
    fitting = [str(size) for size in range(1, number + 1) if number % size == 0]
    return ", ".join(fitting if len(fitting) <= 6 else [*fitting[:5], "…"])


def _near(names: list[str]) -> str:
    shown = [name for name in names if name]
    return f": it has {', '.join(shown if len(shown) <= 8 else [*shown[:7], '…'])}"
