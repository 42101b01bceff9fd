"""Checkpoints of sharded state: each rank writes its local shards at the same time, and rank 0 completes the folder.

The guarantees are those of any checkpoint: the folder is renamed when every file is on the disk and in the manifest.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from samestep.comm.communicator import Communicator
from samestep.comm.local_shards import LocalShard
from samestep.errors import RunFolderError
from samestep.train.atomic_io import remove_entry, writing
from samestep.train.checkpoint.local_shards import Stored, split_files, unsharded
from samestep.train.checkpoint.manifest import Written
from samestep.train.checkpoint.state import State
from samestep.train.checkpoint.storage import Snapshot, begin_checkpoint, check_keep, complete_checkpoint
from samestep.train.checkpoint.tensors import part_name, write_part
from samestep.train.rank_zero import on_main, raise_together, share_text

_WORDS = 5  # of the size of a file, and its SHA-256


@torch.no_grad()
def with_rows(state: State, over: Communicator, is_writer: bool) -> State:
    """A state whose local shards are rows (slices of dim 0), which part files hold; else without local shards.

    Columns are exchanged for rows. If they begin within rows (ZeRO-1), all tensors are gathered, one at a time, in
    the host memory of the rank that writes. A collective call of the ranks that share the state.
    """
    files: dict[str, dict[str, Stored]] = {
        file: {name: t.in_order(over) if isinstance(t, LocalShard) else t for name, t in tensors.items()}
        for file, tensors in state.files.items()
    }
    if all(_has_rows(piece) for of_file in split_files(files)[1].values() for piece in of_file.values()):
        return State(files, state.facts)
    wholes: dict[str, dict[str, Stored]] = {}
    for file, tensors in files.items():
        wholes[file] = {}
        for name, value in tensors.items():
            whole = unsharded(value, over)
            if is_writer:
                wholes[file][name] = whole.cpu() if isinstance(value, LocalShard) else whole
    return State(wholes, state.facts)


def has_local_shards(state: State) -> bool:
    """Whether ranks write part files of a state; the same on all ranks."""
    return bool(split_files(state.files)[1])


def write_sharded(
    communicator: Communicator,
    over: Communicator,
    folder: Path,
    step: int,
    state: State,
    keep: int = 3,
    replace: bool = False,
) -> Path:
    """Writes a checkpoint; a collective call, which returns when it is complete."""
    check_keep(keep)
    state = with_rows(state, over, communicator.rank == 0)
    whole, pieces = split_files(state.files)
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
    communicator: Communicator, over: Communicator, temporary: Path, pieces: Mapping[str, Mapping[str, LocalShard]]
) -> dict[str, Written]:
    """Writes this rank's part files; the files of all ranks by name."""
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


def _has_rows(piece: LocalShard) -> bool:
    """Whether every rank has whole rows."""
    row = max(1, piece.shape[1:].numel())
    return piece.spread.blocks == 1 and all(cut % row == 0 for cut in piece.spread.cuts)


def _as_words(written: Written) -> list[int]:
    digest = bytes.fromhex(written.sha256)
    return [written.size, *(int.from_bytes(digest[k : k + 8], "big", signed=True) for k in range(0, 32, 8))]


def _from_words(words: list[int]) -> Written:
    digest = b"".join(word.to_bytes(8, "big", signed=True) for word in words[1:])
    return Written(words[0], digest.hex())
