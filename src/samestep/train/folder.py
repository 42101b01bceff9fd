"""The run folder: what a run leaves on disk, each file written whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from torch import nn

from samestep.errors import RunFolderError
from samestep.train.naming import check_untaken

LEDGER_FILE = "ledger.jsonl"
METRICS_FILE = "metrics.jsonl"
WEIGHTS_FILE = "weights.safetensors"
PICTURE_FILE = "loss.png"
TENSORBOARD_FOLDER = "tensorboard"


def create_folder(path: Path) -> Path:
    """Makes the folder of a new run.

    Raises:
        UsageError: a run is there already.
        RunFolderError: it cannot be made or written to.
    """
    check_untaken(path)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failure to write below `path` into an error that says what to do.

    Raises:
        RunFolderError: the system's reason, with the path.
    """
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror or error}; free space there, or choose another folder with --run-dir"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary name to write to, and moves it to `path` when that has gone well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing(path):
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_whole(file: FileIO, path: Path, data: bytes) -> None:
    """Appends all of the data to an unbuffered file, or none of it.

    Raises:
        RunFolderError: it could not be written.
    """
    written = 0
    with writing(path):
        try:
            while written < len(data):
                written += file.write(data[written:])
        except OSError:
            if written:
                file.truncate(os.fstat(file.fileno()).st_size - written)
            raise


def write_json(path: Path, value: Any) -> None:
    """Writes a value as indented JSON."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_weights(path: Path, model: nn.Module) -> None:
    """Writes parameters and persistent buffers as safetensors, tied ones once, names without any prefix."""
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    with replacing(path) as temporary:
        try:
            save_model(model, str(temporary))
        except SafetensorError as error:
            raise OSError(str(error)) from error
