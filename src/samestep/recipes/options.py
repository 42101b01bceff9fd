"""The options of `samestep train`, checked at the door: torch-free, before a process is started."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep.errors import UsageError

Option = bool | int | float | str

OWN_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "mlp": {"target": "", "scale_target": False},
    "vgg": {"width": 1.0, "dropout": 0.5},
    "gpt": {"layers": 4, "width": 128, "heads": 4, "context": 64, "dropout": 0.1, "tied": True},
}
"""The options of each recipe that has some, with their defaults; a value is of its default's type."""

ONE_FILE: Mapping[str, str] = {"mlp": "one CSV file, by --data FILE.csv", "gpt": "one text file, by --data FILE"}
"""The recipes that read a file of the user's; the others read a folder, by --data-dir."""

TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("sgd", "adam", "adamw"),
    "precision": ("32-true", "bf16-mixed", "16-mixed"),
    "reduction": ("ordered", "native"),
    "strategy": ("replicate", "sharded", "pipeline"),
}
LEAST: Mapping[str, int] = {
    "epochs": 1,
    "num_workers": 0,
    "seed": 0,
    "momentum": 0,
    "weight_decay": 0,
    "spares": 0,
    "checkpoint_steps": 1,
    "keep": 1,
    "digest_every": 1,
}
ABOVE_ZERO = ("lr", "max_grad_norm", "checkpoint_minutes")


def check_options(options: Mapping[str, Any]) -> None:
    """Checks what the user asked of a recipe; None is the recipe's own value.

    Raises:
        UsageError: names the option, and what it takes.
    """
    for name, choices in CHOICES.items():
        value = options.get(name)
        if value is not None and value not in choices:
            raise UsageError(f"got {name} {value!r}; --{name} is one of {', '.join(choices)}")
    for name, least in LEAST.items():
        value = options.get(name)
        if value is not None and not least <= value < float("inf"):
            raise UsageError(f"got {name}={value}; {option_of(name)} must be {least} or more")
    for name in ABOVE_ZERO:
        value = options.get(name)
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"got {name}={value}; {option_of(name)} must be above 0")
    recipe, data, data_dir = options["recipe"], options.get("data"), options.get("data_dir")
    own_options(recipe, options.get("options") or {})
    check_source(recipe, data_dir)
    if data_dir is not None and not Path(data_dir).is_dir():
        raise UsageError(f"got --data-dir {data_dir}: there is no such folder; needed: one with the dataset's files")
    if data is not None and recipe in ONE_FILE and not Path(data).exists():
        raise UsageError(f"got --data {data}: there is no such file; {recipe} reads {ONE_FILE[recipe]}")


def option_of(name: str) -> str:
    """How an argument is spelled on the command line."""
    return "--" + name.replace("_", "-")


def own_options(recipe: str, given: Mapping[str, Option]) -> dict[str, Any]:
    """A recipe's own options: those given, text converted, and the defaults of the others.

    Raises:
        UsageError: an option that there is none of, or a value that it does not take.
    """
    options = read_options(OWN_OPTIONS.get(recipe, {}), given)
    if recipe in _CHECKS:
        _CHECKS[recipe](options)
    return options


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
    """Completes the options given by the defaults, each converted to its default's type.

    Raises:
        UsageError: an option that there is none of, or a value of another type.
    """
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
