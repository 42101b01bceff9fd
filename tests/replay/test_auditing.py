"""Audits: honest runs hold on any devices, and each kind of forgery is found where it is looked for."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zlib

import pytest
from cli_commands import samestep
from replay_programs import PARTS, SCRIPT, data_of, record, train
from safetensors.torch import load_file, save_file
from test_replay import alter, contents, copied, next_up
from typer.testing import CliRunner

from samestep.checkpoint.export import export_weights
from samestep.checkpoint.resume import read_state
from samestep.checkpoint.state import rest_of
from samestep.checkpoint.storage import newest_checkpoint
from samestep.checkpoint.verified_files import MANIFEST_FILE, Manifest, manifest_bytes, read_manifest, seal
from samestep.cli.main import app
from samestep.errors import CheckpointError, ContractError, UsageError
from samestep.metrics import accuracy
from samestep.replay.auditing import audit, probability
from samestep.replay.replaying import program_of
from samestep.runs.attestation import attest, statement
from samestep.runs.ledger import from_line, read_ledger, to_line

OPTIONS = {"checkpoint_steps": 3, "keep": 20}
FORMAT = {"format": "pt"}


def audited(folder, segments=0, **given):
    options = {name: given.pop(name) for name in ("seed",) if name in given}
    return audit(folder, segments, program=lambda: train(None, folder, **{**OPTIONS, **given}), **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Twelve steps on three devices in four segments."""
    folder = tmp_path_factory.mktemp("audit") / "run"
    record(3, folder, **OPTIONS)
    return folder


def forge_weight(checkpoint, file="model.safetensors"):
    """Changes a bit of a tensor, and has the manifest fit again."""
    tensors = load_file(checkpoint / file)
    name = sorted(name for name in tensors if tensors[name].is_floating_point() and tensors[name].numel() > 1)[0]
    tensors[name].view(-1)[0] = float.fromhex(next_up(float(tensors[name].view(-1)[0]).hex())) + 1e-7
    (checkpoint / file).unlink()
    save_file(tensors, checkpoint / file)
    resealed(checkpoint)


def resealed(checkpoint, step=None, *more):
    """Has the manifest of a checkpoint fit its files again, and name more of them."""
    manifest = read_manifest(checkpoint)
    files = {file: seal(checkpoint / file) for file in (*manifest.files, *more)}
    written = Manifest(manifest.step if step is None else step, files)
    (checkpoint / MANIFEST_FILE).write_bytes(manifest_bytes(written))


