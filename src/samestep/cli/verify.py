"""`samestep verify`: compares runs of a program on several device counts; names the first difference and its cause."""

import glob
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from samestep.checks import check_choice, check_number
from samestep.cli.options import (
    COMPARED,
    DEVICES,
    ProcessOptions,
    ScriptOptions,
    made_portable,
    one_of,
    with_options,
)
from samestep.comm.environment import read_environment
from samestep.devices.selection import Selection, select
from samestep.errors import UsageError
from samestep.recipes.catalog import NAMES, module_of
from samestep.text import counted, json_text, notify

if TYPE_CHECKING:
    from samestep.verify.program_runner import VerifiedProgram
    from samestep.verify.verdict import NamedCause, Verdict

TIERS = {
    "bitwise": "every bit is equal",
    "allclose": "equal up to rounding",
    "count-exact": "the same samples, divided by the true counts",
    "sample-exact": "the same samples in every step",
}
MISSED = {
    "bitwise": "equal to the bit",
    "allclose": "equal up to rounding",
    "count-exact": "divided by the same counts",
    "sample-exact": "the same samples",
}
FAMILIES = {
    "api": "uses samestep.Run",
    "single-process": "written for one process; its model's batches were cut into parts",
    "ddp": "written for several processes",
}
LABEL_WIDTH = 11
NOT_A_RECIPES = frozenset({"--devices", "--steps", "--tier", "--wrap", "--single-process", "--multi-process", "--json"})
"""Own options that a recipe does not have, or that verify gives it."""


def _programs(incomplete: str) -> list[str]:
    """What a shell offers for the program: the recipes, and scripts of this folder."""
    return [*one_of(*NAMES)(incomplete), *sorted(map(str, Path().glob(f"{glob.escape(incomplete)}*.py")))]


