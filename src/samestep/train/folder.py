"""The run folder: what a run leaves on disk, each file written whole or not at all."""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from samestep.train.line import from_line
from samestep.train.naming import CONTRACT_FILE, LEDGER_FILE, check_untaken
from samestep.train.writing import make_folder, replacing


def create_folder(path: Path) -> Path:
    """Makes the folder of a new run.

    Raises:
        UsageError: a run is there already.
        RunFolderError: it cannot be made or written to.
    """
    check_untaken(path)
    make_folder(path)
    return path


def holds_run(path: Path) -> bool:
    """Whether a run began in this folder."""
    return (path / CONTRACT_FILE).exists()


def read_losses(path: Path) -> list[tuple[int, float]]:
    """(updates done, loss) of every step in a run's ledger; of a step that was run twice the later line."""
    losses: dict[int, float] = {}
    with (path / LEDGER_FILE).open("rb") as file:
        for line in file:
            with suppress(ValueError, KeyError, TypeError):
                entry = from_line(line.removesuffix(b"\n")) or {}
                if "event" not in entry:
                    losses[int(entry["step"]) + 1] = float.fromhex(entry["loss"])
    return sorted(losses.items())


def write_json(path: Path, value: Any) -> None:
    """Writes a value as indented JSON."""
    with replacing(path) as temporary:
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # JSON's form of a lone surrogate, too


def write_weights(path: Path, model: nn.Module) -> None:
    """Writes parameters and persistent buffers as safetensors, tied ones once, names without any prefix."""
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    with replacing(path) as temporary:
        try:
            save_model(model, str(temporary))
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            cause = (int(number.group(1)), os.strerror(int(number.group(1)))) if number else (str(error),)
            raise OSError(*cause) from error
