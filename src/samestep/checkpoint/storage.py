"""The storage of checkpoints: folders of safetensors and JSON, written whole or not at all, and verified when read.

    checkpoints/step-00001200/model.safetensors  optimizer.safetensors  …  state.json  manifest.json
                              model.shard-00001-of-00004.safetensors  …    of a sharded state
    checkpoints/latest                           the name of the one written last, for people
    checkpoints/best                             the name of the best by a metric, which is not removed

A checkpoint is made under a temporary name: each file is written and synced to the disk, then the manifest with their
checksums, then the folder is renamed. However the writer ends, a folder called `step-…` is complete; if the disk
changes it later, it no longer fits its manifest. The manifest lists the files of all ranks.

One that replaces another of its step takes two renames, since portable ones replace no folder: in between, the other
one is `step-….replaced`, which readers take for it, and the next writer names it back.

The order on the disk is what makes it safe, whatever ends a writer: begin (older leftovers removed, a folder `.tmp-…`
locked), the files, the manifest, the rename, `latest` and `best`, and only then the removal of older checkpoints. The
writer of a whole state calls `write_checkpoint`; ranks with shards call its two halves with their files in between.
"""

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.checkpoint.run_folder import CHECKPOINT_FOLDER, FACTS_FILE, holds_run
from samestep.checkpoint.verified_files import (
    MANIFEST_FILE,
    SUFFIX,
    Manifest,
    Written,
    is_part,
    manifest_bytes,
    parts_by_file,
    read_facts,
    read_manifest,
    read_parts,
    read_tensors,
    verify,
    write_sealed,
    write_sealed_tensors,
)
from samestep.checks import check_number
from samestep.errors import CheckpointError
from samestep.files import check_kind, read_small, staging, sync_folder, writing

LATEST_FILE, BEST_FILE = "latest", "best"
_REPLACED = ".replaced"
_NAME = re.compile(rf"step-(\d{{8,}})(?:{re.escape(_REPLACED)})?", re.ASCII)
_OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST, errno.EACCES}  # EACCES: Windows, where a rename replaces no folder
# The first may find an older one in its place, the second one that a faster process made; a third is an
# error.
_RENAMES = 3


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at a step boundary.

    Attributes:
        step: how many updates the state has seen.
        files: tensors by name, for each file: {"model": …} is model.safetensors. To be written they are in host memory;
            of sharded tensors a rank has local shards.
        facts: JSON, for state.json.
        is_best: whether `best` names it once it is written.
    """

    step: int
    files: Mapping[str, Mapping[str, Any]]
    facts: Any
    is_best: bool = False


Check = Callable[[Snapshot], None]


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that is good.

    Attributes:
        path: its folder.
        snapshot: its content, verified.
        skipped: a sentence on each newer one that was not good, the newest first.
    """

    path: Path
    snapshot: Snapshot
    skipped: tuple[str, ...]


def checkpoint_name(step: int) -> str:
    """The name of a checkpoint's folder: step-00001200."""
    return f"step-{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint."""
    return _NAME.fullmatch(name) is not None


def write_checkpoint(folder: Path, snapshot: Snapshot, keep: int = 3, replace: bool = False) -> Path:
    """Writes a checkpoint, whole or not at all, and removes older ones.

    A good one of the same step is kept unless `replace` says that other content takes its place, such as the record of
    an evaluation. Other good ones are removed only when the new one is complete, and only if they are older.
    """
    check_number("keep", keep, 1)
    with ExitStack() as until:
        temporary = begin_checkpoint(until, folder, snapshot.step, replace)
        return complete_checkpoint(folder, snapshot, temporary, {}, keep, replace)


def begin_checkpoint(until: ExitStack, folder: Path, step: int, replace: bool) -> Path | None:
    """Makes the temporary folder of a checkpoint, removed at the latest with `until`; None if a good one is kept."""
    target = folder / checkpoint_name(step)
    with writing(target):
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            # Else a crash could lose the name of the folder, and with it checkpoints whose own bytes are on the disk.
            sync_folder(folder.parent)
        # A writer that was killed between the two renames of a replacement has left the older one under this name.
        for aside in folder.glob(f"step-*{_REPLACED}/"):
            home = aside.with_suffix("")
            _discard(aside) if home.is_dir() else aside.rename(home)
        if not replace and verify_checkpoint(target) is None:
            return None
        temporary = until.enter_context(staging(folder)) / target.name
        temporary.mkdir()
    return temporary


