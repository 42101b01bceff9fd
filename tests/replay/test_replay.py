"""Replay: the same bits at every step, what was wrong and where, and what is not what was recorded."""

import io
import json
import math
import pdb
import shutil
import subprocess
import sys
from bdb import BdbQuit
from pathlib import Path

import pytest
import torch
from replay_programs import NUM_MICROBATCHES, PARTS, POISONED, SCRIPT, Plain, loss_fn, record, train
from torch.nn import functional
from typer.testing import CliRunner

from samestep.cli.main import app
from samestep.errors import DeviceError, NonFiniteError, UsageError, WorkerError
from samestep.replay.observed_step import ObservedStep
from samestep.replay.replaying import program_of, replay
from samestep.runs.ledger import from_line, read_ledger, to_line

PLAIN = {"kind": "plain", "poison": -300.0}


def replayed(folder, step, program=None, **options):
    """A replay of a run that `record` made."""
    given = options.pop("given", {})
    return replay(folder, step, program=program or (lambda: train(None, folder, **given)), **options)


def alter(folder, step, change):
    """Changes the line of a step in a ledger."""
    path = folder / "ledger.jsonl"
    lines = [from_line(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        if line["step"] == step and "event" not in line:
            change(line)
    path.write_bytes(b"".join(map(to_line, lines)))


def next_up(text):
    """The float of a ledger with its last bit changed."""
    return math.nextafter(float.fromhex(text), math.inf).hex()


def copied(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Twelve steps on three devices, with checkpoints after 5, 10 and 12."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    record(3, folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run on three devices whose steps can be computed with torch alone, in which one sample stands out."""
    folder = tmp_path_factory.mktemp("replay") / "plain"
    record(3, folder, **PLAIN)
    return folder


def assert_every_step_is_the_same(folder, steps):
    ledger = read_ledger(folder)
    before = contents(folder)
    for step in steps:
        found = replayed(folder, step)
        assert found.holds
        assert found.check.same_bits
        assert found.check.tier == "bitwise"
        assert found.changes == []
        recorded = ledger.steps[step]
        assert found.view.digest == recorded["digest"]
        assert found.view.loss.hex() == recorded["loss"]
        assert found.view.grad_norm.hex() == recorded["grad_norm"]
        first = 1 if found.start is None else int(found.start.removeprefix("step-")) + 1
        assert found.check.first == first
        assert found.check.compared == found.check.digests == step - first + 1
        assert len(found.view.samples) == recorded["num_samples"]
    assert contents(folder) == before


def test_every_step_of_a_run_on_three_devices_is_replayed_on_one_with_the_same_bits(run):
    assert_every_step_is_the_same(run, range(1, 13))
    assert [replayed(run, step).start for step in (5, 6, 11)] == [None, "step-00000005", "step-00000010"]


@pytest.mark.parametrize(("world_size", "checkpoint_steps"), [(1, 1), (4, None)])
def test_some_steps_of_runs_on_other_numbers_of_devices_too(tmp_path, world_size, checkpoint_steps):
    record(world_size, tmp_path / "run", checkpoint_steps=checkpoint_steps, keep=20)
    assert_every_step_is_the_same(tmp_path / "run", (1, 8, 12))


def test_a_damaged_line_is_said_and_not_compared(run, tmp_path):
    folder = copied(run, tmp_path)
    path = folder / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"skipped": false', b'"skipped": true ', 1))
    found = replayed(folder, 3)
    assert found.holds
    assert any("is damaged: its checksum does not fit its bytes" in note for note in found.notes)


def test_steps_of_a_run_that_broke_off_before_it_wrote_them_down_are_replayed_too(run, tmp_path):
    folder = copied(run, tmp_path)
    path = folder / "ledger.jsonl"
    lines = [from_line(line) for line in path.read_bytes().splitlines()]
    path.write_bytes(b"".join(to_line(line) for line in lines if line["step"] < 10))
    found = replayed(folder, 10)
    assert found.holds
    assert found.check.compared == 4
    assert found.view.digest == next(line["digest"] for line in lines if line["step"] == 10 and "digest" in line)
    assert any("steps 1 to 9" in note for note in found.notes)


def test_a_damaged_checkpoint_is_passed_over_and_told(run, tmp_path):
    folder = copied(run, tmp_path)
    with (folder / "checkpoints" / "step-00000010" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    found = replayed(folder, 11)
    assert found.start == "step-00000005"
    assert found.check.same_bits
    assert any("step-00000010" in note for note in found.notes)


def test_a_loss_spike_on_three_devices_is_traced_to_its_sample_microbatch_and_module(plain):
    losses = [float.fromhex(line["loss"]) for line in read_ledger(plain).steps.values()]
    spike = max(range(4), key=losses.__getitem__)
    assert losses[spike] > 3 * min(losses[:4])
    found = replayed(plain, spike + 1, given=PLAIN)
    assert found.check.same_bits
    worst = max(found.view.microbatches, key=lambda microbatch: microbatch.loss)
    assert POISONED in worst.samples
    assert worst.loss > 3 * min(microbatch.loss for microbatch in found.view.microbatches)
    for module in ("first", "act", "head"):
        peaks = {
            microbatch.microbatch: (abs(one.forward.peak), one.sample)
            for microbatch in found.view.microbatches
            for one in microbatch.activations
            if one.place.name == f"{module}.output"
        }
        assert max(peaks, key=peaks.get) == worst.microbatch
        assert peaks[worst.microbatch][1] == POISONED


def test_what_is_shown_is_what_torch_alone_computes(plain, monkeypatch):
    begin, on_microbatch, end = ObservedStep.begin, ObservedStep.on_microbatch, ObservedStep.end
    parameters, batches = {}, []

    def keep(step, moment):
        parameters.update({(name, moment): p.detach().clone() for name, p in step.model.named_parameters()})

    monkeypatch.setattr(ObservedStep, "begin", lambda self, step: (keep(step, "before"), begin(self, step))[1])
    monkeypatch.setattr(ObservedStep, "end", lambda self, *told: (keep(self._step, "after"), end(self, *told))[1])
    monkeypatch.setattr(
        ObservedStep,
        "on_microbatch",
        lambda self, *told: (batches.append(told[-1]) if self._step else None, on_microbatch(self, *told))[1],
    )
    found = replayed(plain, 6, given=PLAIN)
    model = Plain()
    model.load_state_dict({name: parameters[name, "before"] for name, _ in model.named_parameters()})
    sums = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in model.named_parameters()}
    total = 0.0
    for microbatch, (x, y) in zip(found.view.microbatches, batches, strict=True):
        model.zero_grad()
        first = model.first(x)
        act = model.act(first)
        out = model.head(act)
        out.retain_grad()
        act.retain_grad()
        mean = functional.cross_entropy(out, y)
        (mean * len(microbatch.samples)).backward()
        for name, value in (("first.output", first), ("act.output", act), ("head.input", act), ("head.output", out)):
            (seen,) = [one for one in microbatch.activations if one.place.name == name]
            exact = value.detach().double()
            assert seen.forward.shape == tuple(value.shape)
            assert (seen.forward.min, seen.forward.max) == (float(exact.min()), float(exact.max()))
            assert seen.forward.mean == pytest.approx(float(exact.mean()), rel=1e-12, abs=1e-15)
            assert seen.forward.std == pytest.approx(float(exact.std(correction=0)), rel=1e-12)
            assert seen.forward.zeros == int((value == 0).sum())
            assert seen.sample == microbatch.samples[int(exact.abs().amax(1).argmax())]
        norms = {one.place.name: one.backward and one.backward.norm for one in microbatch.activations}
        assert norms["head.output"] == pytest.approx(float(out.grad.double().norm()), rel=1e-12)
        assert norms["head.input"] == pytest.approx(float(act.grad.double().norm()), rel=1e-12)
        assert microbatch.loss == pytest.approx(mean.item(), rel=1e-6)  # a product and a quotient of float32
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad.double()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
        assert microbatch.grad_norm == pytest.approx(norm / len(microbatch.samples), rel=1e-9)
        total += microbatch.total
    assert found.view.loss == total / 24
    for parameter in found.view.parameters:
        gradient = sums[parameter.name] / 24
        assert parameter.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-5)
        before, after = parameters[parameter.name, "before"], parameters[parameter.name, "after"]
        update = (after - before).double().norm() / before.double().norm()
        assert parameter.update_ratio == pytest.approx(float(update), rel=1e-9)
    assert found.view.grad_norm == pytest.approx(
        math.sqrt(sum(p.grad_norm**2 for p in found.view.parameters)), rel=1e-5
    )


def test_modules_are_seen_in_place_again_and_between(run):
    microbatch = replayed(run, 2).view.microbatches[1]
    places = {one.place.name: one for one in microbatch.activations}
    assert [name for name in places if name.startswith("twice") and "output" in name] == [
        "twice.output",
        "twice#1.output",
    ]
    assert places["body.1.output"].forward.min < 0 == places["body.2.output"].forward.min
    assert places["body.2.input"].backward is not None
    assert places["body.3.output"].forward == places["body.output"].forward == places["twice.input"].forward


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("loss", lambda line: line.update(loss=next_up(line["loss"]))),
        ("grad_norm", lambda line: line.update(grad_norm=next_up(line["grad_norm"]))),
        ("ids", lambda line: line.update(ids="0" * 16)),
        ("digest", lambda line: line.update(digest=f"{int(line['digest'], 16) ^ 1:016x}")),
    ],
)
def test_twin_a_ledger_that_is_altered_by_one_bit_is_noticed(run, tmp_path, field, change):
    folder = copied(run, tmp_path)
    alter(folder, 7, change)
    found = replayed(folder, 8)
    assert not found.holds
    assert found.check.differs == 7
    assert [one.field for one in found.check.fields] == [field]
    assert found.check.reason
    assert replayed(folder, 6).holds