@with_options
def verify(
    context: typer.Context,
    script: ScriptOptions,
    processes: ProcessOptions,
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT|RECIPE ARGS",
            help="A script or a recipe, and its own arguments.",
            show_default=False,
            autocompletion=_programs,
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="SPECS",
            rich_help_panel=COMPARED,
            help="What to compare, the reference first: cpu:1,cpu:2,cpu:3 or 1,2,4 (counts). By default 1 to 3 of "
            "the GPUs; with fewer than two, as many processes on the CPU.",
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", rich_help_panel=COMPARED, help="Optimizer steps to compare; then the program is ended."
        ),
    ] = 20,
    tier: Annotated[
        str | None,
        typer.Option(
            metavar="TIER",
            rich_help_panel=COMPARED,
            autocompletion=one_of(*TIERS),
            help="How equal the runs have to be: bitwise (to the bit), allclose (up to rounding), count-exact (same "
            "samples and counts) or sample-exact (same samples). By default bitwise; for scripts that are written for "
            "several processes, allclose.",
        ),
    ] = None,
    golden: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=COMPARED,
            help="Compare the steps with those in FILE too, to the bit. Exit code 1 if they differ, 4 if FILE was "
            "written on another kind of CPU or with other settings, and cannot be compared.",
        ),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", rich_help_panel=COMPARED, help="Write the steps to the FILE of --golden.")
    ] = False,
    hang_seconds: Annotated[
        float,
        typer.Option("--hang-seconds", metavar="SECONDS", rich_help_panel=DEVICES, help="How long a step may take."),
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Runs SCRIPT or RECIPE on several device counts, compares the runs, and names what differs first, and why.

    Compared are the samples, the loss, the gradient of every parameter and the state after each step. Options go
    before SCRIPT. Exit code 0: they agree as required; 1: they do not, or agreeing proves nothing; 4: the golden FILE
    was written with other settings.
    """
    from samestep.verify.program_runner import ProgramRunner, Stopped

    if not program:
        raise UsageError("there is nothing to verify; give a script or a recipe: samestep verify train.py")
    if tier is not None:
        check_choice("--tier", tier, TIERS)
    check_number("--hang-seconds", hang_seconds, above=0, high=1e9, whole=False)
    if read_environment().launcher != "none":
        raise UsageError("verify starts processes itself; call it without torchrun, srun or mpirun")
    _check_order(context, program, script.module)
    if write and golden is None:
        raise UsageError("got --write without --golden; needed: the file to write, --golden FILE --write")
    if golden is not None and write and not golden.resolve().parent.is_dir():
        raise UsageError(f"{golden} cannot be written: there is no folder {golden.parent}; make it, or choose another")
    kept = None
    if golden is not None and not write:
        from samestep.verify.golden import read_golden

        kept = read_golden(golden)
    is_recipe = _is_recipe(program[0], script.module)
    selections = {
        name: made_portable(each, processes.portable, default=is_recipe) for name, each in _selections(devices).items()
    }
    options = {"logical_devices": script.logical_devices, "seed": script.seed, "wrap": script.wrap}
    chosen = _program(program, script.module, script.single_process, options, selections)
    with (
        ProgramRunner(
            chosen,
            selections,
            num_threads=processes.num_threads,
            start_method=processes.start_method,
            hang_seconds=hang_seconds,
        ) as runner,
        _telling(as_json) as tell,
    ):
        runner.warm_up()  # the workers' process imports torch while this one does
        from samestep.verify.verdict import reach_verdict

        try:
            required = tier or ("bitwise" if chosen.logical_devices else None)
            verdict = reach_verdict(runner, tuple(selections), steps, required, tell)  # type: ignore[arg-type]  # checked
        except Stopped as stopped:
            raise typer.Exit(stopped.exit_code) from None
        result = None
        if golden is not None and verdict.agrees:
            from samestep.verify.golden import check_golden

            result = check_golden(golden, kept, runner, program, processes.num_threads, steps)
    if as_json:
        more = {} if result is None else {"golden": result._asdict()}
        print(json_text({"agrees": verdict.agrees, **asdict(verdict), **more}))
    else:
        show(verdict)
        if result is not None:
            _say(Console(highlight=False), "golden", result.text, "" if result.exit_code == 0 else "bold red")
    raise typer.Exit(result.exit_code if result is not None else 0 if verdict.agrees else 1)


def _is_recipe(name: str, module: bool) -> bool:
    return name in NAMES and not module and not Path(name).is_file()


def _check_order(context: typer.Context, program: list[str], module: bool) -> None:
    """Warns of verify's own options after the program, which get passed to it."""
    name, *words = program
    given = [word.partition("=")[0] for word in words]
    if _is_recipe(name, module):
        misplaced = [word for word in given if word in NOT_A_RECIPES]
        if misplaced:
            raise UsageError(
                f"got {', '.join(misplaced)} after {name}; verify's own options go before the program: "
                f"samestep verify {misplaced[0]} … {name}"
            )
        return
    own = {word for option in context.command.params for word in (*option.opts, *option.secondary_opts)}
    text = "" if module or not Path(name).is_file() else Path(name).read_text(encoding="utf-8", errors="replace")
    unknown = [word for word in given if word in own and word.startswith("--") and word not in text]
    if unknown:
        notify(
            f"{', '.join(unknown)} after {name} is given to the program; verify's own options go before it: "
            f"samestep verify {unknown[0]} … {name}"
        )


def _selections(devices: str | None) -> "dict[str, Selection]":
    """The devices to compare, by the user's names for them."""
    if devices is None:
        here = select("auto")
        names = [f"cpu:{count}" for count in (1, 2, 3)]
        if here.kind != "cpu" and here.count > 1:
            names = [str(count) for count in range(1, min(3, here.count) + 1)]
    else:
        names = [name.strip() for name in devices.split(",")]
    if len(set(names)) != len(names) or "" in names or len(names) < 2:
        raise UsageError(f"got --devices {devices}; needed: two or more different ones, such as cpu:1,cpu:2 or 1,2,4")
    return {name: select(name) for name in names}


def _program(
    program: list[str],
    module: bool,
    single_process: bool | None,
    options: dict[str, Any],
    selections: "dict[str, Selection]",
) -> "VerifiedProgram":
    """The program: a recipe or a script, as by `samestep run`."""
    from samestep.launcher.job import Job
    from samestep.scripts.script_analysis import reads_as
    from samestep.verify.program_runner import VerifiedProgram

    name, *arguments = program
    given = [f"--{option.replace('_', '-')}" for option, value in options.items() if value is not None]
    if _is_recipe(name, module):
        if given or single_process:
            raise UsageError(f"got {', '.join(given) or '--single-process'} before a recipe, whose options go after it")
        return VerifiedProgram("module", module_of(name), (*arguments, "--run-dir", "{folder}"), None, name)
    kind: Literal["module", "script"] = "module" if module else "script"
    if not module and not Path(name).suffix and not Path(name).exists():
        raise UsageError(f"there is no script and no recipe {name}; recipes are {', '.join(NAMES)}")
    Job(kind, name)  # checks that it is there
    reading = reads_as(name, is_module=module)
    on_cpus = all(selection.kind == "cpu" for selection in selections.values())
    if not (single_process if single_process is not None else reading.kind == "single-process"):
        reading.check_logical_devices(options["logical_devices"])
        reading.refuse_own_ranks(single_process)
        if given not in ([], ["--logical-devices"]):
            raise UsageError(f"got {', '.join(given)}, for scripts of one process; this one is written for several")
        # Of other scripts, which make no process group of their own here, simulated GPUs would say nothing.
        simulated = on_cpus and reading.names_gpus and not (reading.own or reading.starts)
        return VerifiedProgram(kind, name, tuple(arguments), None, name, options["logical_devices"], simulated)
    script = {
        "num_microbatches": options["logical_devices"] or max(selection.count for selection in selections.values()),
        "seed": 0 if options["seed"] is None else options["seed"],
        "wrap": options["wrap"],
        "simulated": on_cpus,
    }
    return VerifiedProgram(kind, name, tuple(arguments), script, name)


@contextmanager
def _telling(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows the progress on the terminal, in one line that vanishes at the end."""
    console = Console(stderr=True, highlight=False)
    if quiet or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(text)


def show(verdict: "Verdict") -> None:
    """Prints a verdict."""
    console = Console(highlight=False)
    first, *others = verdict.devices
    family = f", {FAMILIES[verdict.family]}" if verdict.compared.steps else ""  # it shows in steps
    _say(console, "program", f"{verdict.program}{family}")
    runs = f"{', '.join([f'{first} twice', *others])}; {verdict.num_runs} runs in all"
    _say(console, "runs", runs if others else f"{first}, once")
    _say(console, "compared", _compared(verdict))
    for note in verdict.notes:
        _say(console, "note", note)
    if verdict.difference is not None:
        _say(console, "first", f"step {verdict.difference.step}: {verdict.difference.text}")
        if verdict.place is not None:
            _say(console, "where", verdict.place.text)
        for cause in verdict.causes:
            _show_cause(console, "cause", cause)
        _show_rest(console, verdict)
    for refusal in verdict.refusals:
        _say(console, "refused", refusal)
    reached = "" if verdict.reached is None else TIERS[verdict.reached]
    if verdict.agrees:
        _say(console, "agrees", f"{reached} ({verdict.reached})", "bold green")
    elif verdict.difference is None:
        _say(console, "refused", "this proves nothing", "bold red")
    else:
        _say(console, "differs", f"{reached}, but not {MISSED[verdict.required]}".removeprefix(", but "), "bold red")


def _compared(verdict: "Verdict") -> str:
    """The numbers of compared values."""
    found = verdict.compared
    parts = [
        counted(found.steps, "step"),
        counted(found.parameters, "parameter"),
        f"{found.nonzero_gradients} of {found.gradients} gradients not zero",
    ]
    parts += [counted(found.samples, "sample")] if found.samples is not None else []
    parts += [counted(found.microbatches, "microbatch")] if found.microbatches is not None else []
    parts += [counted(found.metrics, "reduced number")] if found.metrics else []
    return ", ".join(parts)


def _show_cause(console: "Console", word: str, cause: "NamedCause") -> None:
    """Prints a cause with its evidence, its remedy and the command that shows its page."""
    _say(console, word, cause.title, "bold")
    _say(console, "", f"seen: {cause.evidence}")
    _say(console, "", f"fix: {cause.advice}")
    _say(console, "", f"page: samestep explain {cause.key}")


def _show_rest(console: "Console", verdict: "Verdict") -> None:
    """Prints the confirmation, or the difference that remains unexplained."""
    if verdict.unexplained is None:
        keys = [cause.key for cause in verdict.causes]
        names = ", ".join(key for key in keys if key != "rounding")
        agree = "the runs agree" + " up to rounding" * ("rounding" in keys)
        if names:
            _say(console, "confirmed", f"without the effect of {names} {agree}; with any of it left they differ")
        elif keys:
            _say(console, "confirmed", f"{agree}, and more is required")
        return
    gone = ", ".join(cause.key for cause in (*verdict.causes, *verdict.suspects))
    left = f"without the effect of {gone} there is left: " if gone else ""
    _say(console, "unexplained", f"{left}step {verdict.unexplained.step}: {verdict.unexplained.text}")
    if verdict.unexplained_place is not None:
        _say(console, "", verdict.unexplained_place.text)
    for seen in verdict.seen:
        _say(console, "", f"seen: {seen}")
    if verdict.suspects:
        for cause in verdict.suspects:
            _show_cause(console, "suspect", cause)
        _say(console, "", "taking the effect of all suspects away does not make the runs agree")
    elif not verdict.seen:
        _say(console, "", "nothing in the table of causes points to it")


def _say(console: "Console", word: str, text: str, style: str = "") -> None:
    """Prints a line after a label; further lines of folded text are indented alike."""
    width = max(20, console.width - LABEL_WIDTH - 1) if console.is_terminal else 10_000
    lines = textwrap.wrap(text, width, break_long_words=False) or [""]
    for index, line in enumerate(lines):
        label = (word if index == 0 else "").ljust(LABEL_WIDTH + 1)
        console.print(Text.assemble((label, style or "dim"), (line, style)), soft_wrap=True)
