"""The configuration of `samestep train` and the recipes' options, checked before a process is started: torch-free."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from samestep.checks import check_choice, check_number
from samestep.comm.environment import AUDIT_ACTIONS
from samestep.core.microbatches import check_num_microbatches
from samestep.errors import UsageError
from samestep.files import load_json

Option = bool | int | float | str

OWN_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "mlp": {"target": "", "scale_target": False},
    "vgg": {"width": 1.0, "dropout": 0.5},
    "gpt": {"layers": 4, "width": 128, "heads": 4, "context": 64, "dropout": 0.1, "tied": True},
}
"""The options of each recipe that has some, with their defaults, whose types the values have."""

ONE_FILE: Mapping[str, str] = {"mlp": "one CSV file, by --data FILE.csv", "gpt": "one text file, by --data FILE"}
"""The recipes that read a file of the user's; the others read a folder, by --data-dir."""

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
    check_number("width", options["width"], above=0, whole=False, option="-o width")
    check_number("dropout", options["dropout"], 0, below=1, whole=False, option="-o dropout")


def _check_gpt(options: Mapping[str, Any]) -> None:
    for name in ("layers", "width", "heads", "context"):
        check_number(name, options[name], 1, option=f"-o {name}")
    check_number("dropout", options["dropout"], 0, below=1, whole=False, option="-o dropout")
    width, heads = options["width"], options["heads"]
    if width % heads:
        raise UsageError(f"got width={width} with heads={heads}; it must be a multiple of them (-o width, -o heads)")


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


MAX_THREADS = 1024
"""CPU threads that a worker may have."""
DATA = "Data, model and evaluation"
OPTIMIZATION = "Batch, optimizer and length"
DEVICES = "Devices and workers"
LAYOUT = "Strategy and precision"
RUN_FOLDER = "Run folder, checkpoints and resuming"


def _numbers(text: str) -> list[float]:
    """`3,1` as numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"got --shares {text!r}; needed: numbers separated by commas, one a device, such as 3,1"
        ) from None


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """`name=value` options as a dict."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"got --option {text!r}; needed: name=value")
        found[name] = value
    return found


def _option(
    help: str,
    default: Any = None,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    choices: Sequence[str] = (),
    parse: Callable[[Any], Any] | None = None,
    **more: Any,
) -> Any:
    """A field that is an option of the command line too; `cli.options` reads the metadata."""
    limits = {"least": least, "most": most, "above": above, "choices": tuple(choices)}
    return field(default=default, metadata={"help": help, "parse": parse, **limits, **more})


