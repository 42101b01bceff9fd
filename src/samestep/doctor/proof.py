"""`samestep doctor --prove`: runs the rows of the proof, each in processes of its own, and writes a file to send in.

A row is a child process with a time limit, which starts the workers: whatever happens in it, the others go on. Nothing
here imports torch.
"""

import json
import pickle
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from samestep.devices.inventory import discover
from samestep.devices.selection import Selection, select
from samestep.doctor.check_table import GRACE_SECONDS, Machine, check_node, check_ranks
from samestep.doctor.proof_rows import COLLECTIVES, Known, Row, UnprovenError, left_out, make_rows
from samestep.doctor.result import Result, bad, good
from samestep.errors import UsageError
from samestep.launcher.job import TRAINING, Job, Policy
from samestep.launcher.supervisor import supervise
from samestep.text import counted
from samestep.train.atomic_io import write_json
from samestep.version import __version__

TOTAL_SECONDS = 600.0
LEAST_SECONDS = 15.0  # less is not worth starting a row
START_SECONDS, END_SECONDS = 45.0, 20.0  # of a row, beside the time of its program
LOG_BYTES = 20_000
PROGRAMS = "samestep.doctor.proof_programs"


def prove(devices: str, output: Path, quick: bool, timeout_seconds: float) -> dict[str, Any]:
    """Runs all rows, with a line each on stderr, and writes the file; returns its content."""
    inventory = discover()
    selection = select(devices, inventory)
    path = _path_in(output, selection)
    machine = Machine(inventory, selection, selection.count)
    rows = make_rows(selection, inventory, quick, timeout_seconds)
    _say(f"{selection.describe()}: {counted(len(rows), 'row')}, at most {TOTAL_SECONDS / 60:.0f} minutes\n")
    begin = time.monotonic()
    entries = run_rows(rows)
    content = {
        "proven": all(entry["state"] != "bad" for entry in entries),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - begin, 1),
        "devices": selection.describe(),
        "num_devices": selection.count,
        "cpu": inventory.cpu.name,
        "cores": inventory.cores,
        "versions": {"samestep": __version__, "python": platform.python_version(), "system": platform.platform()},
        "torch": asdict(machine.torch),
        "rows": entries,
        "machine": [asdict(each) for each in check_node(machine)],
    }
    write_json(path, content)
    _say(f"{counted(len(rows), 'row')} in {content['seconds']:.0f} s; written to {path}\n")
    return content


def run_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The results of all rows, as JSON objects with their seconds, and of a bad one the end of its output."""
    begin, known = time.monotonic(), Known()
    entries = []
    with tempfile.TemporaryDirectory(prefix="samestep-prove-") as folder:
        for number, row in enumerate(rows, 1):
            _say(f"{number:2} of {len(rows)}  {row.name} … ")
            start = time.monotonic()
            result, log = _run_row(row, begin + TOTAL_SECONDS - start, Path(folder, str(number)), known)
            seconds = round(time.monotonic() - start, 1)
            _say(f"{result.found}\n" if result.state == "note" else f"{result.state}, {seconds:.0f} s\n")
            more = {"log": log} if result.state == "bad" else {}
            entries.append({**asdict(replace(result, area=row.area)), "seconds": seconds, **more})
    return entries


def _path_in(output: Path, selection: Selection) -> Path:
    """The file to write: `output`, or in that folder one with the name of the devices."""
    name = selection.devices[0].name
    name = f"cpu-{name}" if selection.kind == "cpu" else name
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", f"{name}-x{selection.count}").strip("-")
    path = output / f"proven-{slug}.json" if output.is_dir() else output
    if not path.parent.is_dir():
        raise UsageError(f"got --output {output}, and there is no folder {path.parent}; name a file or a folder")
    return path


def _run_row(row: Row, left: float, folder: Path, known: Known) -> tuple[Result, str]:
    """The result of a row, within the seconds that are left, and the end of its output."""
    if row.selection is None:
        return left_out(row, row.missing), ""
    if left < LEAST_SECONDS:
        return left_out(row, f"the {TOTAL_SECONDS / 60:.0f} minutes are over"), ""
    folder.mkdir()
    limit, facts_file, log_file = min(row.seconds + START_SECONDS, left), folder / "facts.json", folder / "log.txt"
    row = replace(row, options={**row.options, "folder": str(folder / "run")}) if row.survives else row
    with log_file.open("wb") as log:
        is_over = _run_child(pickle.dumps((row, facts_file)), log, limit)
    facts = json.loads(facts_file.read_text(encoding="utf-8")) if facts_file.exists() else {}
    text = log_file.read_bytes()[-LOG_BYTES:].decode(errors="replace") + (facts.get("failure") or "")
    try:
        if is_over:
            raise UnprovenError(f"expected an end within {limit:.0f} s, got none: its processes were ended")
        if facts.get("result") is None:
            raise UnprovenError(f"expected a result, got {_reason(facts.get('failure') or text)}")
        found, figures = row.judge(facts["result"], known)
    except UnprovenError as error:
        return bad(row.name, str(error), "send in the file, which holds the output of this row"), text
    return replace(good(row.name, found), numbers=figures), text


def _reason(text: str) -> str:
    """The exception of a text, else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["nothing"]
    return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\w*: ", line)), lines[0])


def _run_child(row: bytes, log: IO[bytes], seconds: float) -> bool:
    """Runs a row in a child process; returns whether it took too long, and was ended."""
    command = [sys.executable, "-P", "-c", "from samestep.doctor.proof import run_child; run_child()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT) as child:
        try:
            child.communicate(row, timeout=seconds)
        except subprocess.TimeoutExpired:
            return True
        finally:  # upon SIGTERM it ends its workers; they end with it, too
            for end in (child.terminate, child.kill):
                if child.poll() is None:
                    end()
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(END_SECONDS)
    return False


def run_child() -> None:
    """Runs the row on stdin, which comes from the parent alone, and writes its facts."""
    row, path = pickle.load(sys.stdin.buffer)
    path.write_text(json.dumps(_perform(row, row.selection)), encoding="utf-8")


def _perform(row: Row, selection: Selection) -> dict[str, Any]:
    """Starts the workers of a row: the result of rank 0, and the failure, if there was one."""
    if row.program == COLLECTIVES:
        results, _ = check_ranks(selection, row.options["timeout_seconds"], False)
        return {"result": [asdict(each) for each in results]}
    kwargs = {"program": row.program, "seconds": row.seconds, "options": row.options}
    job = Job("function", f"{PROGRAMS}:start", kwargs=kwargs, quiet=True, preload=(*TRAINING, PROGRAMS))
    policy = Policy(heal=row.survives, hang_seconds=0)
    outcome = supervise(job, selection, policy=policy, grace_seconds=GRACE_SECONDS)
    if outcome.exit_code:
        return {"failure": outcome.failure or "it was stopped"}
    events = {"events": outcome.events} if row.survives else {}
    return {"result": {**outcome.result, **events}}


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