def lines_changed(folder, change):
    path = folder / "ledger.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def test_an_honest_run_on_three_devices_holds_on_one_and_the_draw_is_that_of_the_seed(run):
    whole = audited(run)
    assert whole.holds, whole
    assert [(each.first, each.last, each.digests) for each in whole.segments] == [(a, a + 2, 3) for a in (1, 4, 7, 10)]
    assert whole.faults == []
    drawn = [[each.number for each in audited(run, 2, seed=seed).segments] for seed in (0, 0, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len({*map(tuple, drawn)}) > 1
    assert probability(2, 4) == "2 of 4 segments: one forged segment would have been found with a probability of 50%"


@pytest.mark.parametrize("world_size", [1, 2])
def test_resumed_runs_hold_too_with_an_evaluation_and_without_digests(tmp_path, world_size):
    fit = {"eval_data": data_of("net", None), "metrics": {"accuracy": accuracy}}
    given = {"digest_every": 100, "checkpoint_steps": 5, "keep": 9, "best": "accuracy", "fit": fit}
    record(world_size, tmp_path / "run", epochs=1, **given)
    record(3 - world_size, tmp_path / "run", **{**given, "fit": {**fit, "resume": "auto"}})
    found = audited(tmp_path / "run", **given)
    assert found.holds, found
    assert [each.last for each in found.segments] == [4, 5, 8, 10, 12]
    assert all(each.digests == 0 for each in found.segments)


FORGERIES = {
    "a loss": lambda folder: alter(folder, 8, lambda line: line.update(loss=next_up(line["loss"]))),
    "a place in the data": lambda folder: alter(folder, 8, lambda line: line.update(position=0)),
    "samples that are left out": lambda folder: alter(folder, 8, lambda line: line.update(ids=None)),
    "a weight": lambda folder: forge_weight(folder / "checkpoints" / "step-00000009"),
    "a moment": lambda folder: forge_weight(folder / "checkpoints" / "step-00000009", "optimizer.safetensors"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_twin_a_forged_segment_is_found_if_it_is_drawn(run, tmp_path, forgery):
    folder = copied(run, tmp_path)
    FORGERIES[forgery](folder)
    found = audited(folder)
    assert not found.holds
    assert found.faults == []
    # A forged state is the beginning of the segment after it, too.
    assert found.segments[2].difference is not None
    assert [each.difference for each in found.segments[:2]] == [None, None]
    missed = next(s for s in range(99) if 3 not in [each.number for each in audited(run, 1, seed=s).segments])
    if "a weight" not in forgery and "a moment" not in forgery:
        assert audited(folder, 1, seed=missed).holds


def test_twin_a_run_that_was_trained_on_other_data_is_found(tmp_path):
    record(1, tmp_path / "run", poison=2.0, **OPTIONS)
    assert not audited(tmp_path / "run").holds


FAULT = """
class Fault(samestep.Hook):
    def on_step_end(self, trainer, result):
        if result.step == 3 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), 9)

"""


def test_a_run_that_was_healed_holds(tmp_path):
    options = "digest_every=1, checkpoint_steps=2, keep=9, hooks=[Fault()]"
    text = SCRIPT.replace("with samestep", f"{FAULT}with samestep").replace("digest_every=1", options)
    (tmp_path / "train.py").write_text(f"import os{text}")
    (tmp_path / "replayed_parts.py").write_text(PARTS)
    done = samestep("run", "--devices", "cpu:2", "train.py", "0.1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"death", "heal"} <= {each["event"] for each in read_ledger(tmp_path / "runs" / "a").events}
    audit = CliRunner().invoke(app, ["audit", str(tmp_path / "runs" / "a"), "--all"])
    assert audit.exit_code == 0, audit.output


def exchanged(lines):
    places = [number for number, line in enumerate(lines) if line.startswith(b'{"step": ')]
    one, other = places[4], places[5]
    lines[one], lines[other] = lines[other], lines[one]
    return lines


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [line for line in lines if not line.startswith(b'{"step": 5, ')], "is of step 6"),
        (lambda lines: [line for line in lines if not line.startswith(b'{"step": 12, ')], "ends after step 11"),
        (exchanged, "is of step 6, and that before it of step 4"),
        (lambda lines: [line.replace(b'"skipped": f', b'"skipped":  f') for line in lines], "checksum"),
    ],
)
def test_twin_a_ledger_with_lines_removed_exchanged_or_damaged_is_found_by_any_audit(run, tmp_path, change, said):
    folder = copied(run, tmp_path)
    lines_changed(folder, change)
    found = audited(folder, 1, seed=0)
    assert not found.holds
    assert said in found.faults[0]


def test_what_is_made_of_the_last_checkpoint_and_the_record_must_fit_it(run, tmp_path):
    folder = copied(run, tmp_path)
    tensors = load_file(folder / "weights.safetensors")
    tensors["head.bias"][0] += 1
    save_file(tensors, folder / "weights.safetensors", FORMAT)
    (folder / "run.json").write_text((folder / "run.json").read_text().replace('"seed": 3', '"seed": 4'))
    found = audited(folder, 1, seed=next(s for s in range(99) if audited(run, 1, seed=s).segments[0].number > 1))
    assert found.faults == [
        "run.json and step-00000012 have another seed: 4 and 3",
        "weights.safetensors and step-00000012 have another head.bias",
    ]


def test_the_digest_of_the_end_is_compared(run, tmp_path):
    folder = copied(run, tmp_path)

    def change(lines):
        entries = [from_line(line.rstrip()) for line in lines]
        return [to_line({**each, "digest": "0" * 64} if each.get("event") == "end" else each) for each in entries]

    lines_changed(folder, change)
    assert "the final digest: 0000" in audited(folder).segments[3].difference


BEST = {
    **OPTIONS,
    "best": ("accuracy", "min"),
    "fit": {"eval_data": data_of("net", None), "metrics": {"accuracy": accuracy}},
}


@pytest.fixture(scope="module")
def attested(tmp_path_factory):
    """The same with evaluations, a best checkpoint and an attestation."""
    folder = tmp_path_factory.mktemp("audit") / "attested"
    record(2, folder, **BEST)
    rest = rest_of(newest(folder))
    assert (rest["best"], named(folder, "best")) == (1, "step-00000004")
    attest(folder)
    return folder


def newest(folder):
    return newest_checkpoint(folder / "checkpoints").snapshot


def named(folder, file):
    return (folder / "checkpoints" / file).read_text().strip()


def entries_changed(folder, change):
    """Changes the entries of the ledger; those that are bytes are lines."""
    entries = change([from_line(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()])
    lines = [each if isinstance(each, bytes) else to_line(each) for each in entries]
    (folder / "ledger.jsonl").write_bytes(b"".join(lines))


def in_entry(number, **names):
    return lambda folder: entries_changed(
        folder, lambda all_: [*all_[:number], {**all_[number], **names}, *all_[number + 1 :]]
    )


def inserted(number, *events):
    return lambda folder: entries_changed(folder, lambda all_: [*all_[:number], *events, *all_[number:]])


def event(name, step, **names):
    return {"event": name, "step": step, "time": "2026-01-01T00:00:00.000+00:00", **names}


def twice(line, name):
    """A line with a name that is there twice, the first time with another value, and its checksum made good."""
    body = json.dumps(line)[:-1].replace(f'"{name}": ', f'"{name}": "0x1p+0", "{name}": ', 1).encode()
    return body + b', "crc": "%08x"}\n' % zlib.crc32(body)


def resumed_from_elsewhere(all_):
    """Lines that are there, and hidden by an event that says that the run began after them."""
    return [event("resume", 3, **{"from": "step-00000003"}), *[each for each in all_ if each.get("event") != "start"]]


def under_another_contract(all_):
    """Forged lines, which a change of the contract leaves behind."""
    forged = [{**each, "loss": "0x1p-9"} for each in all_ if each.get("step", 9) < 3 and "event" not in each]
    return [all_[0], *forged, event("resume", 0, **{"from": "x"}), event("contract_change", 0, fields=[]), *all_[1:]]


def in_weights(change, metadata=FORMAT):
    def forge(folder):
        path = folder / "weights.safetensors"
        tensors = {name: tensor for name, tensor in load_file(path).items() if change(name)}
        save_file(tensors, path, metadata)

    return forge


def in_checkpoint(change, step=6, *more):
    def forge(folder):
        place = folder / "checkpoints" / f"step-{step:08d}"
        change(place)
        resealed(place, None, *more)

    return forge


def in_facts(change):
    def forge(place):
        facts = json.loads((place / "state.json").read_bytes())
        change(facts["run"]["rest"])
        (place / "state.json").write_text(json.dumps(facts, separators=(",", ":")))

    return in_checkpoint(forge)


def in_manifest(place):
    """Another name in a manifest, whose checksum is made good."""
    head = (place / MANIFEST_FILE).read_bytes().rpartition(b'  "checksum": "')[0] + b'  "accuracy": 1,\n  "checksum": "'
    (place / MANIFEST_FILE).write_bytes(head + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n')


def at_step_0(folder):
    shutil.copytree(folder / "checkpoints/step-00000012", folder / "checkpoints/step-00000000")
    resealed(folder / "checkpoints/step-00000000", 0)


def replaced(folder):
    shutil.copytree(folder / "checkpoints/step-00000003", folder / "checkpoints/step-00000012.replaced")


def linked(folder):
    (folder / "checkpoints/step-00000006").rename(folder.parent / "elsewhere")
    (folder / "checkpoints/step-00000006").symlink_to(folder.parent / "elsewhere")


def text_changed(name, old, new):
    def forge(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return forge


def with_scores(place):
    tensors = load_file(place / "model.safetensors")
    save_file(tensors, place / "model.safetensors", {"accuracy": "1.0"})


IN_A_SEGMENT = (
    "an end on the way",
    "an end moved",
    "scores in a contract",
    "scores below seconds",
    "another best epoch",
)
IN_A_SEGMENT += ("scores in a checkpoint", "a time that is none")
END = -1  # the place of the event of the end
CLAIMS = {  # a forgery, and what an audit of any segment says; there is an attestation for those of itself alone
    "a resume before the first line": (inserted(0, event("resume", 0, **{"from": "x"})), "steps 1 to 3: no segment of"),
    "lines before a resume": (lambda f: entries_changed(f, resumed_from_elsewhere), "steps 1 to 3: no segment of"),
    "lines of another contract": (lambda f: entries_changed(f, under_another_contract), "changed after step 0"),
    "a checkpoint of step 0": (at_step_0, "step-00000000, which no run writes"),
    "another best": (lambda f: (f / "checkpoints/best").write_text("step-00000003\n"), "best names step-00000003, and"),
    "another latest": (lambda f: (f / "checkpoints/latest").write_text("step-00000003\n"), "latest names step-0000000"),
    "a weight left out": (in_weights(lambda name: name != "head.bias"), "have another head.bias"),
    "all weights left out": (in_weights(lambda name: False), "weights.safetensors and step-00000012 have another"),
    "scores in the weights": (in_weights(lambda name: True, {"format": "pt", "accuracy": "1"}), "metadata that no run"),
    "scores in a checkpoint": (in_checkpoint(with_scores), "its metadata is none that a run writes"),
    "scores in a manifest": (lambda f: in_manifest(f / "checkpoints/step-00000006"), "it has what no run writes"),
    "scores beside a checkpoint": (lambda f: (f / "checkpoints/scores.json").touch(), "scores.json, which no run"),
    "scores in its folder": (lambda f: (f / "checkpoints/step-00000006/s.json").touch(), "step-00000006/s.json, which"),
    "scores that it names": (
        in_checkpoint(lambda p: (p / "s.json").touch(), 6, "s.json"),
        "step-00000006/s.json, whic",
    ),
    "other weights beside them": (replaced, "step-00000012.replaced, which no run"),
    "weights elsewhere": (linked, "step-00000006: it is a symbolic link"),
    "scores in a line": (in_entry(4, accuracy=1.0), "has 'accuracy', which no run writes there"),
    "scores in an event": (in_entry(END, accuracy=1.0), "has 'accuracy', which no run writes there"),
    "an event of scores": (inserted(4, event("scores", 3, accuracy=1.0)), "has 'accuracy', which no run writes there"),
    "scores as devices": (in_entry(4, world_size={"accuracy": 1.0}), "has 'world_size', which no run writes there"),
    "scores among seconds": (in_entry(4, seconds={"accuracy": 1.0}), "has 'accuracy', which no run writes there"),
    "a loss twice": (
        lambda f: entries_changed(f, lambda all_: [*all_[:4], twice(all_[4], "loss"), *all_[5:]]),
        "line 5",
    ),
    "an end on the way": (inserted(6, event("end", 5, digest="0" * 64)), "the digest after step 5: 0000"),
    "an end moved": (in_entry(END, step=5), "the digest after step 5: "),
    "two ends": (inserted(END, event("end", 12, digest="0" * 64)), "has two digests of the end after one step"),
    "words after the end": (lambda f: (f / "ledger.jsonl").open("a").write('{"accuracy": 1'), "ends with half a line"),
    "scores in the record": (
        text_changed("run.json", '"seed": 3,', '"seed": 3, "accuracy": 1,'),
        "run.json has accuracy",
    ),
    "scores in a contract": (in_facts(lambda rest: rest["contract"].update(accuracy=1)), "contract: accuracy"),
    "scores below seconds": (in_facts(lambda rest: rest.update(seconds={"accuracy": 1})), "run.rest.seconds: "),
    "a time that is none": (in_facts(lambda rest: rest.update(seconds=1)), "run.rest.seconds: 1, now None"),
    "another best epoch": (in_facts(lambda rest: rest.update(best=3)), "run.rest.best: 3, now 1"),
    "a record twice": (text_changed("run.json", "{", '{"seed": 9, '), "it has a name twice in one object"),
    "an attested digest twice": (
        text_changed("attestation.json", '"finalDigest"', '"finalDigest": "0", "finalDigest"'),
        "twi",
    ),
    "an attested score": (
        text_changed("attestation.json", '"steps"', '"seconds": {"accuracy": 1}, "steps"'),
        "predicate.sec",
    ),
    "an attested time": (
        text_changed("attestation.json", '"steps"', '"seconds": 1, "steps"'),
        "predicate.seconds: 1, now",
    ),
    "an attested space": (text_changed("attestation.json", '"steps"', ' "steps"'), "not what samestep attest writes"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_twin_what_a_run_claims_and_no_audit_computes_again_is_named(attested, tmp_path, claim):
    forge, said = CLAIMS[claim]
    folder = copied(attested, tmp_path)
    forge(folder)
    texts, holds = [], False
    if "attested" not in claim:
        (folder / "attestation.json").unlink()
    try:
        found = audited(folder, 0 if claim in IN_A_SEGMENT else 1, **BEST)
        holds = found.holds
        texts = [*found.faults, *found.not_audited, *(each.difference for each in found.segments if each.difference)]
    except (UsageError, CheckpointError) as error:
        texts = [str(error)]
    assert not holds
    assert any(said in text for text in texts), texts


def test_an_attestation_names_what_best_and_latest_name(attested, tmp_path):
    found = audited(attested, **BEST)
    assert found.holds, found
    assert not {"run.json", "checkpoints"} & {*found.not_compared}
    assert {"metrics.jsonl"} <= {*found.not_compared}
    for file in ("best", "latest"):
        folder = copied(attested, tmp_path / file)
        (folder / "checkpoints" / file).write_text("step-00000003\n")
        assert audited(folder, 1, **BEST).faults[0].startswith("attestation.json does not fit the folder: subject.")


def test_no_weights_are_exported_as_the_best_that_are_not(attested, tmp_path):
    folder = copied(attested, tmp_path)
    export_weights(folder / "checkpoints/best", tmp_path / "best.safetensors")
    (folder / "checkpoints/best").write_text("step-00000003\n")
    for ask in (lambda place: export_weights(place, tmp_path / "out.safetensors"), read_state):
        with pytest.raises(CheckpointError, match="best names step-00000003, and the newest state has epoch 1 as its"):
            ask(folder / "checkpoints/best")


def test_the_digests_of_ends_on_the_way_are_compared_where_no_checkpoint_is_left(tmp_path):
    given = {"checkpoint_steps": None, "keep": 1}
    for epochs in (1, 2, 3):
        record(1, tmp_path / "run", epochs=epochs, fit={"resume": "auto"}, **given)
    ends = [each["step"] for each in read_ledger(tmp_path / "run").events if each["event"] == "end"]
    assert ends == [4, 8, 12]
    found = audited(tmp_path / "run", **given)
    assert found.holds, found
    assert [(each.first, each.last) for each in found.segments] == [(1, 12)]


@pytest.mark.parametrize("leave", [lambda: os._exit(0), lambda: sys.exit(0)], ids=["_exit", "exit"])
def test_a_program_that_ends_its_process_ends_no_audit(run, leave):
    def program():
        try:
            train(None, run, **OPTIONS)
        finally:
            leave()

    assert audit(run, 0, program=program).holds
    with pytest.raises(UsageError, match="ended with the exit code 0 before a Trainer of its own"):
        audit(run, 0, program=leave)


def test_a_checkpoint_without_its_manifest_is_named_by_who_attests(run, tmp_path):
    folder = copied(run, tmp_path)
    (folder / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"copy/checkpoints/step-00000006: it has no manifest\.json"):
        attest(folder)


def test_a_run_without_checkpoints_between_is_one_segment_and_says_what_to_record(run, tmp_path):
    folder = copied(run, tmp_path)
    for step in (3, 6, 9):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")
    found = audited(folder, 1)
    assert found.holds
    assert found.num_segments == 1
    assert any("checkpoint_steps=100, keep=1000" in note for note in found.notes)


def end_of(folder):
    return next(each for each in read_ledger(folder).events if each["event"] == "end")


def test_a_program_of_another_contract_is_refused(run):
    with pytest.raises(ContractError, match=r"(?s)cannot be audited here from step .*num_threads: 1 before, 2 now"):
        audited(run, num_threads=2)
    with pytest.raises(UsageError, match="ended before step 12, after 11 steps"):
        audit(run, 0, program=lambda: train(None, run, fit={"max_steps": 11}, **OPTIONS))


def test_a_script_s_run_is_audited_by_the_command(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT.replace("digest_every=1", "digest_every=1, checkpoint_steps=2, keep=9"))
    (tmp_path / "replayed_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    program_of({"command": ["python", "train.py", "0.1"], "working_folder": str(tmp_path)}, tmp_path).run()
    monkeypatch.chdir("/")
    runner, folder = CliRunner(), tmp_path / "runs" / "a"
    before = contents(folder)
    done = runner.invoke(app, ["audit", str(folder), "--all", "--json"])
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    assert (value["holds"], value["num_segments"], value["num_steps"]) == (True, 3, 6)
    assert contents(folder) == before
    drawn = runner.invoke(app, ["audit", str(folder), "--segments", "1", "--seed", "5"])
    assert "seed 5: 1 of 3 segments: one forged segment would have been found with a probability of 33%" in drawn.stdout
    assert "this is the script" not in drawn.stdout
    refused = runner.invoke(app, ["audit", str(folder), "--except", "*.log"])
    assert "got --except *.log for" in str(refused.exception)
    shutil.copytree(folder, tmp_path / "copy")
    moved = runner.invoke(app, ["audit", str(tmp_path / "copy")])
    assert f"in this very process; a Trainer of it has the run in {folder}: name that folder" in str(moved.exception)
    shutil.rmtree(tmp_path / "copy")
    folder.rename(tmp_path / "moved")
    assert runner.invoke(app, ["audit", str(tmp_path / "moved")]).exit_code == 0
    (tmp_path / "moved").rename(folder)
    alter(folder, 2, lambda line: line.update(loss=next_up(line["loss"])))
    altered = runner.invoke(app, ["audit", str(folder), "--all"])
    assert altered.exit_code == 1
    assert "no: step 2: loss 0." in altered.stdout
    (tmp_path / "train.py").write_text((tmp_path / "train.py").read_text() + "\n")
    other = runner.invoke(app, ["audit", str(folder)])
    assert "is not the script that made the run" in str(other.exception)


def test_a_run_on_several_devices_is_audited_by_several_workers(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace("digest_every=1", "digest_every=1, checkpoint_steps=2, keep=9"))
    (tmp_path / "replayed_parts.py").write_text(PARTS)
    done = samestep("run", "--devices", "cpu:3", "train.py", "0.1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = samestep("audit", "runs/a", "--all", "--devices", "cpu:2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [each["last"] for each in json.loads(done.stdout)["segments"]] == [2, 4, 6]
    alter(tmp_path / "runs" / "a", 3, lambda line: line.update(loss=next_up(line["loss"])))
    done = samestep("audit", "runs/a", "--all", "--devices", "cpu:2", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "no: step 3: loss" in done.stdout


def test_an_attestation_is_a_statement_of_in_toto_that_fits_the_folder_and_no_other(run, tmp_path):
    folder = copied(run, tmp_path)
    assert any("there is no attestation" in note for note in audited(folder, 1).notes)
    path = attest(folder)
    value = json.loads(path.read_text())
    assert value["_type"] == "https://in-toto.io/Statement/v1"
    assert value["predicateType"] == "urn:samestep:run:1"
    digests = {each["name"]: each["digest"]["sha256"] for each in value["subject"]}
    assert digests["ledger.jsonl"] == hashlib.sha256((folder / "ledger.jsonl").read_bytes()).hexdigest()
    assert {name for name in digests if name.startswith("checkpoints/")} == {
        "checkpoints/latest",
        *(f"checkpoints/step-{step:08d}/manifest.json" for step in (3, 6, 9, 12)),
    }
    predicate = value["predicate"]
    assert (predicate["steps"], predicate["contract"]["seed"]) == (12, 3)
    assert predicate["program"]["packages"]["torch"].startswith("2.")
    assert [link["step"] for link in predicate["chain"]] == [3, 6, 9, 12, None]
    assert len(predicate["finalDigest"]) == 64
    found = audited(folder, 1)
    assert (found.holds, found.notes) == (True, [])
    FORGERIES["a weight"](folder)
    assert "attestation.json does not fit the folder: subject.6.digest.sha256: " in audited(folder, 1).faults[0]
    again = json.loads(attest(folder).read_text())["predicate"]["chain"]
    same = [one == other for one, other in zip(again, predicate["chain"], strict=True)]
    assert same == [True, True, False, False, False]


def test_a_resumed_run_keeps_the_code_of_each_start_and_all_of_it_is_checked(tmp_path, monkeypatch):
    script = SCRIPT.replace("trainer.fit((x, y), 3)", 'trainer.fit((x, y), int(sys.argv[2]), resume="auto")')
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "replayed_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    folder, records = tmp_path / "runs" / "a", []
    for number, text in enumerate((PARTS, PARTS, PARTS + "\n", PARTS), 1):
        (tmp_path / "replayed_parts.py").write_text(text)
        words = ["python", "train.py", "0.1", str(number)]
        program_of({"command": words, "working_folder": str(tmp_path)}, tmp_path).run()
        records.append(json.loads((folder / "run.json").read_text()))
    assert records[0]["code"]["files"].keys() == {"train.py", "replayed_parts.py"}
    assert records[0]["packages"]["numpy"]
    own = [{name: record[name] for name in ("script_sha256", "code")} for record in records]
    assert [record["earlier_starts"] for record in records] == [[], own[:1], own[:1], [own[0], own[2]]]
    assert statement(folder)["predicate"]["program"]["earlier_starts"] == [own[0], own[2]]
    refused = CliRunner().invoke(app, ["audit", str(folder)])
    assert "replayed_parts.py is not the file that made it in its start 2 of 2; put it" in str(refused.exception)
    done = CliRunner().invoke(app, ["audit", str(folder), "--all", "--trust"])
    assert done.exit_code == 0, done.output
    assert "note: replayed_parts.py is not the file that made it in its start 2 of 2" in done.stdout


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="OpenSSH is not installed")
def test_an_attestation_is_signed_and_verified_by_ssh_keygen(run, tmp_path):
    path = attest(copied(run, tmp_path))
    key, signers = tmp_path / "key", tmp_path / "allowed_signers"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    signers.write_text(f"me@example.org {key.with_suffix('.pub').read_text()}")
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", "training", path], check=True)
    words = ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", "me@example.org", "-n", "training"]

    def is_verified(content):
        return subprocess.run([*words, "-s", f"{path}.sig"], input=content, capture_output=True).returncode == 0

    assert is_verified(path.read_bytes())
    assert not is_verified(path.read_bytes().replace(b'"steps": 12', b'"steps": 13'))


LOOP = """
import sys
from pathlib import Path
import torch
from torch.nn import functional
import samestep
from replayed_parts import make_model

run = samestep.Run(24, 4, seed=3)
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
model = make_model()
loss_fn = lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])
step = run.train_step(model, torch.optim.Adam(model.parameters(), lr=LR), loss_fn)
loader = run.loader((x, (x[:, 0] > 0).long()), shuffle=True)
seen = run.load_checkpoint("saved", step, loader) or {"losses": []}
while step.num_steps < 8:
    for batch in loader:
        seen["losses"].append(step(batch).loss)
        if step.num_steps % 2 == 0:
            run.save_checkpoint("saved", step, loader, rest=seen, keep=9)
"""


def test_a_loop_of_one_s_own_is_audited_by_the_checkpoints_that_it_saves(tmp_path, monkeypatch):
    (tmp_path / "loop.py").write_text(LOOP.replace("LR", "0.01"))
    (tmp_path / "replayed_parts.py").write_text(PARTS)
    done = samestep("run", "--devices", "cpu:2", "loop.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before = contents(tmp_path / "saved")
    runner, folder = CliRunner(), tmp_path / "saved"

    def said(*words):
        result = runner.invoke(app, ["audit", str(folder), "--all", *words])
        return result.exit_code, str(result.exception) + result.stdout

    assert said()[0] == 0, said()
    assert contents(folder) == before
    assert len(json.loads(attest(folder).read_text())["predicate"]["chain"]) == 5
    assert "there is no attestation" not in said()[1]
    (folder / "attestation.json").unlink()
    forge_weight(folder / "step-00000004")
    code, text = said()
    assert (code, text.count("yes")) == (1, 2), text
    assert "after step 4: " in text
    (tmp_path / "loop.py").write_text(LOOP.replace("LR", "0.02"))
    assert "is not the script that made the run" in said()[1]
    assert "other settings" in said("--trust")[1]


def test_a_resumed_loop_s_checkpoints_name_the_code_of_each_start(tmp_path, monkeypatch):
    (tmp_path / "loop.py").write_text(LOOP.replace("LR", "0.01").replace("< 8", "< int(sys.argv[1])"))
    monkeypatch.chdir(tmp_path)
    for steps, text in (("4", PARTS), ("8", PARTS + "\n")):
        (tmp_path / "replayed_parts.py").write_text(text)
        words = ["python", "loop.py", steps]
        program_of({"command": words, "working_folder": str(tmp_path)}, tmp_path).run()
    refused = CliRunner().invoke(app, ["audit", "saved"])
    assert "replayed_parts.py is not the file that made it in its start 1 of 2" in str(refused.exception)
    assert len(statement(tmp_path / "saved")["predicate"]["program"]["earlier_starts"]) == 1
    assert CliRunner().invoke(app, ["audit", "saved", "--all", "--trust"]).exit_code == 0


def test_a_loop_that_loads_no_checkpoint_is_a_sentence(tmp_path):
    text = LOOP.replace("LR", "0.01").replace('run.load_checkpoint("saved", step, loader) or ', "")
    (tmp_path / "loop.py").write_text(text)
    (tmp_path / "replayed_parts.py").write_text(PARTS)
    done = samestep("run", "--devices", "cpu:1", "loop.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = CliRunner().invoke(app, ["audit", str(tmp_path / "saved"), "--all"])
    assert "call run.load_checkpoint(folder, …) before its loop" in str(result.exception)


def test_no_import_of_ours_draws_from_the_generators_of_a_run(tmp_path):
    text = "import random, samestep\nrun = samestep.Run(8, 4)\nstate = random.getstate()\nsamestep.Trainer\n"
    done = samestep("-c", f"{text}assert random.getstate() == state\n", cwd=tmp_path, command=(sys.executable,))
    assert done.returncode == 0, done.stderr