def test_other_data_are_a_finding_with_the_step_at_which_they_show(run):
    found = replayed(run, 3, given={"poison": 2.0})
    assert not found.holds
    assert POISONED in replayed(run, found.check.differs).view.samples
    assert "forward" in found.check.reason


@pytest.mark.parametrize(
    ("kind", "poison", "direction", "module"),
    [
        ("batch", math.inf, "batch", None),
        ("forward", 1e4, "forward", "0.1.0"),
        ("backward", 0.0, "backward", "0.1.0"),
        ("loss", 0.0, "loss", None),
    ],
)
def test_a_run_that_was_stopped_by_what_is_not_finite_is_replayed_at_that_step(
    tmp_path, kind, poison, direction, module
):
    given = {"kind": kind, "poison": poison, "checkpoint_steps": 1}
    with pytest.raises(NonFiniteError):
        record(1, tmp_path / "run", **given)
    step = len(read_ledger(tmp_path / "run").steps) + 1
    found = replayed(tmp_path / "run", step, given=given)
    assert found.holds
    assert found.view.error.startswith("NonFiniteError")
    assert found.view.loss is None
    where = found.view.nonfinite
    assert (where.direction, where.module) == (direction, module)
    assert POISONED in found.view.microbatches[where.microbatch].samples
    if direction != "loss":
        assert where.sample == POISONED
    assert (
        json.loads(json.dumps(found.as_json(), allow_nan=False))["view"]["nonfinite"]["microbatch"] == where.microbatch
    )