@dataclass(frozen=True)
class JobConfig:
    """The options of `samestep train` by name; None stands for the recipe's or `Run`'s default.

    Made by the command, sent to the workers as JSON, and read by `recipes.job.train`. The metadata of each field have
    its help and its limits.
    """

    recipe: str = ""
    data: str | None = _option(
        "A dataset by name (digits, mnist, fashion-mnist), or the file of mlp or gpt.",
        panel=DATA,
        metavar="NAME|FILE",
        offers=("digits", "mnist", "fashion-mnist"),
    )
    data_dir: str | None = _option(
        "A folder with the dataset's files; nothing is downloaded.", panel=DATA, metavar="DIR"
    )
    options: Mapping[str, str] | None = _option(
        "A recipe's own option, as name=value; may be repeated. Those that there are, with their defaults: "
        f"{own_options_in_words()}.",
        parse=pairs,
        flags=("--option", "-o"),
        repeated=True,
        panel=DATA,
        metavar="NAME=VALUE",
    )
    eval_every: int | None = _option(
        "Evaluate after every so many epochs; 1 by default.", least=1, panel=DATA, metavar="N"
    )
    best: str | None = _option(
        "Keep the checkpoint that is best by this metric: a name, or a name with :min or :max.",
        metavar="METRIC",
        panel=DATA,
    )
    patience: int | None = _option(
        "End after so many evaluations without a better one by --best, or by the recipe's own metric.",
        least=1,
        panel=DATA,
        metavar="N",
    )
    epochs: int | None = _option("How often to go through the data.", least=1, panel=OPTIMIZATION, metavar="N")
    max_steps: int | None = _option(
        "End after this step of the run, or after --epochs if that is sooner.", least=1, panel=OPTIMIZATION, metavar="N"
    )
    global_batch_size: int | None = _option(
        "Samples of one optimizer step, on any devices.", compared=True, panel=OPTIMIZATION, metavar="N"
    )
    num_microbatches: int | None = _option(
        "Slices of a global batch, at least one a device; 8 by default, 4 for mlp.",
        compared=True,
        panel=OPTIMIZATION,
        metavar="N",
    )
    seed: int = _option(
        "Of weights, order and dropout; 0 by default.", 0, least=0, compared=True, panel=OPTIMIZATION, metavar="N"
    )
    optimizer: str | None = _option(
        "sgd, adam or adamw.", choices=("sgd", "adam", "adamw"), compared=True, panel=OPTIMIZATION, metavar="NAME"
    )
    lr: float | None = _option("Learning rate.", above=0, compared=True, panel=OPTIMIZATION, metavar="RATE")
    momentum: float | None = _option("Of sgd.", least=0, compared=True, panel=OPTIMIZATION, metavar="X")
    weight_decay: float | None = _option("Of the optimizer.", least=0, compared=True, panel=OPTIMIZATION, metavar="X")
    scheduler: str | None = _option(
        "Learning rate over the steps: cosine or linear (from --lr to 0 at the end of the run) or constant; constant "
        "by default.",
        choices=("cosine", "linear", "constant"),
        panel=OPTIMIZATION,
        metavar="NAME",
    )
    warmup_steps: int | None = _option(
        "Raise the learning rate to --lr over so many steps first.", least=1, panel=OPTIMIZATION, metavar="N"
    )
    max_grad_norm: float | None = _option(
        "Clip the gradient's norm to this.", above=0, compared=True, panel=OPTIMIZATION, metavar="X"
    )
    strategy: str = _option(
        "How the state lies on the devices: replicate (the default) or sharded (1/D of it on each): the same bits.",
        "replicate",
        choices=("replicate", "sharded"),
        panel=LAYOUT,
        metavar="NAME",
    )
    shard_optimizer: bool = _option(
        "Under replicate: each device has 1/D of the optimizer's state.", False, panel=LAYOUT
    )
    precision: str = _option(
        "32-true (the default), bf16-mixed or 16-mixed.",
        "32-true",
        choices=("32-true", "bf16-mixed", "16-mixed"),
        compared=True,
        panel=LAYOUT,
        metavar="NAME",
    )
    compile: bool = _option(
        "Run forward and loss through torch.compile.", False, negated=True, compared=True, panel=LAYOUT
    )
    shares: Sequence[float] | None = _option(
        "How much each device does, such as 3,1; same bits.", parse=_numbers, panel=DEVICES, metavar="X,X,…"
    )
    spares: int = _option(
        "How many of the devices stand by, to take over when another is lost.", 0, least=0, panel=DEVICES, metavar="N"
    )
    audit: int | None = _option(
        "Compute one microbatch of every so many steps on another device too, to find devices that compute wrong bits.",
        least=1,
        panel=DEVICES,
        metavar="N",
    )
    audit_action: str = _option(
        "What follows if one does: exclude (the default), warn or stop.",
        "exclude",
        choices=AUDIT_ACTIONS,
        panel=DEVICES,
        metavar="NAME",
    )
    num_workers: int = _option(
        "Processes a rank that fetch samples; none by default.", 0, least=0, panel=DEVICES, metavar="N"
    )
    num_threads: int | None = _option(
        "CPU threads a worker; part of what decides the bits; 1 by default.",
        least=1,
        most=MAX_THREADS,
        compared=True,
        panel=DEVICES,
        metavar="N",
    )
    portable: bool | None = _option(
        "The same bits on every x86-64 CPU with AVX2 and FMA, by kernels that all of them have: a step takes about 1.1 "
        "to 1.6 times as long. By default as a resumed run was, else as SAMESTEP_PORTABLE says (1 or 0), else on for "
        "CPU workers that can, without --compile. GPUs have no such kernels.",
        negated=True,
        panel=DEVICES,
    )
    run_dir: str | None = _option(
        "Where the run goes; runs/RECIPE-DATE-TIME by default.", panel=RUN_FOLDER, metavar="PATH"
    )
    resume: str | None = _option(
        "Go on with this run, on any devices, from its newest good checkpoint; it keeps its options. auto: with the "
        "newest run of RECIPE that did not end, or a new one.",
        panel=RUN_FOLDER,
        metavar="RUN|auto",
        offers=("auto", "RUN"),
    )
    allow_contract_change: bool = _option(
        "Go on though something changed that decides the bits.", False, panel=RUN_FOLDER
    )
    checkpoint_steps: int | None = _option(
        "Write a checkpoint every so many steps.", least=1, panel=RUN_FOLDER, metavar="N"
    )
    checkpoint_minutes: float | None = _option(
        "And when the last is so old; 5 by default.", above=0, panel=RUN_FOLDER, metavar="X"
    )
    checkpoint_retries: int | None = _option(
        "How often one that cannot be written is tried again, after 1, 2, 4, … seconds, before the run ends; 3 by "
        "default.",
        least=0,
        panel=RUN_FOLDER,
        metavar="N",
    )
    keep: int | None = _option("How many checkpoints are kept; 3 by default.", least=1, panel=RUN_FOLDER, metavar="N")
    digest_every: int | None = _option(
        "The ledger has a checksum of the state every so many steps; 100 by default.",
        least=1,
        panel=RUN_FOLDER,
        metavar="N",
    )
    command: Sequence[str] = ()
    job: Mapping[str, Any] = field(default_factory=dict)

    def given(self, *names: str) -> dict[str, Any]:
        """The fields that are not None, by name: for a callee that has defaults of its own."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def as_json(self) -> dict[str, Any]:
        """All fields, as the workers get them."""
        return asdict(self)

    def check(self) -> None:
        """Checks the values; the recipe's name was checked before."""
        for each in fields(self):
            if each.metadata and getattr(self, each.name) is not None:
                _check_limits(each, getattr(self, each.name))
        own_options(self.recipe, self.options or {})
        check_source(self.recipe, self.data_dir)
        if self.data_dir is not None and not Path(self.data_dir).is_dir():
            raise UsageError(
                f"got --data-dir {self.data_dir}: there is no such folder; needed: one with the dataset's files"
            )
        if self.data is not None and self.recipe in ONE_FILE and not Path(self.data).is_file():
            what = "is no regular file" if Path(self.data).exists() else "there is no such file"
            raise UsageError(f"got --data {self.data}: {what}; {self.recipe} reads {ONE_FILE[self.recipe]}")


