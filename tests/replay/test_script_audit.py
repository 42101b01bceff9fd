"""Audits of scripts that keep their own checkpoints: repeated whole, with each file that they wrote compared."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_commands import SAMESTEP, samestep
from safetensors.torch import save_file
from typer.testing import CliRunner

from samestep.checkpoint.run_folder import script_of, signed
from samestep.cli.main import app
from samestep.errors import UsageError
from samestep.launcher.script_record import ScriptRecord, entries_below
from samestep.replay.script_audit import first_difference_of
from samestep.runs.attestation import attest

DDP = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from parts import make_model

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]), momentum=0.9)
data, first = torch.load("data/x.pt", weights_only=True), 0
if os.path.exists("out/last.pt"):
    state = torch.load("out/last.pt", weights_only=True)
    first = state["epoch"]
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
for epoch in range(first, 3):
    torch.manual_seed(10 * epoch + rank)
    for x in data[rank :: dist.get_world_size()].split(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if rank == 0:
        os.makedirs("out", exist_ok=True)
        state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, "out/last.pt")
        with open("log.txt", "a") as file:
            file.write(f"epoch {epoch}: {model.module[0].weight.sum().item().hex()}\\n")
        with open(f"events.out.tfevents.{time.time()}", "w") as file:
            file.write(str(time.time()))
    dist.barrier()
    if os.environ.get("STOPS_AFTER") == str(epoch):
        sys.exit(3)
dist.destroy_process_group()
"""
PLAIN = """
import os
import sys
import torch
from parts import make_model
from safetensors.torch import save_file

torch.manual_seed(0)
model, data = make_model(), torch.load("data/x.pt", weights_only=True)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for x in data.split(8):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
save_file(model.state_dict(), "model.safetensors", {"format": "pt", "lr": sys.argv[1], "samples": str(len(data))})
torch.save(model.state_dict(), "runs/a/model.pt")
os.symlink("runs", "last")  # as the newest of a script's checkpoints is named
os._exit(0)
"""
PARTS = """
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
"""


def prepare(folder, script=DDP):
    """A working folder with a script, a module beside it and data."""
    (folder / "data").mkdir()
    torch.save(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)), folder / "data/x.pt")
    (folder / "train.py").write_text(script)
    (folder / "parts.py").write_text(PARTS)
    return folder


def recorded(folder, devices="cpu:2", code=0, lr="0.1", **variables):
    words = ("--logical-devices", 2, "--record", "runs/a", "train.py", lr)
    done = samestep("run", "--devices", devices, *words, cwd=folder, **variables)
    assert done.returncode == code, done.stderr
    return folder / "runs/a"


def audited(folder, *words):
    done = samestep("audit", "runs/a", "--json", *words, cwd=folder)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def claim(folder, name):
    """Has the record name a file as it is now."""
    path = folder / "runs/a/script.json"
    record = json.loads(path.read_text())
    record["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    path.write_text(json.dumps(signed(record)))


def contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and "pycache" not in str(path)}


def test_a_script_s_files_are_attested_and_audited_on_one_device(tmp_path):
    run = recorded(prepare(tmp_path))
    statement = json.loads(attest(run).read_text())
    names = {each["name"] for each in statement["subject"]}
    assert {name for name in names if "tfevents" not in name} == {"script.json", "out/last.pt", "log.txt"}
    predicate = statement["predicate"]
    assert predicate["program"]["code"]["files"].keys() == {"train.py", "parts.py"}
    assert predicate["program"]["command"] == ["python", "train.py", "0.1"]
    assert (predicate["contract"]["logical_devices"], predicate["contract"]["device_kind"]) == (2, "cpu")
    before = contents(tmp_path)
    found = audited(tmp_path, "--except", "log.*")
    assert (found["holds"], found["files"]) == (True, {"out/last.pt": None})
    assert {name for name in found["not_compared"] if "tfevents" not in name} == {"log.txt"}
    assert (found["faults"], found["notes"]) == ([], [])
    assert contents(tmp_path) == before

    # The twins: a weight with the record made good again, and a file that is not as it was.
    state = torch.load(tmp_path / "out/last.pt", weights_only=True)
    state["model"]["module.2.bias"] += 1e-6
    torch.save(state, tmp_path / "out/last.pt")
    claim(tmp_path, "out/last.pt")
    (tmp_path / "log.txt").write_text((tmp_path / "log.txt").read_text().replace("epoch 1: ", "epoch 1: -"))
    found = audited(tmp_path)
    assert found["files"] == {"log.txt": None, "out/last.pt": "model.module.2.bias"}
    assert found["faults"][0].startswith("attestation.json does not fit the folder: subject.0.digest.sha256")
    assert found["faults"][1] == "log.txt is not as the run left it"

    (tmp_path / "parts.py").write_text(PARTS.replace("0.2", "0.3"))
    refused = CliRunner().invoke(app, ["audit", str(run)])
    assert "parts.py is not the file that made it" in str(refused.exception)


