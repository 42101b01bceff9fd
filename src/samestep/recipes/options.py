"""The recipes' own options (`-o name=value`), checked before a process is started: torch-free."""

from collections.abc import Callable, Mapping
from typing import Any

from samestep.core.microbatches import check_num_microbatches
from samestep.errors import UsageError

Option = bool | int | float | str

OWN_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "mlp": {"target": "", "scale_target": False},
    "vgg": {"width": 1.0, "dropout": 0.5},
    "gpt": {"layers": 4, "width": 128, "heads": 4, "context": 64, "dropout": 0.1, "tied": True},
}
"""The options of each recipe that has some, with their defaults, whose types the values have."""

ONE_FILE: Mapping[str, str] = {"mlp": "one CSV file, by --data FILE.csv", "gpt": "one text file, by --data FILE"}
"""The recipes that read a file of the user's; the others read a folder, by --data-dir."""

NUM_PARTS: Mapping[str, int] = {"lenet": 10, "mlp": 5, "simplenet": 4, "vgg": 38}
"""The number of modules, one after another, of a recipe's model."""

NUM_MICROBATCHES: Mapping[str, int] = {"mlp": 4}
"""The default number of microbatches of recipes whose steps are too short for 8: it is also their most devices."""

TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def own_options(recipe: str, given: Mapping[str, Option]) -> dict[str, Any]:
    """A recipe's own options: the given ones, converted and checked, and the defaults of the others."""
    options = read_options(OWN_OPTIONS.get(recipe, {}), given)
    if recipe in _CHECKS:
        _CHECKS[recipe](options)
    return options


def num_microbatches_of(recipe: str, given: int | None, global_batch_size: int | None) -> int:
    """The number of microbatches of a recipe's run: as given, else its default, or the global batch size if smaller."""
    default = check_num_microbatches(None, global_batch_size)
    own = min(default, NUM_MICROBATCHES.get(recipe, default))
    return check_num_microbatches(own if given is None else given, global_batch_size)


def check_stages(recipe: str, options: Mapping[str, Any], stages: int) -> None:
    """Raises a `UsageError` if a recipe's model has too few parts for the stages of a pipeline."""
    parts = options["layers"] + 2 if recipe == "gpt" else NUM_PARTS[recipe]
    if stages > parts:
        raise UsageError(f"{recipe} has {parts} parts for {stages} stages: use --mesh pipe={parts} or less")
    if recipe == "gpt" and options["tied"]:
        raise UsageError(
            "gpt's output has the weights of the embedding, which stages of a pipeline cannot share: add -o tied=false"
        )


def check_source(recipe: str, data_dir: str | None) -> None:
    """Raises a `UsageError` if a recipe reads no folder and one was given."""
    if data_dir is not None and recipe in ONE_FILE:
        raise UsageError(f"{recipe} reads {ONE_FILE[recipe]}; got --data-dir {data_dir}")


def own_options_in_words() -> str:
    """The recipes' own options and their defaults, a line of text for `--help`."""
    return "; ".join(
        f"{recipe}: {', '.join(f'{name}={str(value).lower()}' for name, value in options.items())}"
        for recipe, options in OWN_OPTIONS.items()
    )


def read_options(defaults: Mapping[str, Option], given: Mapping[str, Option]) -> dict[str, Any]:
    """Completes the options given by the defaults, each converted to its default's type."""
    for name in given:
        if name not in defaults:
            known = f"it has {', '.join(defaults)}" if defaults else "it has none"
            raise UsageError(f"the recipe has no option {name!r}; {known}")
    return {
        name: _convert(name, given[name], default) if name in given else default for name, default in defaults.items()
    }


def _check_vgg(options: Mapping[str, Any]) -> None:
    width, dropout = options["width"], options["dropout"]
    if not width > 0 or not 0 <= dropout < 1:
        raise UsageError(f"vgg needs a width above 0 and a dropout from 0 to below 1, got {width} and {dropout}")


def _check_gpt(options: Mapping[str, Any]) -> None:
    for name in ("layers", "width", "heads", "context"):
        if options[name] < 1:
            raise UsageError(f"gpt needs {name} from 1 on, got {options[name]}")
    if options["width"] % options["heads"] or not 0 <= options["dropout"] < 1:
        raise UsageError(
            f"gpt needs a width that is a multiple of the heads and a dropout from 0 to below 1, got width "
            f"{options['width']}, heads {options['heads']} and dropout {options['dropout']}"
        )


_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {"vgg": _check_vgg, "gpt": _check_gpt}


def _convert(name: str, value: Option, default: Option) -> Option:
    kind = type(default)
    if kind is str:
        return str(value)
    try:
        if kind is bool:
            return TRUTH[str(value).lower()]
        number = float(value)
        if number != number or (kind is int and number != int(number)):
            raise ValueError
        return kind(number)
    except (KeyError, ValueError, OverflowError) as error:
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise UsageError(f"option {name!r} needs {wanted}, such as {default}; got {value!r}") from error