def complete_checkpoint(
    folder: Path, snapshot: Snapshot, temporary: Path | None, parts: Mapping[str, Written], keep: int, replace: bool
) -> Path:
    """Writes the files beside `parts`, renames the folder of `begin_checkpoint`, and removes older checkpoints."""
    target = folder / checkpoint_name(snapshot.step)
    with writing(target):
        if temporary is not None:
            _fill(temporary, snapshot, parts)
            _move_into_place(temporary, target, replace)
        # After the rename: these files may name an older checkpoint, never one that is not there. And before older ones
        # are removed: the best one is kept by its name in `best`.
        point_to(folder, LATEST_FILE, target.name)
        if snapshot.is_best:
            point_to(folder, BEST_FILE, target.name)
        _remove_older(folder, snapshot.step, keep)
    return target


def verify_checkpoint(path: Path) -> str | None:
    """Reads a whole checkpoint against its checksums; a sentence if it is not good."""
    try:
        for name, written in checked_manifest(path).files.items():
            verify(path / name, written)
    except (CheckpointError, OSError) as error:
        return _sentence(path, error)
    return None


def read_checkpoint(path: Path, only: str | None = None, check: Check | None = None) -> Snapshot:
    """Reads a checkpoint, or one of its files of tensors, from bytes whose checksums were verified.

    Raises a `CheckpointError` if it is not good, or if `check` raises one.
    """
    try:
        return _read(path, only, check)
    except (CheckpointError, OSError, MemoryError) as error:
        message = f"{_sentence(path, error)}; take another checkpoint, or a copy of this one"
        raise CheckpointError(message) from error


def newest_checkpoint(
    folder: Path,
    before: int | None = None,
    tell: Callable[[str], None] | None = None,
    check: Check | None = None,
    only: str | None = None,
) -> Found | None:
    """The newest good checkpoint, at most of step `before`, read as by `read_checkpoint`.

    `tell` gets a sentence on each newer one that is skipped.
    """
    skipped: list[str] = []
    for step, path in reversed(list_checkpoints(folder)):
        if before is not None and step > before:
            continue
        try:
            return Found(path, _read(path, only, check), tuple(skipped))
        except (CheckpointError, OSError, MemoryError) as error:
            skipped.append(_sentence(path, error))
            if tell is not None:
                tell(skipped[-1])
    return None


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and folders of all checkpoints, good or not, the oldest first."""
    try:
        return _listed(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}; make it readable") from error


def located(path: Path) -> Path:
    """The folder of a checkpoint, which may be set aside by a writer that was killed while it replaced it."""
    aside = path.with_suffix(_REPLACED)
    return aside if aside.is_dir() and not path.is_dir() else path


def _check_place(folder: Path) -> None:
    """Raises an `OSError` if the checkpoints of a run are behind a symbolic link; a loop's own folder may be one."""
    if folder.name == CHECKPOINT_FOLDER and holds_run(folder.parent):
        check_kind(folder, may_be_folder=True)


def strange_entries(folder: Path, is_own: bool) -> Iterator[str]:
    """The entries of a folder of checkpoints that no run writes; of a loop's own folder, those named so alone."""
    paths = [path for step, path in list_checkpoints(folder) if step or not is_own]  # a run writes none of step 0
    for name in sorted({*os.listdir(folder)} - {*(path.name for path in paths), LATEST_FILE, BEST_FILE}):
        if is_checkpoint_name(name) or (is_own and not name.startswith(".tmp-")):
            yield name
    for path in paths:
        with suppress(CheckpointError, OSError):  # one that is not good
            files = {name for name in checked_manifest(path).files if name == FACTS_FILE or name.endswith(SUFFIX)}
            yield from sorted(f"{path.name}/{name}" for name in {*os.listdir(path)} - files - {MANIFEST_FILE})


def _listed(folder: Path) -> list[tuple[int, Path]]:
    _check_place(folder)
    # One in its place comes after the one that it replaces.
    paths = sorted(folder.iterdir(), reverse=True)
    matches = [(_NAME.fullmatch(path.name), path) for path in paths]
    return sorted({int(match[1]): path for match, path in matches if match and path.is_dir()}.items())


def _read(path: Path, only: str | None, check: Check | None) -> Snapshot:
    manifest = checked_manifest(path)
    files: dict[str, dict[str, Any]] = {}
    facts = None
    for name, written in manifest.files.items():
        if name == FACTS_FILE:
            facts = read_facts(path / name, written)
        elif not name.endswith(SUFFIX):
            verify(path / name, written)
        elif not is_part(name) and only in (None, file := name.removesuffix(SUFFIX)):
            files[file] = read_tensors(path / name, written)
    for file, names in parts_by_file(manifest.files).items():
        if only in (None, file):
            files[file] = {**files.get(file, {}), **read_parts(path, names, manifest.files)}
    snapshot = Snapshot(manifest.step, files, facts)
    if check is not None:
        check(snapshot)
    return snapshot


