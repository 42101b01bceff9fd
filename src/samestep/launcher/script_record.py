"""The record of a script's run, script.json in its run folder: what was run, and the files that it wrote.

Files are found by comparing the working folder before and after the run: programs that a script starts write files too,
and libraries write them without Python's `open`.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.checkpoint.run_folder import (
    ATTESTATION_FILE,
    LOCK_FILE,
    SCRIPT_FILE,
    create_folder,
    holds_script,
    script_of,
    signed,
    take_lock,
)
from samestep.comm.environment import read_environment
from samestep.comm.events import Channel
from samestep.errors import UsageError
from samestep.files import make_folder, write_json
from samestep.launcher.job import find_function
from samestep.patch import Patch, applied
from samestep.text import notify

SKIPPED = (".git", "__pycache__")
OWN = (SCRIPT_FILE, ATTESTATION_FILE, LOCK_FILE)  # in the folder of the record, to which the script may write too


def run_recorded(function: str, **kwargs: Any) -> Any:
    """Runs a script by a function of workers; the result is what made its files, also if it fails."""
    own, leave = os.getpid(), os._exit

    def tell() -> None:
        if (channel := Channel.from_environment()) is not None:
            channel.send("result", value=_facts())

    def tell_and_leave(code: int) -> None:
        if os.getpid() == own:  # no child that the script forked
            tell()
        leave(code)

    try:
        with applied([Patch(os, "_exit", tell_and_leave)]):
            find_function(function)(**kwargs)
    except BaseException:
        tell()
        raise
    return _facts()


def _facts() -> dict[str, Any]:
    """The program and the contract of this process; the script has imported what it needs."""
    from samestep.checkpoint.contract import gpu_facts, versions  # these import torch, which the supervisor does not
    from samestep.engine.portable_kernels import portable_form
    from samestep.runs.recorder import relaunch

    place = read_environment()
    kind = place.settings.device_kind or "cpu"
    contract = {
        "device_kind": kind,
        "num_threads": place.settings.num_threads,
        "portable": portable_form(),
        "versions": versions(),
    }
    program = {name: value for name, value in relaunch().items() if name not in ("command", "working_folder")}
    return {**program, "contract": contract | ({"gpu": gpu_facts()} if kind == "cuda" else {})}


def entries_below(folder: Path, without: Sequence[Path] = ()) -> dict[str, tuple[int, ...] | None]:
    """All files below a folder by their names, each with what tells a change; folders and other links with None.

    Links to folders elsewhere are followed, once; files of git, compiled ones and the entries `without` are left out.
    """
    found, top = dict[str, tuple[int, ...] | None](), folder.resolve()
    known, waiting = {each.resolve() for each in without}, [top]
    while waiting:
        entries = list[os.DirEntry[str]]()
        with suppress(OSError):  # a folder that cannot be read
            entries = sorted(os.scandir(waiting.pop()), key=lambda entry: entry.name)
        for entry in entries:
            path, real = Path(entry.path), Path(entry.path).resolve()
            name = path.relative_to(top).as_posix()
            if entry.name in SKIPPED or (real in known and not entry.is_symlink()):
                continue
            if real not in known and entry.is_dir() and not (entry.is_symlink() and real.is_relative_to(top)):
                found[name] = None
                known.add(real)
                waiting.append(path)
            elif entry.is_file():
                with suppress(OSError):  # it may be gone by now
                    stat = path.stat()
                    # The inode, too: a file that replaces another may have its times and its size.
                    found[name] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            elif entry.is_symlink():
                found[name] = None
    return found


class ScriptRecord:
    """Records a script's run, or a further start of it, in a folder that has no other run's record."""

    def __init__(self, folder: Path, options: Mapping[str, Any], without: Sequence[Path]) -> None:
        """Takes down what there is before the script starts; `options` come from `samestep run`."""
        own = [folder / name for name in OWN]
        self._folder, self._options, self._without = folder, dict(options), (*own, *without)
        make_folder(folder) if holds_script(folder) else create_folder(folder)
        self._lock = take_lock(folder, notify)
        self._earlier = script_of(folder) if holds_script(folder) else {}
        if self._earlier and self._earlier["options"] != self._options:
            self._lock.release()
            raise UsageError(
                f"{folder} already holds the run of another script, or one with other options or arguments; choose "
                "another folder by --record, or remove it"
            )
        self._before = entries_below(Path.cwd(), self._without)
        if self._earlier and self._earlier.get("exit_code") is None:
            # That start was killed, and recorded no file: all that is newer than its record is its own.
            began = (folder / SCRIPT_FILE).stat().st_mtime_ns
            self._before = {name: each for name, each in self._before.items() if each is None or _ctime(name) < began}
        else:
            nothing: dict[str, Any] = {"contract": {}, "files": {}, "folders": [], "changed": []}
            record = {**nothing, **self._earlier, **self._command(), "exit_code": None}
            write_json(folder / SCRIPT_FILE, signed(record))

    def _command(self) -> dict[str, Any]:
        return {
            "command": ["python", *(["-m"] if self._options["module"] else []), *self._options["program"]],
            "options": self._options,
            "working_folder": str(Path.cwd()),
        }

    def end(self, exit_code: int, facts: Mapping[str, Any] | None) -> None:
        """Writes the record; `facts` come from `run_recorded`, None if the script was killed."""
        from samestep.runs.recorder import file_sha256, starts_of

        after, known = entries_below(Path.cwd(), self._without), self._earlier.get("files", {})
        new = [name for name, entry in after.items() if name not in self._before or entry != self._before[name]]
        hashes = {name: file_sha256(Path(name)) for name in new if after[name] is not None}
        folders = {*self._earlier.get("folders", ()), *(name for name in new if after[name] is None)}
        changed = {name for name in hashes if name in self._before and name not in known}
        record = {
            **self._command(),
            **(facts or {"contract": {}}),
            "exit_code": exit_code,
            "earlier_starts": starts_of(self._earlier),
            "files": dict(sorted({**{name: known[name] for name in known if name in after}, **hashes}.items())),
            "folders": sorted(folders & after.keys()),
            "changed": sorted({*self._earlier.get("changed", ()), *changed} & after.keys()),
        }
        write_json(self._folder / SCRIPT_FILE, signed(record))
        self._lock.release()
        if exit_code == 0 and not record["files"]:
            name = self._options["program"][0]
            notify(f"{name} wrote no file below {Path.cwd()}: an audit of {self._folder} has nothing to compare")


def _ctime(name: str) -> int:
    """When a file, its name or its rights were last changed, in nanoseconds by the file system's clock."""
    try:
        return Path(name).stat().st_ctime_ns
    except OSError:  # it is gone
        return 0
