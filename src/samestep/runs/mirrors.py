"""Loggers that mirror metrics.jsonl into a run of another tool, in which no value is missing or twice.

All that a tool may lack is in the run folder: the contract, the scalars, and in the ledger how the run ended. So a rank
that takes over, or a run that is resumed, first sends what the lost process could not.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

from samestep.checkpoint.contract_diff import UNMENTIONED, differences, flat
from samestep.checkpoint.run_folder import LEDGER_FILE, LOGGERS_FILE, METRICS_FILE, recorded
from samestep.errors import UsageError
from samestep.extras import is_installed, missing
from samestep.files import load_json, read_lines, read_object, write_json
from samestep.text import notify


class Mirror:
    """The base of the three below. `run_dir` is the trainer's; `options` are those by which the tool starts a run.

    Raises:
        UsageError: the tool is not installed.
    """

    _module = ""
    _run: Any  # the tool's
    _start: Callable[[str | None, str, Mapping[str, Any]], str]  # (known id, name, contract) -> id; fills `_last`
    _end: Callable[[str | None], None]  # (digest)
    _tag: Callable[[str], str] = staticmethod(str)  # the tool's name of a tag

    def __init__(self, run_dir: str | Path, **options: Any) -> None:
        if not is_installed(self._module):
            raise UsageError(missing(self._module, type(self).__name__))
        self._folder, self._options = Path(run_dir), options
        self._id: str | None = None  # while the tool's run is open
        self._has_failed = False
        self._last: dict[str, int] = {}  # by the tool's name of a tag the last step that it has

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Sends the scalars whose step the tool does not have."""
        if not self._has_failed:
            with self._shielded():
                if self._id is None:
                    self._open()
                self._add(step, scalars)

    def close(self) -> None:
        """Ends the tool's run: with the digest if the training has come to its end, else as one that failed."""
        if self._id is not None:
            with self._shielded():
                *_, event = (load_json(line) for line in read_lines(self._folder / LEDGER_FILE) if b'"event"' in line)
                self._end(event["digest"] if event["event"] == "end" else None)
        self._id = None

    def _open(self) -> None:
        place, metrics = self._folder / LOGGERS_FILE, self._folder / METRICS_FILE
        contract = {name: value for name, value in recorded(self._folder).items() if name not in UNMENTIONED}
        notes = read_object(place) if place.exists() else {}
        known = notes.get(self._module, {"id": None, "contract": contract, "start": 0})
        if any(change.breaks for change in differences(known["contract"], contract)):  # its steps are others
            known = {"id": None, "contract": contract, "start": sum(1 for _ in read_lines(metrics))}
        self._id = self._start(known["id"], self._folder.resolve().name, contract)
        write_json(place, {**notes, self._module: {**known, "id": self._id}})
        for line in islice(read_lines(metrics), known["start"], None):
            row = load_json(line)
            self._add(row.pop("step"), row)

    def _add(self, step: int, scalars: Mapping[str, Any]) -> None:
        named = {self._tag(tag): float(value) for tag, value in scalars.items()}
        if new := {tag: value for tag, value in named.items() if step > self._last.get(tag, -1)}:
            self._send(step, new)
            self._last |= dict.fromkeys(new, step)

    def _send(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(scalars, step=step)

    @contextmanager
    def _shielded(self) -> Iterator[None]:
        """Turns an error of the tool into a line on stderr, after which the training goes on without it."""
        try:
            yield
        except Exception as error:
            text = re.sub(r"//[^/@\s]*@", "//", f"{type(error).__name__}: {error}")  # an address may hold a password
            notify(f"{type(self).__name__}: {text}. What it misses from here on is sent when the run is resumed")
            self._id, self._has_failed = None, True


class WandbLogger(Mirror):
    """Mirrors the scalars of `run_dir` into a run of W&B; `options` go to `wandb.init`."""

    _module = "wandb"

    def _start(self, known: str | None, name: str, contract: Mapping[str, Any]) -> str:
        import wandb

        options = {"name": name, "settings": wandb.Settings(console="off"), **self._options}
        self._run = wandb.init(id=known or uuid4().hex[:8], resume="allow", config=dict(contract), **options)
        # A killed process has written less than it logged. Online it is W&B that leaves out earlier steps.
        for path in Path(self._run.dir).parents[1].glob(f"offline-run-*/run-{self._run.id}.wandb"):
            for record in wandb_records(path.read_bytes()):
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                self._last |= {tag: max(int(row["_step"]), self._last.get(tag, -1)) for tag in row}
        return str(self._run.id)

    def _end(self, digest: str | None) -> None:
        self._run.summary["digest"] = digest  # None again where a run that had ended goes on
        self._run.finish(exit_code=int(digest is None))


def wandb_records(data: bytes) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log, with W&B's seven bytes at its head and blocks of 32 KiB."""
    record = import_module("wandb.proto.wandb_internal_pb2").Record  # whose types depend on protobuf's version
    at, whole = 7, b""
    while (end := at + 7 + int.from_bytes(data[at + 4 : at + 6], "little")) <= len(data):
        whole += data[at + 7 : end]
        if data[at + 6] in (1, 4):  # a record, or the last part of one
            yield record.FromString(whole)
            whole = b""
        at = end + (-end % 32768 if -end % 32768 < 7 else 0)


class MlflowLogger(Mirror):
    """Mirrors the scalars of `run_dir` into a run of MLflow; `options` go to `mlflow.start_run`."""

    _module = "mlflow"
    _tag = staticmethod(partial(re.sub, r"[^\w/. -]", "_"))  # which it refuses

    def _start(self, known: str | None, name: str, contract: Mapping[str, Any]) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # which asks a server of its makers
        self._run = import_module("mlflow")
        run, client = self._run.start_run(known, **{"run_name": name, **self._options}), self._run.MlflowClient()
        for field, value in flat(contract) if known is None else ():
            self._run.log_param(self._tag(field), str(value)[:500])
        for tag in run.data.metrics:
            self._last[tag] = max(value.step for value in client.get_metric_history(run.info.run_id, tag))
        return str(run.info.run_id)

    def _send(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log_metrics(scalars, step, run_id=self._id)

    def _end(self, digest: str | None) -> None:
        self._run.set_tag("digest", digest or "")  # none again, as above
        self._run.end_run("FAILED" if digest is None else "FINISHED")


class TrackioLogger(Mirror):
    """Mirrors the scalars of `run_dir` into a run of trackio on this machine; `options` go to `trackio.init`."""

    _module = "trackio"

    def _start(self, known: str | None, name: str, contract: Mapping[str, Any]) -> str:
        self._run = import_module("trackio")
        name = known or f"{name}-{uuid4().hex[:8]}"
        run = self._run.init(name=name, resume="allow", config=dict(contract), **self._options)
        if run.url is not None:  # which does not tell what has arrived
            raise UsageError("trackio is to write elsewhere than on this machine: leave that to trackio sync")
        for row in import_module("trackio.sqlite_storage").SQLiteStorage.get_logs(run.project, name, run_id=run.id):
            self._last |= {tag: max(row["step"], self._last.get(tag, -1)) for tag in row}
        return name

    def _end(self, digest: str | None) -> None:
        last = max(self._last.values(), default=0)
        if digest is not None and last > self._last.get("digest", -1):
            self._run.log({"digest": digest}, step=last)
        self._run.finish()