def test_a_step_that_is_left_out_is_shown_as_such(tmp_path):
    given = {"kind": "forward", "poison": 1e4, "on_nonfinite": "skip"}
    record(2, tmp_path / "run", **given)
    step = next(number for number, line in read_ledger(tmp_path / "run").steps.items() if line["skipped"])
    found = replayed(tmp_path / "run", step, given=given)
    assert found.check.same_bits
    assert found.view.skipped
    assert found.view.nonfinite.module == "0.1.0"
    assert all(parameter.update_norm == 0 for parameter in found.view.parameters)


def test_an_exception_of_the_program_in_the_step_is_shown(tmp_path, run):
    def fails(model, batch):
        raise KeyError("nothing of this name")

    def program():
        import replay_programs

        replay_programs.loss_fn = fails
        try:
            train(None, run)
        finally:
            replay_programs.loss_fn = loss_fn

    found = replayed(run, 1, program=program)
    assert "KeyError: 'nothing of this name'" in found.view.error
    assert any("did not raise" in note for note in found.notes)
    with pytest.raises(WorkerError, match="before step 2, after 0 steps"):
        replayed(run, 2, program=program)


def test_where_other_bits_are_sure_losses_are_compared_up_to_rounding(plain, tmp_path):
    folder = copied(plain, tmp_path)

    def changed(line, factor):
        line.update(loss=(float.fromhex(line["loss"]) * factor).hex(), digest="0" * 16)

    alter(folder, 2, lambda line: changed(line, 1 + 1e-6))
    found = replayed(folder, 3, given={**PLAIN, "num_threads": 2})
    assert [change.field for change in found.changes if change.breaks] == ["num_threads"]
    assert found.check.tier == "allclose"
    assert found.holds
    assert not found.check.same_bits
    assert 0.9e-6 < found.check.relative < 1e-4
    assert not replayed(folder, 3, given=PLAIN).holds, "twin: where nothing has changed, every bit counts"

    alter(folder, 2, lambda line: changed(line, 1.01))
    again = replayed(folder, 3, given={**PLAIN, "num_threads": 2})
    assert again.check.differs == 2


