"""Audits the run of a script that keeps its own checkpoints: repeats it whole, and compares the files that it wrote.

Such a run has no ledger and no state that is known here, so there are no segments: its files are all that it claims.
The repeat sees the working folder as the run found it, through links, and what it writes stays in a temporary folder.
Equal SHA-256 are enough. Else a file is read as tensors and values, as other bytes may hold the same ones, or as text.
"""

import filecmp
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import partial
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open

from samestep.checkpoint.contract_diff import differences, explain
from samestep.checkpoint.run_folder import SCRIPT_FILE, script_of
from samestep.devices.selection import select
from samestep.errors import ContractError, UsageError, WorkerError
from samestep.files import MAX_SMALL_BYTES
from samestep.launcher.os_processes import end_with_parent
from samestep.launcher.script_record import OWN, SKIPPED
from samestep.replay.auditing import attestation_faults, check_code, differing
from samestep.replay.replaying import announce, command_of
from samestep.runs.recorder import file_sha256
from samestep.text import counted, one_line

BY_NATURE = ("events.out.tfevents.*",)  # in their names and records are times and a process id
OF_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")
OF_SAVE = re.compile(rb"(?<=\x07save_id\x94\x8c\$)[0-9a-f-]{36}")  # drawn by torch.distributed.checkpoint for .metadata
MAX_SHOWN = 80  # characters of a line


