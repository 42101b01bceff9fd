"""`samestep profile`: a profile that a run left, shown again."""

import json
from pathlib import Path
from typing import Annotated

import typer


def profile(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run's folder, or that of a profile.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Shows again where the time of a step went, and what follows: the profile that --profile left.

    Nothing is written.
    """
    from samestep.train.profile.showing import load_profile, print_profile

    found = load_profile(folder)
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        print_profile(found)