def test_a_script_that_went_on_is_audited_from_its_beginning_by_the_code_of_each_start(tmp_path):
    run = recorded(prepare(tmp_path), code=3, STOPS_AFTER="0")
    refused = CliRunner().invoke(app, ["audit", str(run)])
    assert "its script ended with the exit code 3; go on with it" in str(refused.exception)
    recorded(tmp_path, devices="cpu:1")
    found = audited(tmp_path)
    assert found["holds"], found
    assert found["files"].keys() == {"log.txt", "out/last.pt"}
    assert script_of(run)["earlier_starts"] == [{name: script_of(run)[name] for name in ("script_sha256", "code")}]

    # The twin: the code of the first start was another.
    record = script_of(run)
    record["earlier_starts"][0]["code"]["files"]["parts.py"] = "0" * 64
    (run / "script.json").write_text(json.dumps(record))
    refused = CliRunner().invoke(app, ["audit", str(run)])
    assert "parts.py is not the file that made it in its start 1 of 2; put it back" in str(refused.exception)
    assert "parts.py is not the file that made it in its start 1 of 2" in audited(tmp_path, "--trust")["notes"]


def test_a_plain_script_is_audited_too_and_names_what_was_there_before(tmp_path):
    prepare(tmp_path, PLAIN)
    (tmp_path / "model.safetensors").write_text("of an earlier run")
    run = recorded(tmp_path, "cpu:1")
    (tmp_path / "typer.py").write_text("raise SystemExit('this is no module of the command')")
    words, safe = ("audit", "runs/a", "--json", "--devices", "cpu:2"), (sys.executable, "-P", *SAMESTEP[1:])
    found = json.loads(samestep(*words, cwd=tmp_path, command=safe).stdout)
    (tmp_path / "typer.py").unlink()
    assert (found["holds"], found["files"]) == (True, {"model.safetensors": None, "runs/a/model.pt": None}), found
    assert ["there is no attestation" in note for note in found["notes"]] == [True]

    (tmp_path / "model.safetensors").write_text("forged")
    claim(tmp_path, "model.safetensors")
    said = audited(tmp_path)["files"]["model.safetensors"]
    assert "it was there before the run, which may have gone on from it" in said
    (tmp_path / "model.safetensors").unlink()
    found = audited(tmp_path)
    assert found["files"]["model.safetensors"].startswith("its SHA-256 is another")
    assert "model.safetensors is not there any more: what is missing is compared by its SHA-256 alone" in found["notes"]
    for words, said in (
        (["--except", "*.safetensors", "--except", "m*.pt"], "of 2 files that its script wrote below"),
        (["--devices", "cpu:0"], "asked for cpu:0"),
        (["--segments", "2"], "a script's run is repeated whole"),
    ):
        assert said in str(CliRunner().invoke(app, ["audit", str(run), *words]).exception)
    with pytest.raises(AssertionError, match=r"(?s)already holds the run of another script, or one with other options"):
        recorded(tmp_path, lr="0.2")


@pytest.mark.slow
def test_what_repeats_a_run_ends_with_an_audit_that_is_killed(tmp_path):
    text = (
        "if os.path.exists('wait'):\n    print(os.getpid(), file=open('wait', 'w'), flush=True)\n    time.sleep(999)\n"
    )
    recorded(prepare(tmp_path, f"import os, time\n{text}{PLAIN}"), "cpu:1")
    (tmp_path / "wait").touch()  # there is a link to it in the temporary folder
    (tmp_path / "tmp").mkdir()
    for stop, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        variables = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
        audit = subprocess.Popen([*SAMESTEP, "audit", "runs/a"], cwd=tmp_path, env=variables)
        while not (content := (tmp_path / "wait").read_text()).endswith("\n"):
            assert audit.poll() is None
            time.sleep(0.1)
        worker = psutil.Process(int(content))
        audit.send_signal(stop)
        assert audit.wait() == code
        left = [name for name in os.listdir(tmp_path / "tmp") if not name.startswith("torchinductor")]  # torch's own
        assert code < 0 or left == []
        _, alive = psutil.wait_procs([worker], timeout=30)
        assert alive == []
        (tmp_path / "wait").write_text("")


def test_what_a_run_cannot_record_is_refused_before_a_device_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(prepare(tmp_path, PLAIN))
    done = CliRunner().invoke(app, ["run", "--devices", "cpu:2", "--record", "runs/a", "train.py"])
    assert "got --record runs/a, which records a run that any number of devices" in str(done.exception)
    (tmp_path / "runs/a").mkdir(parents=True)
    record = {"command": [], "contract": {}, "options": {}, "files": {"../x": ""}, "folders": [], "changed": []}
    (tmp_path / "runs/a/script.json").write_text(json.dumps(record))
    for command in ("audit", "attest"):
        refused = CliRunner().invoke(app, [command, "runs/a"])
        assert str(refused.exception).endswith("is no record of a script's run: see ../x")
    for kind, value, said in (("files", {"": "x"}, ""), ("folders", [5], "5"), ("code", [1], "code")):
        (tmp_path / "runs/a/script.json").write_text(json.dumps({**record, "files": {}, kind: value}))
        refused = CliRunner().invoke(app, ["audit", "runs/a"])
        assert str(refused.exception).endswith(f"is no record of a script's run: see {said}")
    for other in ("run.json", "step-00000002/state.json"):
        (tmp_path / "runs/a" / other).parent.mkdir(exist_ok=True)
        (tmp_path / "runs/a" / other).write_text("{}")
        for command in ("audit", "attest"):
            refused = CliRunner().invoke(app, [command, "runs/a"])
            assert f"runs/a holds script.json and {Path(other).parts[0]}, of two runs" in str(refused.exception)
        (tmp_path / "runs/a" / other).unlink()
    (tmp_path / "runs/a/script.json").unlink()
    (tmp_path / "runs/a/script.json").symlink_to(tmp_path / "train.py")
    with pytest.raises(UsageError, match="it is a symbolic link"):
        script_of(tmp_path / "runs/a")


