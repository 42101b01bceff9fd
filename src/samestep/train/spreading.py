"""Checkpoints of a state that is spread over the ranks: each writes its part, all at once, and rank 0 makes them one.

The guarantees are those of any checkpoint: nothing has its name before every file is on the disk and in the manifest.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from samestep.comm.communicator import Communicator
from samestep.comm.pieces import Piece
from samestep.errors import RunFolderError
from samestep.train.checkpoint import Snapshot, begin_checkpoint, check_keep, complete_checkpoint
from samestep.train.partfile import part_name, write_part
from samestep.train.parts import divided, gathered, has_rows, in_order
from samestep.train.state import State
from samestep.train.temporary import remove_entry
from samestep.train.tensorfile import Written
from samestep.train.together import on_main, raise_together, share_text
from samestep.train.writing import writing

_WORDS = 5  # of the size of a file, and its SHA-256


def has_part_files(state: State) -> bool:
    """Whether each rank can write its part of a state by itself: whole rows; the same on all ranks."""
    pieces = [piece for of_file in divided(state.files)[1].values() for piece in of_file.values()]
    return bool(pieces) and all(has_rows(piece) for piece in pieces)


def write_together(
    communicator: Communicator,
    over: Communicator,
    folder: Path,
    step: int,
    state: State,
    keep: int = 3,
    replace: bool = False,
) -> Path:
    """Writes a checkpoint; all ranks call it, and none goes on before it is complete.

    Args:
        communicator: this rank's communicator.
        over: the same among those over which the state is spread; where several groups have it, the first one writes.
        folder: see `write_checkpoint`; on a file system that all ranks share.
        step: of the checkpoint.
        state: with this rank's pieces.
        keep: see `write_checkpoint`.
        replace: see `write_checkpoint`.

    Returns:
        The folder of the checkpoint.

    Raises:
        UsageError: `keep` is less than 1.
        RunFolderError: a rank cannot write; nothing that was good is lost. Raised on all ranks.
    """
    check_keep(keep)
    state = State(in_order(state.files, over), state.facts)
    if not has_part_files(state):
        state = State(gathered(state.files, over, communicator.rank == 0), state.facts)
    whole, pieces = divided(state.files)
    begun = on_main(communicator, lambda: begin_checkpoint(folder, step, replace))
    name = json.loads(share_text(communicator, json.dumps(None if begun is None else begun.name)))
    temporary = None if name is None else folder / name
    try:
        parts = {} if temporary is None else _write_parts(communicator, over, temporary, pieces)
        snapshot = Snapshot(step, whole, state.facts)
        path = on_main(
            communicator, lambda: str(complete_checkpoint(folder, snapshot, temporary, parts, keep, replace))
        )
        return folder / Path(share_text(communicator, path or "")).name
    finally:
        if communicator.rank == 0 and temporary is not None:
            remove_entry(temporary)


@torch.no_grad()
def _write_parts(
    communicator: Communicator, over: Communicator, temporary: Path, pieces: Mapping[str, Mapping[str, Piece]]
) -> dict[str, Written]:
    """Writes this rank's parts; what all ranks have written, by the names of files."""
    rank, ranks = over.rank, over.world_size
    writes = communicator.rank < ranks  # ranks of the first group are the first ones
    mine, error = [], None
    try:
        if writes and not temporary.is_dir():
            raise RunFolderError(
                f"rank {communicator.rank} does not see {temporary}, which rank 0 has made: every rank writes its part "
                "of the state there; give a folder on a file system that all of them share (--run-dir)"
            )
        with writing(temporary):
            for file, own in pieces.items() if writes else ():
                mine.append(write_part(temporary / part_name(file, rank, ranks), own, rank))
    except RunFolderError as failure:
        error = failure
    raise_together(communicator, error)
    words = [word for written in mine for word in _as_words(written)] if writes else [0] * _WORDS * len(pieces)
    rows = communicator.gather_words(words)[:ranks]
    return {
        part_name(file, other, ranks): _from_words(row[_WORDS * number : _WORDS * (number + 1)])
        for other, row in enumerate(rows)
        for number, file in enumerate(pieces)
    }


def _as_words(written: Written) -> list[int]:
    digest = bytes.fromhex(written.sha256)
    return [written.size, *(int.from_bytes(digest[k : k + 8], "big", signed=True) for k in range(0, 32, 8))]


def _from_words(words: list[int]) -> Written:
    digest = b"".join(word.to_bytes(8, "big", signed=True) for word in words[1:])
    return Written(words[0], digest.hex())