COMPARED = tuple(each.name for each in fields(JobConfig) if each.metadata.get("compared"))
"""The options that a contract has as they are given."""


def read_file(path: str) -> dict[str, Any]:
    """The options in a TOML or JSON file, by their names with `-` or `_`; raises a `UsageError` for others."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = load_json(text, json.loads if path.endswith(".json") else tomllib.loads)
    except (OSError, ValueError) as error:
        raise UsageError(f"got --config {path}, which cannot be read as TOML or .json: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"got --config {path}, which holds no options by name")
    return checked_options(path, found)


def checked_options(path: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are in a file, with their names and types checked; raises a `UsageError`."""
    types = {each.name: each for each in fields(JobConfig) if each.metadata or each.name == "recipe"}
    options = {}
    for given, value in found.items():
        name = given.replace("-", "_")
        if name not in types:
            nearest = get_close_matches(name, types, 1, 0.0)[0]
            raise UsageError(f"{path} has {given!r}, which is no option of samestep train; did you mean {nearest!r}?")
        options[name] = _from_file(path, name, value, types[name])
    return options


def _from_file(path: str, name: str, value: Any, about: Field[Any]) -> Any:
    """A value of a file in the type of its option."""
    parse = about.metadata.get("parse")
    if name == "options" and isinstance(value, dict):
        return {key: str(each) for key, each in value.items()}
    if parse is not None and name != "options" and isinstance(value, str):
        return parse(value)
    kind = next((one for one in get_args(about.type) if one is not type(None)), about.type)
    wanted, in_words = _IN_FILES[get_origin(kind) or kind]
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{path} has {name} = {value!r}; needed: {in_words}")
    return value


_IN_FILES: Mapping[Any, tuple[Any, str]] = {
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    bool: (bool, "true or false"),
    str: (str, "a text"),
    Mapping: (dict, "a table of names and values"),
    Sequence: (list, "a list of numbers"),
}


def _check_limits(option: Field[Any], value: Any) -> None:
    """Checks a value against the limits in its field's metadata."""
    limits = option.metadata
    if limits["choices"]:
        check_choice(option.name, value, limits["choices"])
    if limits["least"] is not None or limits["above"] is not None:
        whole = float not in get_args(option.type)
        check_number(option.name, value, limits["least"], limits["most"], above=limits["above"], whole=whole)
