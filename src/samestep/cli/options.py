"""Options from dataclasses: a command takes a few objects, and their fields are its options.

The metadata of a field are what `typer.Option` needs: `help`, `flags` (by default the field's name), `metavar`, `panel`,
`repeated` (given several times), `negated` (a flag that has a `--no-…` too), and `parse`, from text to the value.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each dataclass among a command's parameters by options, one a field that has metadata.

    A parameter of type `Annotated[Mapping[str, Any], Group]` is handed the fields of `Group` that were given, by name.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[Any], bool]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        group = _group(hints[name])
        if group is None:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[name] = group
        types = get_type_hints(group[0])
        parameters += [_parameter(each, types[each.name], group[1]) for each in fields(group[0]) if each.metadata]

    @functools.wraps(command)
    def called(**values: Any) -> None:
        made: dict[str, Any] = {}
        for name, (group, only_given) in groups.items():
            own: dict[str, Any] = {}
            for each in fields(group):
                if each.metadata and (value := values.pop(each.name)) is not None and value != []:
                    own[each.name] = each.metadata["parse"](value) if each.metadata.get("parse") else value
            made[name] = own if only_given else group(**own)
        command(**values, **made)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # which typer reads
    called.__annotations__ = {}
    return called


def _group(hint: Any) -> tuple[type[Any], bool] | None:
    """The dataclass that a parameter stands for, and whether only the fields that were given are wanted."""
    if get_origin(hint) is Annotated:
        found = [each for each in get_args(hint)[1:] if isinstance(each, type) and is_dataclass(each)]
        return (found[0], True) if found else None
    return (hint, False) if isinstance(hint, type) and is_dataclass(hint) else None


def _parameter(each: Field[Any], kind: Any, only_given: bool) -> inspect.Parameter:
    """A field as a parameter of the command."""
    about: Mapping[str, Any] = each.metadata
    base = next((arg for arg in get_args(kind) if arg is not type(None)), kind) if get_origin(kind) is not None else kind
    if about.get("repeated"):
        base = list[str]
    elif about.get("parse") or get_origin(base) is not None:
        base = str
    name = each.name.replace("_", "-")
    flags: Sequence[str] = about.get("flags", ())
    if base is bool and not flags:
        flags = (f"--{name}/--no-{name}",) if about.get("negated") else (f"--{name}",)
    default = None if only_given or each.default is None else each.default
    if default is None:
        base = base | None
    option = typer.Option(
        *flags,
        help=about["help"],
        metavar=about.get("metavar"),
        rich_help_panel=about.get("panel"),
        show_default=about.get("show_default", True),
        min=about.get("min"),
        max=about.get("max"),
    )
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[base, option]
    )