@dataclass(frozen=True)
class ScriptAudit:
    """The result of an audit: each file that the run wrote, with the first difference as a sentence, or None."""

    run: str
    seconds: float
    files: Mapping[str, str | None]
    not_compared: Sequence[str]
    faults: Sequence[str]
    notes: Sequence[str]

    @property
    def holds(self) -> bool:
        """Whether all that was compared is the same."""
        return not self.faults and not any(self.files.values())

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def audit_script(
    run: str | Path,
    *,
    devices: str | None = None,
    excepted: Sequence[str] = (),
    trust: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> ScriptAudit:
    """Repeats a script's run in a temporary folder on `devices`, one by default, and compares the files that it wrote.

    In the folder are links to all that lay in the run's working folder, but for what the run wrote itself; its code is
    copied. `excepted` are patterns of the names of files that are not compared; see `replay` for `trust`.

    Raises:
        UsageError: the run did not end well, or its program is not there.
        ContractError: it was made under another contract.
        WorkerError: the program failed.
    """
    folder, began = Path(run).resolve(), time.perf_counter()
    if devices is not None:
        select(devices)  # raises for what are none
    record = script_of(folder)
    if (code := record.get("exit_code")) != 0:
        how = "its script runs, or was killed" if code is None else f"its script ended with the exit code {code}"
        raise UsageError(f"{run} cannot be audited: {how}; go on with it by the same command, with --record {run}")
    program = command_of(record, folder)
    announce(program, record, folder, trust, tell)
    notes = check_code(record, folder, trust)
    home = (program.folder or Path()).resolve()
    left_out = partial(_is_left_out, (*BY_NATURE, *excepted))
    if all(map(left_out, record["files"])):
        raise UsageError(
            f"{run} cannot be audited: of {counted(len(record['files']), 'file')} that its script wrote below "
            f"{home} none would be compared; needed: one that holds no times, and that --except does not name"
        )
    faults = list(attestation_faults(folder, notes))
    with TemporaryDirectory(prefix="samestep-") as name:
        place, again = Path(name).resolve() / "work", Path(name).resolve() / "run"
        _mirror(home, place, record, folder)
        # -P: a file of the folder may have the name of a module that the command imports.
        words = [sys.executable, "-P", "-m", "samestep", "run", "--record", str(again), *_options(record, devices)]
        # What the script prints goes to stderr, as in audits of other runs.
        dies = partial(end_with_parent, os.getpid(), signal.SIGKILL) if sys.platform == "linux" else None
        words += _arguments(record, home, place)
        with subprocess.Popen(words, cwd=place, stdout=2, preexec_fn=dies) as process:
            try:
                code = process.wait()
            except BaseException:
                process.terminate()  # it ends its workers, and removes what they leave; killed, it would not
                raise
        if code:
            raise WorkerError(f"{run} cannot be audited: when it was repeated, its script ended with exit code {code}")
        now = script_of(again)
        if breaking := [change for change in differences(record["contract"], now["contract"]) if change.breaks]:
            raise ContractError(
                f"{run} cannot be audited here, which was made with other settings:\n{explain(breaking)}\n"
                "go back to its values, or audit it where they hold"
            )
        strange = {*record, *(f"contract.{name}" for name in record["contract"])}
        strange -= {*now, *(f"contract.{name}" for name in now["contract"])}
        faults += [f"{SCRIPT_FILE} has {name}, which no run writes" for name in sorted(strange)]
        names = sorted({*record["files"], *now["files"]})
        left = [*filter(left_out, names)]
        found = {name: _compared(name, record, now, home, place) for name in names if name not in left}
    for name in [name for name in record["files"] if not (home / name).is_file()][:1]:
        notes.append(f"{name} is not there any more: what is missing is compared by its SHA-256 alone")
    for name in [name for name in found if file_sha256(home / name) not in (None, record["files"].get(name))][:1]:
        faults.append(f"{name} is not as the run left it")
    return ScriptAudit(str(run), time.perf_counter() - began, found, [*dict.fromkeys(left)], faults, notes)


def _is_left_out(patterns: Sequence[str], name: str) -> bool:
    """Whether a file is not compared, by the patterns of such names."""
    return any(fnmatch(Path(name).name, pattern) for pattern in patterns)


def _options(record: Mapping[str, Any], devices: str | None) -> list[str]:
    """The options of `samestep run` that repeat a run."""
    options, contract = record["options"], record["contract"]
    default = "cpu:1" if contract.get("device_kind") == "cpu" else "1"
    words = ["--devices", devices or default, "--portable" if contract.get("portable") else "--no-portable"]
    for name in ("logical_devices", "seed", "wrap", "num_threads"):
        words += [] if options.get(name) is None else [f"--{name.replace('_', '-')}", str(options[name])]
    if (single := options.get("single_process")) is not None:
        words.append("--single-process" if single else "--multi-process")
    return words


def _arguments(record: Mapping[str, Any], home: Path, place: Path) -> list[str]:
    """The script and its arguments: paths of the working folder are in the temporary one, those above it stay."""
    words = [str(word).replace(f"{home}{os.sep}", f"{place}{os.sep}") for word in record["command"][1:]]
    return [re.sub(r"(^|=)(?=\.\./)", lambda start: f"{start[1]}{home}{os.sep}", word) for word in words]


def _mirror(home: Path, place: Path, record: Mapping[str, Any], run: Path) -> None:
    """Fills a new folder with links to what is in another, but for what the run wrote and where; its code is copied."""
    code, gone = record.get("code") or {}, {*record["files"], *record["folders"]}
    own = {run / name for name in OWN}
    below = Path(os.path.relpath(str(code.get("folder") or "."), str(record.get("working_folder", ""))))
    copied = {(below / name).as_posix() for name in code.get("files", ())}
    opened = {above.as_posix() for name in (*gone, *copied) for above in Path(name).parents}

    def fill(name: str) -> None:
        (place / name).mkdir()
        for entry in os.scandir(home / name):
            inner = (Path(name) / entry.name).as_posix()
            real = Path(entry.path).resolve()
            if inner in gone or entry.name in SKIPPED or real in own:
                continue
            if inner in opened or real == run:
                fill(inner)
            elif inner in copied:
                # No link: Python would follow a script's, and import from the folder where it really lies.
                shutil.copy2(entry.path, place / inner)
            else:
                (place / inner).symlink_to(entry.path)

    fill("")


def _compared(name: str, record: Mapping[str, Any], now: Mapping[str, Any], home: Path, place: Path) -> str | None:
    """How a file differs from the one that the repeat wrote, as a sentence; None if it does not."""
    if name not in now["files"]:
        return "it was not written again"
    if name not in record["files"]:
        return "the run did not write it"
    if record["files"][name] == now["files"][name]:
        return None
    is_there = file_sha256(home / name) == record["files"][name]
    found = first_difference_of(home / name, place / name) if is_there else "its SHA-256 is another"
    if found is not None and name in record["changed"]:
        return f"{found} (it was there before the run, which may have gone on from it)"
    return found


def first_difference_of(one: Path, other: Path) -> str | None:
    """The first difference of two files: in tensors and values, or else in bytes; None if there is none."""
    try:
        return differing(_values(one), _values(other), "")
    except Exception:  # of many classes, by what is not as in a file of tensors
        pass
    if filecmp.cmp(one, other, shallow=False):
        return None
    if max(path.stat().st_size for path in (one, other)) > MAX_SMALL_BYTES:
        return "its bytes are others"
    if one.name == ".metadata" and OF_SAVE.sub(b"", one.read_bytes()) == OF_SAVE.sub(b"", other.read_bytes()):
        return None
    try:
        lines = [path.read_text(encoding="utf-8").split("\n") for path in (one, other)]
    except UnicodeDecodeError:
        places = enumerate(zip_longest(one.read_bytes(), other.read_bytes()))
        return next(f"byte {place} is another" for place, (a, b) in places if a != b)
    found = next((number, pair) for number, pair in enumerate(zip_longest(*lines), 1) if pair[0] != pair[1])
    shown = ["nothing" if line is None else one_line(line)[:MAX_SHOWN] for line in found[1]]
    return f"line {found[0]}: {shown[0]}, now {shown[1]}"


def _values(path: Path) -> Any:
    """The tensors and values in a file; raises if it holds others, or none."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return {"metadata": file.metadata(), "tensors": {name: file.get_tensor(name) for name in [*file.keys()]}}
    if path.suffix not in OF_TORCH:
        raise ValueError("it is no file of tensors")
    return torch.load(path, map_location="cpu", weights_only=True)