def test_one_microbatch_and_one_module_can_be_chosen(run):
    found = replayed(run, 1, microbatch=2, module="body")
    assert [microbatch.microbatch for microbatch in found.view.microbatches] == [2]
    assert {one.place.module for one in found.view.microbatches[0].activations} == {
        "body",
        *(f"body.{number}" for number in range(4)),
    }
    assert {parameter.name.partition(".")[0] for parameter in found.view.parameters} == {"body"}


def test_a_breakpoint_of_the_program_opens_python_s_debugger_in_each_microbatch(run, monkeypatch, capsys):
    def stopping(model, batch):
        breakpoint()
        return loss_fn(model, batch)

    # pytest puts a debugger of its own there
    monkeypatch.setattr(sys, "breakpointhook", lambda: pdb.Pdb(nosigint=True).set_trace(sys._getframe(1)))
    monkeypatch.setattr("replay_programs.loss_fn", stopping)
    monkeypatch.setattr(sys, "stdin", io.StringIO("p 'rows', len(batch[0])\nc\n" * NUM_MICROBATCHES))
    assert replayed(run, 1).check.same_bits
    assert capsys.readouterr().out.count("('rows', 6)") == NUM_MICROBATCHES
    monkeypatch.setattr(sys, "stdin", io.StringIO("q\n"))
    with pytest.raises(BdbQuit):
        replayed(run, 1)


@pytest.mark.parametrize(
    ("step", "options", "sentence"),
    [
        (13, {}, "steps 1 to 12"),
        (0, {}, "it must be 1 or more"),
        (3, {"microbatch": NUM_MICROBATCHES}, "it must be from 0 to 3"),
        (3, {"module": "boddy"}, "no such module, but body"),
        (3, {"device": "cuda:99"}, "this process has"),
        (3, {"program": lambda: None}, "before a Trainer of its own"),
    ],
)
def test_what_cannot_be_is_a_sentence(run, step, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        replayed(run, step, **options)
    assert issubclass(DeviceError, UsageError)


def test_a_folder_without_a_run_is_a_sentence_that_says_what_is_missing(tmp_path):
    with pytest.raises(UsageError, match=r"no run\.json in it.*Trainer.*loops of your own"):
        replay(tmp_path, 1)
    with pytest.raises(UsageError, match="holds no run"):
        replay(tmp_path / "nowhere", 1)


def test_a_program_that_ends_early_is_a_sentence(tmp_path):
    record(1, tmp_path / "run", epochs=2, checkpoint_steps=None)
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "checkpoints")
    with pytest.raises(UsageError, match="ended before step 6, after 4 steps"):
        replayed(tmp_path / "run", 6, given={"epochs": 1})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "does not say which program"),
        ("samestep train mlp", "does not say which program"),
        ("python -c pass", "does not say which program"),
        ("jupyter lab", "does not say which program"),
        ("python gone.py", "not there any more"),
    ],
)
def test_a_command_that_leads_to_no_program_is_refused(tmp_path, words, sentence):
    with pytest.raises(UsageError, match=sentence):
        program_of({"working_folder": str(tmp_path), "command": words.split()}, Path("run"))