def checked_manifest(path: Path) -> Manifest:
    """The manifest, whose step must be that in the folder's name, if there is one."""
    if not path.is_dir():
        raise CheckpointError("there is no such folder")
    match = _NAME.fullmatch(path.name)
    if match:  # a link of another name is the user's own
        _check_place(path.parent)
        check_kind(path, may_be_folder=True)
    manifest = read_manifest(path)
    if match and int(match[1]) != manifest.step:
        raise CheckpointError(f"it holds step {manifest.step}, which is not what its name says")
    return manifest


def _sentence(path: Path, error: Exception) -> str:
    reason: object = error
    if isinstance(error, MemoryError):
        reason = "it does not fit in this machine's memory"
    elif isinstance(error, OSError):
        file = "" if error.filename is None else f"{Path(error.filename).name}: "
        reason = f"{file}{error.strerror or error}"
    return f"{path} is no good checkpoint: {reason}"


def _fill(folder: Path, snapshot: Snapshot, parts: Mapping[str, Written]) -> None:
    """Writes all files that are not there yet, the manifest last."""
    files = dict(parts)
    for name, tensors in snapshot.files.items():
        files[f"{name}{SUFFIX}"] = write_sealed_tensors(folder / f"{name}{SUFFIX}", tensors)
    facts = json.dumps(snapshot.facts, allow_nan=False, separators=(",", ":")).encode()
    files[FACTS_FILE] = write_sealed(folder / FACTS_FILE, facts)
    write_sealed(folder / MANIFEST_FILE, manifest_bytes(Manifest(snapshot.step, files)))
    sync_folder(folder)


def _differ(path: Path, other: Path) -> bool:
    """Whether two checkpoints have other files, by their manifests."""
    return checked_manifest(path).files != checked_manifest(other).files


def _move_into_place(temporary: Path, target: Path, replace: bool) -> None:
    """Renames a complete checkpoint; a good one that is there is kept, unless it is replaced by another content."""
    aside = target.with_suffix(_REPLACED)
    # A rename fails if its name is taken: by an earlier checkpoint of this step, by a damaged one, or by one of another
    # process. What is there is verified then, set aside if it is to be replaced, and the rename tried again.
    for attempt in range(_RENAMES):
        try:
            temporary.rename(target)
            break
        except OSError as error:
            if error.errno not in _OCCUPIED or not target.is_dir() or attempt == _RENAMES - 1:
                raise
        if verify_checkpoint(target) is None and not (replace and _differ(temporary, target)):
            break  # another process was faster
        target.rename(aside)
    # Before the one set aside goes: until then a crash may undo the rename, and would leave neither.
    sync_folder(target.parent)
    _discard(aside)


def point_to(folder: Path, file: str, name: str) -> None:
    """Makes `latest` or `best` name a checkpoint; raises a `RunFolderError` if it cannot be written."""
    # Replaced by a rename: a reader finds the old name or the new one, and never an empty file.
    with writing(folder / file), staging(folder) as temporary:
        write_sealed(temporary / file, f"{name}\n".encode())
        (temporary / file).replace(folder / file)


def _remove_older(folder: Path, step: int, keep: int) -> None:
    """Removes checkpoints before `step` beyond `keep`; the best one, and those that are not complete, do not count."""
    kept = 1
    best = ""
    with suppress(OSError):
        best = read_small(folder / BEST_FILE).decode(errors="replace").strip()
    for other, path in reversed(_listed(folder)):
        if other >= step or path.name == best:
            continue
        if kept >= keep:
            _discard(path)
        elif _is_complete(path):  # else no good one is removed for its sake
            kept += 1


def _is_complete(path: Path) -> bool:
    """Whether all files are there with the right sizes, without reading them."""
    try:
        return all((path / name).stat().st_size == file.size for name, file in checked_manifest(path).files.items())
    except (CheckpointError, OSError):
        return False


def _discard(path: Path) -> None:
    """Removes a checkpoint, renamed first, so that a half removed one never looks like a checkpoint."""
    with suppress(OSError), staging(path.parent) as trash:  # another process removes it, or the next write tries again
        path.rename(trash / path.name)
