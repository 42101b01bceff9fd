"""The attestation of a run: hashes of its files and of what made them, as a statement that others can sign.

Its form is an in-toto Statement v1, which `cosign`, `ssh-keygen -Y sign` and others sign. It is made of the folder
of a run alone and holds no time, so that an audit makes it again and compares the two.
"""

import errno
import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from samestep.checkpoint.run_folder import (
    ATTESTATION_FILE,
    CHECKPOINT_FOLDER,
    CONTRACT_FILE,
    FACTS_FILE,
    LEDGER_FILE,
    SCRIPT_FILE,
    SIGNATURE,
    WEIGHTS_FILE,
    check_one_run,
    holds_run,
    holds_script,
    is_locked,
    recorded,
    script_of,
)
from samestep.checkpoint.state import check_captured, rest_of
from samestep.checkpoint.storage import BEST_FILE, LATEST_FILE, checked_manifest, list_checkpoints, newest_checkpoint
from samestep.checkpoint.verified_files import MANIFEST_FILE, read_facts, read_manifest
from samestep.errors import CheckpointError, UsageError
from samestep.files import MAX_SMALL_BYTES, open_regular, read_lines, write_json
from samestep.runs.ledger import Ledger, from_line, is_step, read_ledger
from samestep.runs.recorder import starts_of

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:samestep:run:1"
# What the run recorded beside its contract.
OF_PROGRAM = ("command", "script_sha256", "code", "packages", "earlier_starts")
OF_PLACE = ("working_folder", "job", SIGNATURE)


def attest(folder: Path) -> Path:
    """Writes attestation.json into the folder of a run that does not go on; returns its path."""
    value = statement(folder)
    if is_locked(folder) or (holds_script(folder) and script_of(folder).get("exit_code") is None):
        raise UsageError(f"a run is writing to {folder}; attest it when it has ended")
    write_json(folder / ATTESTATION_FILE, value)
    return folder / ATTESTATION_FILE


def checkpoints_of(folder: Path) -> Path:
    """The folder of a run's checkpoints: of a loop of the user's own the one that it saves to."""
    return folder / CHECKPOINT_FOLDER if holds_run(folder) else folder


def record_of(folder: Path) -> Mapping[str, Any]:
    """The contract and the program of a run: its run.json, or what its newest good checkpoint says."""
    check_one_run(folder)
    found = None if holds_run(folder) else newest_checkpoint(folder, check=check_captured)
    if found is None:
        return recorded(folder)
    rest = rest_of(found.snapshot)
    if not isinstance(rest.get("program"), dict) or not isinstance(rest.get("contract"), dict):
        raise UsageError(f"{found.path} does not say which program wrote it; needed: one of run.save_checkpoint")
    starts = list[dict[str, Any]]()
    for path in takewhile(lambda path: path != found.path, (path for _, path in list_checkpoints(folder))):
        with suppress(CheckpointError, OSError, KeyError, TypeError):  # one that is damaged is a fault of the folder
            facts = read_facts(path / FACTS_FILE, read_manifest(path).files[FACTS_FILE])
            starts = starts_of({"earlier_starts": starts, **facts["run"]["rest"]["program"]})
    earlier = [start for start in starts if start not in starts_of(rest["program"])]
    return {**rest["contract"], **rest["program"], "earlier_starts": earlier}


def statement(folder: Path) -> dict[str, Any]:
    """The statement on a run's folder as it is now."""
    if holds_script(folder):
        script = script_of(folder)
        hashes = {SCRIPT_FILE: _sha256(folder / SCRIPT_FILE, MAX_SMALL_BYTES), **script["files"]}
        return _in_toto(hashes, script, script["contract"] | script["options"])
    record, ledger = record_of(folder), read_ledger(folder) if holds_run(folder) else Ledger({}, ())
    manifests = {step: path / MANIFEST_FILE for step, path in list_checkpoints(checkpoints_of(folder))}
    files = [folder / name for name in (CONTRACT_FILE, LEDGER_FILE, WEIGHTS_FILE)]
    files += [checkpoints_of(folder) / name for name in (BEST_FILE, LATEST_FILE)]
    sizes = []
    for path in manifests.values():
        try:
            sizes.append(sum(file.size for file in checked_manifest(path.parent).files.values()))
        except CheckpointError as error:
            raise CheckpointError(f"{path.parent}: {error}") from error
    most = MAX_SMALL_BYTES + max(sizes, default=0)  # of the weights, which are part of a checkpoint
    hashes = {path: _sha256(path, most) for path in (*files, *manifests.values()) if path.exists()}
    named = {path.relative_to(folder).as_posix(): digest for path, digest in hashes.items()}
    steps = max([*ledger.steps, *manifests], default=0)
    ends = [event for event in ledger.events if event["event"] == "end" and event["step"] == steps]
    return _in_toto(
        named,
        record,
        {name: value for name, value in record.items() if name not in (*OF_PROGRAM, *OF_PLACE)},
        steps=steps,
        finalDigest=ends[-1].get("digest") if ends else None,
        chain=_chain(folder, {step: hashes[path] for step, path in manifests.items() if path in hashes}),
    )


def _in_toto(
    hashes: Mapping[str, str | None], record: Mapping[str, Any], contract: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """The statement on files, by their names, of a run with this record of its program."""
    program = {name: record.get(name) for name in OF_PROGRAM}
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in hashes.items()],
        "predicateType": PREDICATE,
        "predicate": {"contract": contract, "program": program, **more},
    }


def _chain(folder: Path, manifests: dict[int, str]) -> list[dict[str, Any]]:
    """A hash chain over the lines of the ledger and, where they are recorded, the checkpoints' manifests.

    Each link is SHA-256 of the one before, as 32 bytes, and of what follows: a line, or a manifest's SHA-256. Shown are
    those after a checkpoint and the last: an author who publishes them in training cannot change what was before them.
    """
    head, shown, left = hashlib.sha256(PREDICATE.encode()).digest(), list[dict[str, Any]](), dict(manifests)
    for line in read_lines(folder / LEDGER_FILE) if holds_run(folder) else ():
        head, entry = hashlib.sha256(head + line).digest(), from_line(line.removesuffix(b"\n")) or {}
        step = entry.get("step") if entry.get("event") == "checkpoint" else None
        if is_step(step) and (manifest := left.pop(step, None)):
            head = hashlib.sha256(head + bytes.fromhex(manifest)).digest()
            shown.append({"step": step, "sha256": head.hex()})
    for step, manifest in left.items():  # whose writer ended before it recorded them
        head = hashlib.sha256(head + bytes.fromhex(manifest)).digest()
        shown.append({"step": step, "sha256": head.hex()})
    return [*shown, {"step": None, "sha256": head.hex()}]


def _sha256(path: Path, most: int) -> str:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most and path.name != LEDGER_FILE:  # whose lines were read
            raise OSError(errno.EINVAL, f"it has {size} bytes, and can have {most} at most", path)
        digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]  # a file of bytes, whatever its type says
        return digest.hexdigest()
