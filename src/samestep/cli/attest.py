"""`samestep attest`: a statement on a recorded run, to be signed."""

from pathlib import Path
from typing import Annotated

import typer


def attest(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
) -> None:
    """Writes attestation.json into RUN: hashes of its code, packages, ledger and checkpoints, to be signed by others.

    It is an in-toto Statement. `samestep audit` compares it with the folder.
    """
    from samestep.runs.attestation import attest as attest_run

    print(attest_run(run))