def test_the_file_of_a_module_is_the_one_that_python_runs(tmp_path):
    def file_of(name):
        return program_of({"working_folder": str(tmp_path), "command": ["python", "-m", name]}, Path("run")).file

    for file in ("part/__main__.py", "part.py", "whole/inner/__main__.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    assert [file_of("part"), file_of("whole.inner")] == [tmp_path / "part.py", tmp_path / "whole/inner/__main__.py"]
    assert [file_of(name) for name in ("nothing", "part.inner", "whole", "sys")] == [None] * 4
    (tmp_path / "part/__init__.py").write_text("")
    assert file_of("part") == tmp_path / "part/__main__.py"


@pytest.mark.parametrize("starter", ["script", "module"])
def test_what_a_run_records_of_its_program_leads_back_to_it(tmp_path, monkeypatch, capsys, starter):
    (tmp_path / "origins.py").write_text(
        "import json\nfrom samestep.runs.recorder import relaunch\nprint(json.dumps(relaunch()))\n"
    )
    monkeypatch.chdir(tmp_path)
    first = {"script": ["python", "origins.py", "a", "-b"], "module": ["python", "-m", "origins", "a", "-b"]}[starter]
    program_of({"command": first, "working_folder": str(tmp_path)}, tmp_path).run()
    said = json.loads(capsys.readouterr().out)
    assert said["working_folder"] == str(tmp_path)
    monkeypatch.chdir("/")
    program_of(said, tmp_path).run()
    again = json.loads(capsys.readouterr().out)
    assert again["working_folder"] == str(tmp_path)
    assert [Path(word).name for word in again["command"]] == [Path(word).name for word in first]


def test_a_recipe_s_run_is_replayed_from_its_record(tmp_path, monkeypatch, capsys):
    rows = [f"{i % 7},{(i * i) % 11},{(3 * i) % 5},{(i % 7) * 2 - (3 * i) % 5}" for i in range(60)]
    (tmp_path / "table.csv").write_text("a,b,c,target\n" + "\n".join(rows) + "\n")
    words = ["--data", "table.csv", "--epochs", "2", "--global-batch-size", "16", "--checkpoint-steps", "4"]
    program = [sys.executable, "-m", "samestep.recipes.mlp", *words, "--run-dir", "runs/a"]
    subprocess.run(program, cwd=tmp_path, check=True, timeout=120)
    before = contents(tmp_path / "runs")
    monkeypatch.chdir("/")
    found = replay(tmp_path / "runs" / "a", 6)
    assert "has no effect" not in capsys.readouterr().err, "the replay has no run folder, and the run had one"
    assert found.check.same_bits
    assert found.start == "step-00000004"
    assert contents(tmp_path / "runs") == before


def test_a_script_s_run_is_replayed_by_the_command_with_its_own_arguments(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "replayed_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    program_of({"command": ["python", "train.py", "0.1"], "working_folder": str(tmp_path)}, tmp_path).run()
    monkeypatch.chdir("/")
    kept = sys.argv[:], sys.path[:], sys.modules["__main__"]
    runner = CliRunner()
    done = runner.invoke(app, ["replay", str(tmp_path / "runs" / "a"), "--step", "4", "--json"])
    assert done.exit_code == 0, done.output
    assert kept == (sys.argv, sys.path, sys.modules["__main__"])
    value = json.loads(done.stdout)
    assert value["holds"]
    assert value["check"]["compared"] == 4
    assert value["view"]["lr"] == [0.1]

    shown = runner.invoke(app, ["replay", str(tmp_path / "runs" / "a"), "--step", "4", "--module", "3"])
    assert "same bits as recorded (4 steps, 4 checksums of the state)" in shown.stdout
    assert "3.input gradient" in shown.stdout
    assert "this is the script" not in shown.stdout
    alter(tmp_path / "runs" / "a", 2, lambda line: line.update(loss=next_up(line["loss"])))
    altered = runner.invoke(app, ["replay", str(tmp_path / "runs" / "a"), "--step", "4"])
    assert altered.exit_code == 1
    assert "step 2 is not what was recorded" in altered.stdout
    assert "No setting that decides the bits has changed" in altered.stdout
    (tmp_path / "train.py").unlink()
    gone = runner.invoke(app, ["replay", str(tmp_path / "runs" / "a"), "--step", "4"])
    assert "not there any more" in str(gone.exception)
