"""Options as dataclasses: a command takes a few objects, and their fields are its options.

The metadata of a field are what `typer.Option` needs: `help`, `flags` (by default the field's name), `metavar`,
`panel`, `negated` (a flag that has a `--no-…` too), `show_default`, `min`, `max`, and `offers`, the values that a shell
offers.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from samestep.checkpoint.run_folder import holds_run, recorded
from samestep.comm.environment import MAX_THREADS, read_environment, torchrun_defaults
from samestep.devices.portable import CAPPED, PORTABLE_VARIABLE, chosen_portable, portable_variables, why_not_portable
from samestep.errors import UsageError
from samestep.text import notify

if TYPE_CHECKING:
    from samestep.devices.selection import Selection
    from samestep.launcher.meeting import Meeting

DEVICES = "Devices and workers"
COMPARED = "What is compared"
SCRIPT = "How the script is run"
SEVERAL_MACHINES = "Several machines (torchrun's options; PET_… variables give their defaults)"
SPELLINGS: Final[Mapping[str, Any]] = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""Commands are registered with these: options may be spelled with underscores, as torchrun takes them."""

Devices = Annotated[
    str | None,
    typer.Option(
        metavar="SPEC", help='auto (the default), 4 (how many), "0,4" (which), cuda:0, cpu:2, free:2 (idle ones).'
    ),
]


class Command(TyperCommand):
    """A command whose help has paragraphs as wide as the terminal, and flags without a type."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)

    def get_params(self, ctx: Any) -> Any:
        return without_types(super().get_params(ctx))


def without_types(parameters: Any) -> Any:
    """Parameters whose flags stand without a type in the help: newer versions of typer write `<bool>`."""
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return parameters


class CommandGroup(TyperGroup):
    """A group of commands; `show` is meant where a run's folder stands in the place of a command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        is_run = "show" in self.commands and args[0] not in self.commands and Path(args[0]).exists()
        return super().resolve_command(ctx, ["show", *args] if is_run else args)

    def get_params(self, ctx: Any) -> Any:
        return without_types(super().get_params(ctx))


def one_of(*offers: str) -> Callable[[str], list[str]]:
    """What a shell offers for the beginning of a value; paths it offers by itself."""
    return lambda incomplete: [each for each in offers if each.startswith(incomplete)]


def option(help: str, default: Any = None, **more: Any) -> Any:
    """A field that is an option."""
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class ProcessOptions:
    """How a worker process is started and computes: `samestep run`, `train` and `verify`."""

    start_method: str | None = option(
        "How workers are started: fork or spawn; fork where it is safe.",
        metavar="METHOD",
        panel=DEVICES,
        offers=("fork", "spawn"),
    )
    num_threads: int = option(
        "CPU threads a worker; part of what decides the bits; 1 by default.",
        1,
        metavar="N",
        min=1,
        max=MAX_THREADS,
        panel=DEVICES,
        show_default=False,
    )
    portable: bool | None = option(
        "The same bits on every x86-64 CPU with AVX2 and FMA, by kernels that all of them have; slower. By default as "
        "SAMESTEP_PORTABLE says (1 or 0), else off, for recipes on.",
        flags=("--portable/--no-portable",),
        panel=DEVICES,
        show_default=False,
    )


@dataclass(frozen=True)
class WorkerOptions:
    """The workers of a run: `samestep run` and `train`."""

    devices: str | None = option(
        'auto (the default), 4 (how many), "0,4" (which), cuda:0, cpu:2, free:2 (idle ones).',
        metavar="SPEC",
        panel=DEVICES,
    )
    nproc_per_node: str | None = option(
        "torchrun's spelling of --devices: a number, auto, gpu or cpu (one worker a core).",
        metavar="N",
        panel=DEVICES,
        offers=("auto", "gpu", "cpu"),
    )
    log_dir: str | None = option("Keep what the ranks above 0 print, in DIR/rank-N.log.", metavar="DIR", panel=DEVICES)
    audit: str | None = option(
        "With samestep.Run: compute one microbatch of every so many steps on another device too, to find devices that "
        "compute wrong bits. N:exclude (the default) leaves such a device out, N:warn repeats the step, N:stop ends.",
        metavar="N[:ACTION]",
        panel=DEVICES,
    )


@dataclass(frozen=True)
class NodeOptions:
    """The machines of a run, by torchrun's options: `samestep run` and `train`."""

    nnodes: str | None = option("On how many machines; 1 by default.", metavar="N|MIN:MAX", panel=SEVERAL_MACHINES)
    node_rank: int | None = option("This machine's number.", metavar="R", panel=SEVERAL_MACHINES)
    rdzv_endpoint: str | None = option(
        "Where they meet: at one of the machines.", metavar="HOST:PORT", panel=SEVERAL_MACHINES
    )
    rdzv_id: str | None = option("Names the run, alike on all.", metavar="ID", panel=SEVERAL_MACHINES)
    rdzv_conf: str | None = option("Such as join_timeout=60.", metavar="NAME=N,…", panel=SEVERAL_MACHINES)
    master_addr: str | None = option("Machine 0, for machines with numbers.", metavar="HOST", panel=SEVERAL_MACHINES)
    master_port: int | None = option("A free port there; 29500.", metavar="PORT", panel=SEVERAL_MACHINES)