def test_what_a_start_that_was_killed_wrote_is_of_the_run_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("before.txt").write_text("x")
    time.sleep(0.1)  # file systems count time in some milliseconds
    options = {"module": False, "program": ["train.py"]}
    for number in range(2):
        ScriptRecord(Path("runs/a"), options, [])
        Path(f"{number}.txt").write_text("x")
    for command, said in (("attest", "when it has ended"), ("audit", "its script runs, or was killed; go on with it")):
        assert said in str(CliRunner().invoke(app, [command, "runs/a"]).exception)
    record = ScriptRecord(Path("runs/a"), options, [])
    with pytest.raises(UsageError, match="has been writing to runs/a since"):
        ScriptRecord(Path("runs/a"), options, [])
    Path("2.txt").write_text("x")
    record.end(0, None)
    assert script_of(Path("runs/a"))["files"].keys() == {"0.txt", "1.txt", "2.txt"}
    ScriptRecord(Path("runs/a"), options, []).end(0, None)
    assert script_of(Path("runs/a"))["files"].keys() == {"0.txt", "1.txt", "2.txt"}
    ScriptRecord(Path("runs/b"), options, []).end(0, None)
    assert f"train.py wrote no file below {tmp_path}: an audit of runs/b has nothing" in capsys.readouterr().err


def test_files_below_a_folder_are_found_behind_links_to_others_but_not_twice(tmp_path):
    here, other = tmp_path / "here", tmp_path / "other"
    for place in (here / "a", here / "runs", here / "__pycache__", other):
        place.mkdir(parents=True)
        (place / "file").write_text("x")
    (here / "linked").symlink_to(other)
    (here / "again").symlink_to(here / "a")
    (here / "above").symlink_to(tmp_path / "gone")
    os.symlink(here / "a/file", here / "file")
    found = entries_below(here, [here / "runs"])
    assert {name for name, entry in found.items() if entry is None} == {"a", "linked", "again", "above"}
    assert {name for name, entry in found.items() if entry} == {"a/file", "linked/file", "file"}
    (other / "file").write_text("yy")
    assert [name for name, entry in entries_below(here, [here / "runs"]).items() if entry != found[name]] == [
        "linked/file"
    ]


def test_the_number_that_torch_draws_for_a_distributed_checkpoint_is_no_difference(tmp_path, monkeypatch):
    files = []
    for number, value in enumerate((1.0, 1.0, 2.0)):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        tensors = {"w": torch.full((3 if value == 1.0 else 4,), value)}
        dcp.save(tensors, checkpoint_id="saved", no_dist=True)
        files.append(tmp_path / str(number) / "saved" / ".metadata")
    assert files[0].read_bytes() != files[1].read_bytes()
    assert first_difference_of(*files[:2]) is None
    assert "byte" in first_difference_of(*files[1:])


def test_two_files_differ_in_a_tensor_a_value_a_line_or_a_byte(tmp_path):
    def said(suffix, write, *values):
        paths = [tmp_path / f"{number}{suffix}" for number in range(2)]
        for path, value in zip(paths, values, strict=True):
            write(path, value)
        return first_difference_of(*paths)

    one, other = ({"step": step, "m": [torch.tensor([1.0, zero])]} for step, zero in ((1, 0.0), (1, -0.0)))
    save = lambda path, value: torch.save(value, path)  # noqa: E731
    assert said(".pt", save, one, {"m": one["m"], "step": 1}) is None
    assert said(".pt", save, one, other) == "m.0"
    assert said(".pt", save, one, {**one, "step": 2}) == "step: 1, now 2"
    facts = [{"a": str(number), "b": "2"} for number in (1, 3)]
    write = lambda path, value: save_file({"w": torch.ones(2)}, path, value)  # noqa: E731
    assert said(".safetensors", write, facts[0], dict(reversed(facts[0].items()))) is None
    assert said(".safetensors", write, *facts) == "metadata.a: 1, now 3"
    write = lambda path, value: path.write_bytes(value)  # noqa: E731
    assert said(".pt", write, b"no tensors", b"no tensors") is None
    assert said(".log", write, b"a\nb 1 s\n", b"a\nb 2 s\n") == "line 2: b 1 s, now b 2 s"
    assert said(".log", write, b"a", b"a\nb") == "line 2: nothing, now b"
    assert said(".log", write, b"a\xff\x01", b"a\xff\x02") == "byte 2 is another"
