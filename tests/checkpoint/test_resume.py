"""Resuming: a run that was stopped anywhere ends as the one that never was, on any number of devices."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from resume_programs import BATCH, CASES, EPOCHS, Noisy, classification, plain, points, train
from torch import nn
from torch.utils.data import DataLoader
from worlds import alone, in_turns

from samestep.checkpoint import state
from samestep.errors import UsageError
from samestep.run import progress
from samestep.run.run import Run
from samestep.run.trainer import Trainer
from samestep.runs.ledger import from_line

STEPS = 12
QUICK = {"user's, sampler by hook", "float64 momentum", "evaluation by a loader"}


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def _steps(folder):
    """The ledger's steps by number; of one that was run twice both must say the same."""
    steps = {}
    for line in (folder / "ledger.jsonl").read_bytes().splitlines():
        entry = from_line(line)
        if "event" not in entry:
            del entry["seconds"]
            assert steps.setdefault(entry["step"], entry) == entry
    return steps


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_nothing_of_its_state_is_lost(worlds, tmp_path, name):
    reference = worlds(2).run(train, name, tmp_path / "run")
    assert reference[0] == reference[1]
    steps = (3, 6, 9) if name.startswith("user's") else (1, 3, 7)  # a DataLoader has checkpoints between epochs alone
    for step, world_size in zip(steps, (1, 3, 1), strict=True):
        resumed = worlds(world_size).run(train, name, None, checkpoint(tmp_path / "run", step))
        assert resumed == [reference[0]] * world_size


@pytest.mark.parametrize(("before", "after", "step"), [(3, 2, 5), pytest.param(2, 3, 9, marks=pytest.mark.slow)])
def test_real_processes_resume_in_the_run_s_own_folder(worlds, tmp_path, before, after, step):
    """The ledger then holds some steps twice, and says the same of them."""
    reference = worlds(before).run(train, "plain", tmp_path / "run")[0]
    whole = _steps(tmp_path / "run")
    resumed = worlds(after).run(train, "plain", tmp_path / "run", checkpoint(tmp_path / "run", step))
    assert resumed == [reference] * after
    lines = [from_line(line) for line in (tmp_path / "run" / "ledger.jsonl").read_bytes().splitlines()]
    twice = [line["step"] for line in lines if "event" not in line]
    assert twice == [*range(1, STEPS + 1), *range(step + 1, STEPS + 1)]
    world_sizes = {line.pop("world_size") for line in lines if "event" not in line}
    assert world_sizes == {before, after}
    for line in lines:
        if "event" not in line:
            del line["seconds"]
            assert line == {k: v for k, v in whole[line["step"]].items() if k != "world_size"}
    (event,) = (line for line in lines if line.get("event") == "resume")
    assert (event["from"], event["step"], event["world_size"]) == (f"step-{step:08d}", step, after)


OWN = "user's, own generator"
BEGINS = "a DataLoader of your own begins at an epoch's start: a resumed run goes on from step"


@pytest.mark.parametrize("how", ["max_steps", "a request"])
def test_a_run_that_ends_inside_an_epoch_of_a_data_loader_says_so_and_goes_on_from_its_start(tmp_path, capsys, how):
    def stopped(communicator):
        stop = SimpleNamespace(on_step_end=lambda t, _: t.stop() if t.step.num_steps == 7 else None)
        more = {"fit": {"max_steps": 8}} if how == "max_steps" else {"trainer": {"hooks": [stop]}}
        return train(communicator, OWN, tmp_path / "run", **more)

    reference = alone(train, OWN)
    alone(stopped)
    said = capsys.readouterr().out
    assert f"it ended inside epoch 3, and {BEGINS} 6, with run.loader from anywhere" in said
    assert [step.name for step in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))][-1] == "step-00000006"
    more = {"fit": {"allow_contract_change": True}} if how == "a request" else {}  # a hook less
    assert alone(train, OWN, tmp_path / "run", "auto", **more) == reference
    assert BEGINS not in capsys.readouterr().out


def test_twin_generators_of_a_loader_that_are_lost_are_noticed(tmp_path, monkeypatch):
    reference = alone(train, OWN, tmp_path / "run")
    monkeypatch.setattr(progress, "restore_loader", nothing)
    assert alone(train, OWN, None, checkpoint(tmp_path / "run", 6))[0] != reference[0]


def test_checkpoints_that_are_due_inside_an_epoch_of_a_data_loader_are_written_at_its_end(tmp_path):
    alone(train, OWN, tmp_path / "run", trainer={"checkpoint_steps": 4})
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names == ["step-00000006", "step-00000009", "step-00000012"]  # of 4, 8 and 12


