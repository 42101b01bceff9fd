"""The command line of a recipe: the arguments that all have, and the folder of a run."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from samestep.checkpoint.run_folder import RUNS_FOLDER, new_folder_name, run_of
from samestep.checks import check_number
from samestep.comm.environment import read_environment
from samestep.core.microbatches import DEFAULT_NUM_MICROBATCHES
from samestep.engine.precision import PRECISIONS
from samestep.engine.strategy_options import STRATEGIES
from samestep.errors import UsageError
from samestep.run.replay_protocol import current_rerun
from samestep.run.run import Run
from samestep.runs.run_list import run_status


class Parser(argparse.ArgumentParser):
    """argparse, with a sentence for a mistake in place of the usage."""

    def error(self, message: str) -> NoReturn:
        """Ends with the exit code 2; as a worker by an error, which the launcher shows once."""
        text = f"{message}; --help lists the arguments"
        if read_environment().launcher != "none":
            raise UsageError(text)
        self.exit(2, f"samestep: error: {text}\n")


def make_parser(
    text: str | None, *, data: str, epochs: int, batch: int, lr: float, microbatches: int = DEFAULT_NUM_MICROBATCHES
) -> Parser:
    """A parser of the common arguments, by a recipe's defaults; `text` says what it is, `data` what it reads."""
    parser = Parser(description=(text or "").partition("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--data", help=f"{data}; by default the data that is embedded")
    add("--epochs", type=number(1), default=epochs, help="passes through the data; %(default)s")
    add("--max-steps", type=number(1), help="end after this step of the run, if that is sooner")
    add(
        "--global-batch-size",
        type=number(1),
        default=batch,
        help="samples of one optimizer step, on any devices; %(default)s",
    )
    add(
        "--num-microbatches",
        type=number(1),
        default=microbatches,
        help="parts of a batch, at least one a device; %(default)s",
    )
    add("--lr", type=number(above=0, whole=False), default=lr, help="learning rate; %(default)s")
    add("--precision", choices=PRECISIONS, default="32-true", help="of forward and backward; %(default)s")
    add(
        "--strategy",
        choices=tuple(STRATEGIES),
        default="replicate",
        help="how the state lies on the devices; %(default)s",
    )
    add("--seed", type=number(0), default=0, help="of weights, order and dropout; %(default)s")
    add("--run-dir", type=Path, help=f"where the run goes; {RUNS_FOLDER}/NAME-DATE-TIME by default")
    add("--resume", metavar="RUN|auto", help="go on with this run, or with the newest that did not end, on any devices")
    add("--checkpoint-steps", type=number(1), help="write a checkpoint after every so many steps")
    add("--best", metavar="METRIC", help="keep the checkpoint that is best by this metric of the evaluation")
    return parser


def number(low: float | None = None, *, whole: bool = True, **limits: float) -> Callable[[str], Any]:
    """The type of an argument: text to a number, within limits as `check_number` has them."""

    def parse(text: str) -> int | float:
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = math.nan
        try:
            check_number("it", value, low, whole=whole, option="", **limits)
        except UsageError as error:
            raise argparse.ArgumentTypeError(f"got {text}; {str(error).partition('; ')[2]}") from None
        return value

    return parse


def trainer_options(run: Run, arguments: argparse.Namespace, data: str) -> dict[str, Any]:
    """What the common arguments say to a `Trainer`; prints the data, and the run's folder, the same on all ranks."""
    folder: Path | None = arguments.run_dir
    is_replay = current_rerun() is not None
    resume: str | None = None if is_replay else arguments.resume
    if folder is None and resume not in (None, "auto"):
        folder = run_of(Path(str(resume)))
    if folder is None:
        name = Path(sys.argv[0]).stem
        found = (_unfinished(name) if resume == "auto" else None) or new_folder_name(name)
        folder = Path(run.membership.perform(lambda: run.communicator.share_value(str(found))))
    if not is_replay:
        run.print(f"data     {data}\nrun      {folder}")
    given, common = vars(arguments), vars(make_parser(None, data="", epochs=1, batch=1, lr=1).parse_args([]))
    own = {name: value for name, value in given.items() if name not in common}
    contract = {"data": data, "epochs": arguments.epochs, "options": own}
    names = ("precision", "strategy", "checkpoint_steps", "best")
    return {"run_dir": folder, "contract": contract, **{name: given[name] for name in names}}


def _unfinished(name: str) -> Path | None:
    """The newest run of this name that has a checkpoint and did not end."""
    runs = [run_status(folder) for folder in RUNS_FOLDER.glob(f"{name}-*")]
    left = [run for run in runs if run.state in ("stopped", "crashed") and run.checkpoint is not None]
    return max(left, key=lambda run: run.changed).path if left else None
