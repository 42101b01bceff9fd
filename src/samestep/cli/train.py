"""`samestep train`: a recipe, which is a script of samestep's, as `samestep run` runs one."""

from typing import Annotated, Any

import typer

from samestep.cli.options import (
    Command,
    NodeOptions,
    ProcessOptions,
    ScriptOptions,
    WorkerOptions,
    one_of,
    with_options,
)
from samestep.launcher.job import Policy
from samestep.recipes.catalog import NAMES, module_of


class TrainCommand(Command):
    """The command, but what it does not know is an argument of the recipe, and so is `--help` after its name."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        names = [place for place, word in enumerate(args) if word in NAMES]
        if names and "--help" in args[names[0] :]:
            args = [word for word in args if word != "--help"] + ["--", "--help"]
        return super().parse_args(ctx, args)


@with_options
def train(
    context: typer.Context,
    workers: WorkerOptions,
    processes: ProcessOptions,
    policy: Policy,
    nodes: NodeOptions,
    recipe: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME ARGS",
            help=f"A recipe, {', '.join(NAMES)}, and its own arguments, which `samestep train NAME --help` lists.",
            show_default=False,
            autocompletion=one_of(*NAMES),
        ),
    ] = None,
) -> None:
    """Trains a recipe on all devices: the same bits on any number of them.

    A recipe is a script with samestep.Trainer, to be copied and changed: `samestep train NAME ARGS` is
    `samestep run -m samestep.recipes.NAME ARGS`. Without a name the recipes are listed.
    """
    if not recipe:
        for name, about in NAMES.items():
            print(f"{name:<10} {about}")
        return
    from samestep.cli.run import run_script

    program = [module_of(recipe[0]), *recipe[1:]]
    script = ScriptOptions(module=True)
    run_script(program, script, workers, processes, policy, nodes, early=context.obj)