def test_a_run_folder_takes_one_call_of_fit_and_no_workers_that_live_on(tmp_path):
    run, model = Run(BATCH, 4, 3), plain()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Noisy(), BATCH, num_workers=1, persistent_workers=True)
    with Trainer(run, model, optimizer, classification, run_dir=tmp_path / "run") as trainer:
        with pytest.raises(UsageError, match=r"persistent_workers=True and a run folder: .* use run\.loader"):
            trainer.fit(loader, 1)
        trainer.fit(points(), 1)
        with pytest.raises(UsageError, match=r"takes one call: give that one all epochs, .* a new Trainer's fit"):
            trainer.fit(points(), 1)


def test_a_call_that_ends_inside_an_epoch_of_a_data_loader_is_followed_by_one_that_begins_it_again(capsys):
    run, model = Run(BATCH, 4, 3), plain()
    with Trainer(run, model, torch.optim.SGD(model.parameters(), 0.1), classification) as trainer:
        trainer.fit(DataLoader(Noisy(), BATCH), max_steps=2)
        trainer.fit(DataLoader(Noisy(), BATCH), 1)
    assert (trainer.step.num_steps, [record.epoch for record in trainer.history]) == (5, [1])
    said = (
        "training ended after 2 batches of epoch 1; a DataLoader of your own begins it again, run.loader goes on there"
    )
    assert said in capsys.readouterr().err


def test_a_run_that_has_ended_goes_on_with_more_epochs(tmp_path):
    whole = alone(train, "plain", None, epochs=EPOCHS + 2)
    alone(train, "plain", tmp_path / "run")
    assert alone(train, "plain", tmp_path / "run", "auto", epochs=EPOCHS + 2)[:3] == whole[:3]
    events = [from_line(line) for line in (tmp_path / "run" / "ledger.jsonl").read_bytes().splitlines()]
    names = [line["event"] for line in events if line.get("event") not in (None, "checkpoint")]
    assert names == ["start", "end", "resume", "end"]


def test_one_that_has_ended_and_is_resumed_with_the_same_epochs_changes_nothing(tmp_path):
    first = alone(train, "plain", tmp_path / "run")
    assert alone(train, "plain", tmp_path / "run", tmp_path / "run")[:3] == first[:3]
    assert len(_steps(tmp_path / "run")) == STEPS


def test_auto_begins_anew_where_no_checkpoint_was_written(tmp_path):
    def dies(communicator):
        def explode(model, batch):
            raise FloatingPointError

        with pytest.raises(FloatingPointError):
            train(communicator, "plain", tmp_path / "run", loss=explode)

    alone(dies)
    advice = r"none was written before the run ended; begin it anew by run_dir=.*run.*\(--run-dir .*run --resume auto\)"
    with pytest.raises(UsageError, match=advice):
        alone(train, "plain", tmp_path / "run", tmp_path / "run")
    before = json.loads((tmp_path / "run" / "run.json").read_text())
    reference = alone(train, "plain")
    assert alone(train, "plain", tmp_path / "run", "auto")[:3] == reference[:3]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["loss_code"] != before["loss_code"]


def test_the_newest_good_checkpoint_is_taken_and_what_was_skipped_is_said(tmp_path, capsys):
    reference = alone(train, "plain", tmp_path / "run")
    for step, name in ((12, "model.safetensors"), (11, "state.json")):
        path = checkpoint(tmp_path / "run", step) / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    capsys.readouterr()
    assert alone(train, "plain", None, tmp_path / "run")[:3] == reference[:3]
    said = capsys.readouterr().out
    assert "resumed from step-00000010" in said
    assert said.count("is no good checkpoint") == 2


def _flip(data):
    at = data.index(b'"loss": "0x1.') + len(b'"loss": "0x1.')
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


LOST = {
    "empty": (lambda data: b"", "missing steps: 12 of 12 (step 1 first)"),
    "gone": (None, "is gone, with its lines of 12 steps"),
    "cut": (lambda data: b"".join(data.splitlines(True)[:6]), "missing steps: "),
    "a hole": (
        lambda data: b"".join(n for n in data.splitlines(True) if b'"step": 3,' not in n),
        "missing steps: 1 of 12 (step 3 first)",
    ),
    "a flipped bit": (_flip, "missing steps: 1 of 12 (step 1 first), damaged lines: 1 (line 2 first)"),
    "whole": (lambda data: data, None),
}


@pytest.mark.parametrize("name", LOST)
def test_a_resume_says_in_a_line_what_its_ledger_lacks_and_goes_on(tmp_path, capsys, name):
    change, sentence = LOST[name]
    reference = alone(train, "plain", tmp_path / "run")
    path = tmp_path / "run" / "ledger.jsonl"
    data = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(data))
    capsys.readouterr()
    assert alone(train, "plain", tmp_path / "run", tmp_path / "run")[:3] == reference[:3]
    lines = [line for line in capsys.readouterr().out.splitlines() if "ledger.jsonl" in line]
    assert len(lines) == (sentence is not None)
    assert all(sentence in line and "the run goes on" in line for line in lines)