@dataclass(frozen=True)
class ScriptOptions:
    """How an existing script is run: `samestep run` and `verify`."""

    module: bool = option("SCRIPT is a module, as in `python -m`.", False, flags=("-m", "--module"), panel=SCRIPT)
    wrap: str | None = option(
        "The variable or class of the model whose batches are cut into parts, along DIM or 0. By default what it "
        "wraps in DataParallel, or the module that its optimizer trains.",
        metavar="NAME[:DIM]",
        panel=SCRIPT,
    )
    single_process: bool | None = option(
        "Run SCRIPT as written for one process, or as written for several, as torchrun does. By default it is read to "
        "find out.",
        flags=("--single-process/--multi-process",),
        show_default=False,
        panel=SCRIPT,
    )
    logical_devices: int | None = option(
        "How many devices SCRIPT sees, however many there are: as many processes, or parts of each batch. By default "
        "as many as there are, or as its DataParallel says; under verify, the most that are compared.",
        metavar="V",
        min=1,
        panel=SCRIPT,
    )
    seed: int | None = option(
        "The seed of what SCRIPT leaves unseeded; under run each of several processes gets a number of its own from "
        "it. By default 0.",
        metavar="N",
        panel=SCRIPT,
    )


def cap_as_recorded(run: Path) -> None:
    """Caps the kernels of this process if a run's were portable; before NumPy and torch are imported."""
    if holds_run(run) and recorded(run).get("portable") is not None:
        os.environ.update(portable_variables("cpu", True))
        if "numpy" not in sys.modules:
            CAPPED.add(os.getpid())


def made_portable(selection: "Selection", asked: bool | None, default: bool = False) -> "Selection":
    """The selection with what its workers are to do about portable kernels."""
    portable = chosen_portable(selection.kind, asked, default)
    portable_variables(selection.kind, portable)  # refuses what cannot be portable
    if portable is None and default and selection.kind == "cpu":
        notify(
            f"--portable, the default, is left out: {why_not_portable('cpu')}; the bits then depend on the kind of CPU"
        )
    return selection if portable is None else selection.with_variables(**{PORTABLE_VARIABLE: str(int(portable))})


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each dataclass among a command's parameters by options, one a field that has metadata."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if not is_dataclass(group := hints[name]) or not isinstance(group, type):
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[name] = group
        types = get_type_hints(group)
        parameters += [_parameter(each, types[each.name]) for each in fields(group) if each.metadata]

    @functools.wraps(command)
    def called(**values: Any) -> None:
        made: dict[str, Any] = {}
        for name, group in groups.items():
            given = {each.name: values.pop(each.name) for each in fields(group) if each.metadata}
            made[name] = group(**{field: value for field, value in given.items() if value is not None})
        command(**values, **made)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # which typer reads
    called.__annotations__ = {}
    return called


def _parameter(each: Field[Any], kind: Any) -> inspect.Parameter:
    """A field as a parameter of the command."""
    about: Mapping[str, Any] = each.metadata
    base = next((arg for arg in get_args(kind) if arg is not type(None)), kind)
    name = each.name.replace("_", "-")
    flags: Sequence[str] = about.get("flags", ())
    if base is bool and not flags:
        flags = (f"--{name}/--no-{name}",) if about.get("negated") else (f"--{name}",)
    if each.default is None:
        base = base | None
    offers = about.get("offers")
    found = typer.Option(
        *flags,
        help=about["help"],
        metavar=about.get("metavar"),
        rich_help_panel=about.get("panel"),
        show_default=about.get("show_default", True),
        min=about.get("min"),
        max=about.get("max"),
        autocompletion=one_of(*offers) if offers else None,
    )
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=Annotated[base, found]
    )


def chosen_meeting(nodes: NodeOptions) -> "Meeting | None":
    """Where the machines of the run meet, by these options and the variables that stand for them; None for one."""
    from samestep.launcher.meeting import Meeting, parse_nodes

    options = {name: str(value) for name, value in asdict(nodes).items() if value is not None}
    launcher = read_environment().launcher
    if launcher not in ("none", "slurm", "mpi"):
        if options:
            raise UsageError(
                "got --nnodes, --rdzv-endpoint or the like under "
                f"{'torchrun or the like' if launcher == 'other' else launcher}, which has started the ranks of all "
                "nodes already; leave them out"
            )
        return None
    known = {**(torchrun_defaults() if launcher == "none" else {}), **options}
    if parse_nodes(known.get("nnodes", "1"))[1] == 1 and "rdzv_endpoint" not in known:
        if options and "nnodes" not in known:  # without a word each machine would be a run of its own
            given = ", ".join(f"--{name.replace('_', '-')}" for name in options)
            raise UsageError(f"got {given} without the number of machines; give --nnodes N as well, or leave it out")
        return None
    return Meeting.of(known)


def chosen_devices(workers: WorkerOptions) -> str | None:
    """The devices by --devices, --nproc-per-node or the variable that stands for it; None without any of them."""
    devices, nproc_per_node = workers.devices, workers.nproc_per_node
    if devices is not None and nproc_per_node is not None:
        raise UsageError(f"got --devices {devices} and --nproc-per-node {nproc_per_node}; give one of the two")
    if devices is not None:
        return devices
    text = (nproc_per_node or torchrun_defaults().get("nproc_per_node", "")).strip().lower()
    if text == "cpu":
        return f"cpu:{os.cpu_count() or 1}"
    return "cuda" if text == "gpu" else text or None
