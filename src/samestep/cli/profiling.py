"""The option that asks for a profile, and how one is shown: the same for `samestep train` and `samestep run`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.errors import UsageError

if TYPE_CHECKING:
    from samestep.devices.selection import Selection

Profile = Annotated[
    bool,
    typer.Option("--profile", help="Show at the end where the time of a step went, and leave a trace for Perfetto."),
]
ProfileDir = Annotated[
    Path | None,
    typer.Option(
        "--profile-dir", metavar="DIR", help="Where the profile goes, instead of the folder profile; asks for one too."
    ),
]


def profiled(selection: "Selection", folder: Path) -> "Selection":
    """The devices, whose workers are to leave a profile in a folder, which is made and emptied of an older one.

    Raises:
        UsageError: it cannot be made.
    """
    from samestep.comm.environment import PROFILE_VARIABLE
    from samestep.train.profile.files import remove_profile

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot make {folder} for the profile: {reason}; choose another by --profile-dir") from error
    remove_profile(folder)
    variables = {**selection.environment, PROFILE_VARIABLE: str(folder.resolve())}
    return replace(selection, environment=variables)


def show_profile(folder: Path, *, to_stderr: bool, silent: bool = False) -> dict[str, Any] | None:
    """Puts together what the ranks left, prints it, and returns it as JSON; None where they left nothing.

    Args:
        folder: of the profile.
        to_stderr: where the script's own output must stay alone on stdout.
        silent: print nothing but why there is no profile.
    """
    import sys

    from samestep.train.profile.showing import merge_profile, print_profile

    try:
        profile = merge_profile(folder)
    except UsageError as error:
        typer.echo(f"samestep: no profile: {error}", err=True)
        return None
    if not silent:
        print_profile(profile, sys.stderr if to_stderr else sys.stdout)
    return profile.as_json()