def test_a_ledger_that_begins_with_a_resume_lacks_nothing_of_what_was_before(tmp_path, capsys):
    alone(train, "plain", tmp_path / "run")
    alone(train, "plain", tmp_path / "other", checkpoint(tmp_path / "run", 5))
    capsys.readouterr()
    alone(train, "plain", tmp_path / "other", tmp_path / "other")
    assert "ledger.jsonl" not in capsys.readouterr().out


def nothing(*args):
    return None


def test_twin_modes_that_are_lost_are_noticed(tmp_path, monkeypatch):
    def forget_modes(progress, resumed, restore=progress.Progress.restore):
        restore(progress, resumed)
        progress._waiting["evaluating"] = []

    reference = alone(train, "evaluation mode in parts", tmp_path / "run")
    monkeypatch.setattr(progress.Progress, "restore", forget_modes)
    assert alone(train, "evaluation mode in parts", None, checkpoint(tmp_path / "run", 7)) != reference


def test_a_checkpoint_of_a_data_loader_is_not_taken_up_by_a_dataset(tmp_path):
    from samestep.errors import CheckpointError, ContractError

    alone(train, "user's, shuffled", tmp_path / "run")
    place = checkpoint(tmp_path / "run", 3)
    with pytest.raises(ContractError, match="data_loader"):
        alone(train, "plain", None, place)
    with pytest.raises(CheckpointError, match="give fit that again"):
        alone(train, "plain", None, place, fit={"allow_contract_change": True})


def test_a_loader_that_is_not_ours_may_be_another_object():
    """Two loaders over the same data are the same to the contract."""
    from samestep.checkpoint.contract import loader_contract

    first, second = (DataLoader(Noisy(), batch_size=10, shuffle=True) for _ in range(2))
    assert loader_contract(first) == loader_contract(second)
    assert loader_contract(first) != loader_contract(DataLoader(Noisy(), batch_size=5, shuffle=True))
    assert plain()[0].weight.shape == (8, 2)


class Extra(nn.Module):
    """A model with an extra state, which its forward uses."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(2, 8), nn.Linear(8, 3), [1.0, torch.ones(2)]

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale[0] * self.scale[1].sum()


def grow(trainer, result):
    trainer.model.scale = [trainer.model.scale[0] * 1.1, trainer.model.scale[1] + 0.1]


def set_options(trainer, result):
    trainer.step.optimizers[0].param_groups[0].update(lr=0.2 / trainer.step.num_steps, momentum=0.5)


# What is frozen, and buffers that are not persistent, are changed by hooks of tests/simulation.
KEPT = {"extra state": grow, "options of a parameter group": set_options}


def changing(communicator, kind, folder, resume=None, stop=None):
    run = Run(10, 4, 5, communicator=communicator)
    model = Extra()
    stopping = SimpleNamespace(on_step_end=lambda t, _: t.stop() if t.step.num_steps == stop else None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    hooks = [SimpleNamespace(on_step_end=KEPT[kind]), stopping]
    with Trainer(run, model, optimizer, classification, run_dir=folder, hooks=hooks, digest_every=1) as trainer:
        trainer.fit(points(), 4, resume=resume)
        return trainer.digest, model.scale[0]


@pytest.mark.parametrize("kind", KEPT)
def test_what_hooks_change_in_model_and_optimizer_is_kept(kind, tmp_path):
    reference = alone(changing, kind, tmp_path / "whole")
    for stop in (1, 4, 7):
        folder = tmp_path / str(stop)
        in_turns(2, changing, kind, folder, None, stop)
        assert in_turns(3, changing, kind, folder, "auto") == [reference] * 3


def test_twin_extra_state_that_is_not_restored_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "_restore_extras", nothing)
    alone(changing, "extra state", tmp_path / "cut", None, 7)
    assert alone(changing, "extra state", tmp_path / "cut", "auto") != alone(
        changing, "extra state", tmp_path / "whole"
    )


def test_flags_that_the_program_sets_otherwise_now_are_the_programs(tmp_path):
    def program(communicator, frozen, resume=None):
        model = plain()
        model[0].requires_grad_(not frozen)
        run = Run(10, 4, 5, communicator=communicator)
        with Trainer(
            run, model, torch.optim.SGD(model.parameters(), 0.1), classification, run_dir=tmp_path / "run"
        ) as trainer:
            trainer.fit(points(), 1 if resume is None else 2, resume=resume)
        return [parameter.requires_grad for parameter in model[0].parameters()]

    assert alone(program, False) == [True, True]
    assert alone(program, True, "auto") == [False, False]


def test_extra_state_of_another_kind_is_refused_with_its_place(tmp_path):
    class Sets(Extra):
        def get_extra_state(self):
            return {"seen": {1, 2}}

    model = nn.Sequential(Sets())
    run = Run(10, 4, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Trainer(run, model, optimizer, classification, run_dir=tmp_path / "run", digest_every=1)
    with trainer, pytest.raises(UsageError, match=r"a set at extra state 0\.seen, which a checkpoint cannot hold"):
        trainer.fit(points(), 1)
