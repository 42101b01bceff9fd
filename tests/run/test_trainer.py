"""The trainer: records, run folder, loggers, and the same bits on every number of devices."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from statistics import mean, median
from types import SimpleNamespace

import pytest
import torch
from programs import LR, RECIPES, make_optimizer, recipe_data, recipe_model
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from train_programs import METRICS, Notes, classification, classifier, fit, make_trainer, points
from worlds import alone, in_turns

from samestep import files
from samestep.checkpoint.digest import state_digest
from samestep.checkpoint.storage import newest_checkpoint
from samestep.engine.result import StepResult
from samestep.errors import CheckpointError, NonFiniteError, RunFolderError, SamestepError, UsageError
from samestep.metrics import accuracy
from samestep.run.run import Run
from samestep.run.trainer import EpochRecord, Trainer
from samestep.runs.ledger import from_line, read_ledger


def test_two_fits_go_on_where_one_would():
    whole = alone(fit, (3,))
    assert alone(fit, (1, 2)) == whole
    assert alone(fit, (1, 1, 1)) == whole


@pytest.mark.parametrize("calls", [(4,), (1, 1, 1, 1)])
def test_the_loader_that_is_trained_on_may_be_evaluated_on_too(calls):
    def program(communicator, is_same):
        with make_trainer(communicator) as trainer:
            loader = trainer.run.loader(Rows(), shuffle=True)
            for number in calls:
                options = {"eval_data": loader, "metrics": METRICS, "eval_every": 2} if is_same else {}
                trainer.fit(loader, number, **options)
            return trainer.digest, [record.eval for record in trainer.history]

    first, second = in_turns(2, program, True)
    assert first == second
    assert first[0] == alone(program, False)[0]
    measured = [scores for scores in first[1] if scores]
    assert len(measured) == 2
    assert measured[0] != measured[1]


def test_twin_a_second_fit_that_begins_at_the_first_epoch_again_is_noticed(monkeypatch):
    from samestep.data.loader import Loader

    whole = alone(fit, (2,))
    monkeypatch.setattr(Loader, "load_state_dict", lambda self, state: None)
    assert alone(fit, (1, 1)) != whole


class Frozen(nn.Sequential):
    """Keeps its normalisation in evaluation mode by its own `train`, which nobody but a trainer calls."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


MODES = {  # the model, its parts in evaluation mode before `fit`, or by a hook, and those in which steps then find it
    "training mode": (nn.Sequential, [], [], []),
    "a part": (nn.Sequential, ["1"], [], ["1"]),
    "the model itself, but not its parts": (nn.Sequential, [""], [], [""]),
    "a part, by a hook": (nn.Sequential, [], ["1"], ["1"]),
    "one by the script, one by a hook": (nn.Sequential, ["3"], ["1"], ["1", "3"]),
    "as a whole, as from_pretrained leaves it": (nn.Sequential, ["", "0", "1", "2", "3", "4"], [], []),
    "as a whole, with a train of its own": (Frozen, ["", "0", "1", "2", "3", "4"], [], ["1"]),
    "a part by train of its own, which was not called before": (Frozen, [], [], ["1"]),
}


@pytest.mark.parametrize("name", MODES)
def test_parts_in_evaluation_mode_stay_so_as_in_a_loop_of_ones_own(name, capsys):
    kind, before, hooked, expected = MODES[name]

    def put(model, names):
        for part in names:
            model.get_submodule(part).training = False

    class ByHook:
        def on_epoch_start(self, trainer, epoch):
            put(trainer.model, hooked if epoch == 1 else [])

    def program(communicator, by_trainer):
        run = Run(16, 4, 2, communicator=communicator)
        model, seen = kind(*classifier()), set()
        put(model, before)
        model.register_forward_pre_hook(
            lambda *_: seen.add(tuple(n for n, part in model.named_modules() if not part.training))
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if by_trainer:
            with Trainer(run, model, optimizer, classification, hooks=[ByHook()]) as trainer:
                trainer.fit(points(), 1)
                trainer.fit(points(), max_steps=6)
                trainer.fit(points(), 1)  # it begins within an epoch
        else:
            for module in model.modules():
                module.training = True
            put(model, expected)
            step, loader = run.train_step(model, optimizer, classification), run.loader(points(), shuffle=True)
            for _ in range(2):
                for batch in loader:
                    step(batch)
        return state_digest(model, optimizer), seen

    digest, _ = alone(program, False)
    for result in in_turns(2, program, True):
        assert result == (digest, {tuple(expected)})
    told = capsys.readouterr().out
    assert ("as a whole" in told) == (len(before) == 6)
    assert (f"{len(expected)} of 6 modules" in told) == (bool(expected) and kind is nn.Sequential)


def test_records_hold_what_came_of_each_epoch():
    def program(communicator):
        with make_trainer(communicator) as trainer:
            history = trainer.fit(points(), 2, eval_data=points(23, 5), metrics=METRICS)
            assert history is trainer.history
            assert trainer.evaluate(points(23, 5), METRICS) == history[-1].eval
            assert trainer.predict(points(23, 5)).shape == (23, 3)
            return history

    history = alone(program)
    assert [record.epoch for record in history] == [1, 2]
    for record in history:
        assert isinstance(record, EpochRecord)
        assert record.seconds > 0
        assert record.samples_per_second == pytest.approx(61 / record.seconds)
        assert set(record.eval) == set(METRICS)
        assert json.loads(json.dumps(record.as_json())) == record.as_json()
    assert history[1].train_loss < history[0].train_loss


def test_the_line_of_an_epoch_says_if_every_step_was_skipped():
    line = EpochRecord(1, 1.0, 8.0, float("nan"), {}).describe([])
    assert "train loss nan (every step was skipped: loss or gradient was not finite)," in line
    assert "skipped" not in EpochRecord(1, 1.0, 8.0, 0.5, {}).describe([])


def test_the_loss_of_an_epoch_is_the_mean_over_its_samples_not_over_its_steps():
    def program(communicator):
        run = Run(16, 4, communicator=communicator)
        model = torch.nn.Linear(2, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = Trainer(run, model, optimizer, classification)
        (record,) = trainer.fit(points(), 1)
        return record.train_loss, classification(model.cpu(), points()).item()

    ours, plain = alone(program)
    assert ours == pytest.approx(plain, rel=1e-6)  # the same float32 terms in another order


class Rows(Dataset):
    """A map-style dataset."""

    def __len__(self):
        return 61

    def __getitem__(self, index):
        return tuple(tensor[index] for tensor in points())


class Stream(IterableDataset):
    """The samples one after another."""

    def __iter__(self):
        yield from zip(*points(), strict=True)


class CountedStream(Stream):
    """A stream that knows its length."""

    def __len__(self):
        return 61


def fit_data(communicator, kind):
    """Fits on data of some kind; the digest and the samples a second epoch saw."""
    with make_trainer(communicator) as trainer:
        data = {
            "tensors": points,
            "tensor dataset": lambda: TensorDataset(*points()),
            "map": Rows,
            "stream": Stream,
            "stream with a length": CountedStream,
            "loader": lambda: trainer.run.loader(points(), shuffle=False),
            "data loader": lambda: DataLoader(TensorDataset(*points()), batch_size=16),
            "data loader of a stream": lambda: DataLoader(Stream(), batch_size=16),
        }[kind]()
        trainer.fit(data, 2, shuffle=kind.startswith("stream"))  # the default, which is not for streams
        return trainer.digest


KINDS = ["tensor dataset", "map", "stream", "stream with a length", "loader", "data loader", "data loader of a stream"]


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_data_train_alike(kind):
    assert alone(fit_data, kind) == alone(fit_data, "tensors")


def test_loggers_get_every_step_and_every_epoch_on_the_first_rank_only():
    def program(communicator):
        notes = Notes()
        with make_trainer(communicator, loggers=[notes]) as trainer:
            trainer.fit(points(), 2, eval_data=points(23, 5), metrics={"accuracy": accuracy})
            history = list(trainer.history)
        trainer.close()
        return notes.lines, notes.num_closed, history

    (lines, num_closed, history), other = in_turns(2, program)
    assert other[:2] == ([], 0)
    assert num_closed == 1
    steps = [line for line in lines if "loss/train" in line[1]]
    assert [step for step, _ in steps] == list(range(1, 9))
    assert all(set(scalars) == {"loss/train", "grad_norm", "lr"} for _, scalars in steps)
    epochs = [line for line in lines if "epoch" in line[1]]
    assert [step for step, _ in epochs] == [4, 8]
    for record, (_, scalars) in zip(history, epochs, strict=True):
        assert scalars["accuracy/eval"] == record.eval["accuracy"]
        assert scalars["loss/train_epoch"] == record.train_loss
        assert scalars["epoch"] == record.epoch


def test_every_logger_and_the_ledger_are_closed_though_one_logger_fails_to(tmp_path):
    class Failing(Notes):
        def close(self):
            raise OSError("gone")

    def program(communicator):
        first, last = Notes(), Notes()
        trainer = make_trainer(communicator, run_dir=tmp_path / "run", loggers=[first, Failing(), last])
        trainer.fit(points(), 1)
        with pytest.raises(OSError, match="gone"):
            trainer.close()
        return first.num_closed, last.num_closed

    assert alone(program) == (1, 1)


WAITED = "checkpoint/blocked_milliseconds"


def steps_of(folder):
    """The ledger's lines of steps, without those of events."""
    lines = [from_line(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()]
    return [line for line in lines if "event" not in line]


def test_a_step_and_a_checkpoint_have_one_number_wherever_they_are_recorded(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = []
    hook = SimpleNamespace(on_step_end=lambda trainer, result: seen.append((result.step, trainer.step.num_steps)))

    def program(communicator):
        options = {"run_dir": tmp_path, "checkpoint_steps": 2, "best": "accuracy", "hooks": [hook]}
        with make_trainer(communicator, **options) as trainer:
            trainer.fit(points(), 2, eval_data=points(23, 5), metrics=METRICS)

    alone(program)
    steps = [*range(1, 9)]
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    entries = read_ledger(tmp_path)
    assert seen == [(step, step) for step in steps]
    assert [*entries.steps] == steps
    assert [line["step"] for line in metrics if "loss/train" in line] == steps
    assert [
        event.step for event in EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss/train")
    ] == steps
    checkpoints = [event for event in entries.events if event["event"] == "checkpoint"]
    assert {event["step"] for event in checkpoints} == {2, 4, 6, 8}
    assert all(event["name"] == f"step-{event['step']:08d}" for event in checkpoints)
    waits = [(line["step"], line[WAITED]) for line in metrics if WAITED in line]
    assert [(event["step"], 1000 * event["blocked_seconds"]) for event in checkpoints] == [
        (step, pytest.approx(wait, abs=1e-3)) for step, wait in waits
    ]


def test_the_run_folder_holds_the_whole_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def program(communicator):
        options = {"max_grad_norm": 1.0, "precision": "bf16-mixed", "contract": {"recipe": "points"}}
        with make_trainer(communicator, run_dir=tmp_path / "run", **options) as trainer:
            trainer.fit(points(), 2, eval_data=points(23, 5), metrics=METRICS)
        return trainer.model.state_dict(), trainer.history

    (weights, history), _ = in_turns(2, program)
    folder = tmp_path / "run"
    names = ["ledger.jsonl", "loss.png", "metrics.jsonl", "run.json", "tensorboard", "weights.safetensors"]
    assert sorted(os.listdir(folder)) == ["checkpoints", *names]
    contract = json.loads((folder / "run.json").read_text())
    assert (contract["recipe"], contract["precision"], contract["num_microbatches"]) == ("points", "bf16-mixed", 4)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    saved = load_file(folder / "weights.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], value) for name, value in weights.items())
    ledger = steps_of(folder)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss/train"] for line in metrics if "loss/train" in line]
    assert losses == [float.fromhex(line["loss"]) for line in ledger]
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    shown = events.Scalars("loss/train")
    assert [event.value for event in shown] == pytest.approx(losses, rel=1e-6)  # TensorBoard keeps float32
    shown = events.Scalars("accuracy/eval")
    assert [event.step for event in shown] == [4, 8]
    assert [event.value for event in shown] == pytest.approx([r.eval["accuracy"] for r in history], rel=1e-6)


def fit_in(communicator, folder, resume=None):
    """Fits for an epoch, with a run folder."""
    with make_trainer(communicator, run_dir=folder) as trainer:
        trainer.fit(points(), 1, resume=resume)


def test_a_folder_that_holds_a_run_is_refused_before_anything_starts(tmp_path):
    alone(fit_in, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(
        UsageError,
        match=r"already holds a run; go on with it by resume='auto' \(--resume auto\), choose another folder",
    ):
        alone(fit_in, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone(fit)
    assert os.listdir(tmp_path) == []


def test_lines_are_shown_on_the_first_rank_only(capsys):
    def program(communicator):
        with make_trainer(communicator) as trainer:
            trainer.say("hello")
            trainer.fit(points(), 2, eval_data=points(23, 5), metrics=METRICS)

    in_turns(3, program)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hello"
    assert [line.split(",")[0] for line in lines[1:]] == ["epoch 1", "epoch 2"]
    for line in lines[1:]:
        assert ", train loss " in line
        assert ", test margin " in line
        assert line.endswith(" samples/s")


NO_LOGGER = "as a logger; needed: an object with log(step, scalars) and close()"


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"epochs": 0}, "got epochs=0; it must be 1 or more (--epochs)"),
        ({}, {"eval_data": points(5)}, "eval_data needs metrics"),
        ({}, {"metrics": METRICS}, "metrics needs eval_data"),
        ({}, {"forward": print}, "forward needs eval_data"),
        ({}, {"num_workers": -1}, "got num_workers=-1"),
        (
            {},
            {"dataset": DataLoader(TensorDataset(*points()), batch_size=8)},
            "got a DataLoader with batch_size=8 and a run with global_batch_size=16; its batches are the global",
        ),
        *(({"loggers": [logger]}, {}, NO_LOGGER) for logger in (print, dict, object())),
    ],
)
def test_arguments_that_cannot_be_are_named(options, arguments, message):
    def program(communicator):
        with pytest.raises(UsageError) as caught, make_trainer(communicator, **options) as trainer:
            trainer.fit(**{"dataset": points(), "epochs": 1, **arguments})
        return str(caught.value)

    assert message in alone(program)


def test_an_option_that_needs_a_run_folder_says_so_where_there_is_none(tmp_path, capsys):
    for folder in (None, tmp_path / "run"):
        alone(
            lambda communicator, folder=folder: make_trainer(communicator, run_dir=folder, checkpoint_steps=2).close()
        )
        said = "checkpoint_steps has no effect without a run folder; name one by run_dir=…" in capsys.readouterr().err
        assert said == (folder is None)


def test_a_later_call_of_fit_that_is_to_go_on_from_elsewhere_is_refused(tmp_path):
    alone(fit_in, tmp_path / "run")

    def program(communicator):
        with make_trainer(communicator) as trainer:
            trainer.fit(points(), 1, resume=tmp_path / "run")
            trainer.fit(points(), 1, resume=tmp_path / "run")
            with pytest.raises(UsageError, match=r"got resume='elsewhere' in a later call of fit"):
                trainer.fit(points(), 1, resume="elsewhere")

    alone(program)


def test_a_checkpoint_of_a_loop_of_ones_own_is_refused_by_the_way_to_go_on_from_it(tmp_path):
    def program(communicator):
        with make_trainer(communicator) as trainer:
            path = trainer.run.save_checkpoint(tmp_path, trainer.step)
            with pytest.raises(
                CheckpointError, match=r"step-00000000 is one of run.save_checkpoint: use run.load_chec"
            ):
                trainer.fit(points(), 1, resume=path, allow_contract_change=True)

    alone(program)


def test_a_scheduler_of_another_optimizer_is_refused():
    def program(communicator):
        with make_trainer(communicator) as trainer:
            other = torch.optim.SGD(trainer.model.parameters(), 0.1)
            schedule = torch.optim.lr_scheduler.StepLR(other, 1)
            with pytest.raises(UsageError, match="the StepLR is of another optimizer; make it"):
                trainer.run.train_step(trainer.model, trainer.step.optimizers, classification, scheduler=schedule)
            trainer.run.train_step(trainer.model, other, classification, scheduler=schedule)

    alone(program)


def test_a_run_that_is_complete_says_so_when_it_is_resumed(tmp_path, capsys):
    alone(fit_in, tmp_path)
    capsys.readouterr()
    alone(fit_in, tmp_path, "auto")
    assert "nothing to train: 1 epoch and 4 steps are done; more by epochs or max_steps" in capsys.readouterr().out


def test_trainer_step_and_loader_say_what_they_are():
    def program(communicator):
        with make_trainer(communicator) as trainer:
            trainer.fit(points(), 2)
            return repr(trainer), repr(trainer.step), repr(trainer.run.loader(points(), shuffle=True))

    trainer, step, loader = alone(program)
    assert trainer.startswith("<samestep.Trainer: 2 epochs, 8 steps; ")
    assert step.startswith("<samestep.TrainStep: ")
    assert step.endswith(", replicate; step 8>")
    assert loader == "<samestep.Loader: 61 samples in batches of 16, shuffled; at epoch 0, position 0>"


def test_a_loader_without_a_batch_is_named():
    def program(communicator):
        with make_trainer(communicator) as trainer:
            trainer.fit(trainer.run.loader(points(10), drop_last=True), 1)

    with pytest.raises(UsageError, match="the loader gave no batch"):
        alone(program)


def explode_in_the_second_epoch(model, batch):
    loss = classification(model, batch)
    return loss * float("nan") if model.calls in range(5 * 4, 6 * 4) else loss


@pytest.mark.parametrize("late", [False, True])
def test_a_run_that_explodes_says_so_keeps_what_it_has_and_can_go_on(monkeypatch, late):
    if late:
        monkeypatch.setattr(StepResult, "is_there", property(lambda self: False))

    def program(communicator):
        run = Run(16, 4, communicator=communicator)
        model = classifier()
        model.calls = -1
        model.register_forward_pre_hook(lambda module, _: setattr(module, "calls", module.calls + 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        with Trainer(run, model, optimizer, explode_in_the_second_epoch, late_check=late) as trainer:
            with pytest.raises(NonFiniteError, match="step 6: not finite: the loss of microbatch 0"):
                trainer.fit(points(), 3)
            assert [record.epoch for record in trainer.history] == [1]
            assert trainer.step.num_steps == 5
            trainer.fit(points(), 1)
            assert [record.epoch for record in trainer.history] == [1, 2]
            assert trainer.step.num_steps == 9
            assert all(math.isfinite(record.train_loss) for record in trainer.history)
        return trainer.digest

    alone(program)


def test_ranks_end_in_the_same_step_whichever_of_them_has_read_a_late_failure(tmp_path, monkeypatch):
    here = threading.local()  # ranks that take turns are threads
    monkeypatch.setattr(StepResult, "is_there", property(lambda self: here.rank == 0))

    def fails_once(model, batch):
        is_bad = (batch[0][:, 0] == points()[0][20, 0]).any()
        return classification(model, batch) * torch.where(is_bad, float("nan"), 1.0)

    def program(communicator):
        here.rank, calls = communicator.rank, []
        run = Run(4, 4, communicator=communicator)
        model = classifier()
        model.register_forward_pre_hook(lambda module, _: calls.append(trainer.step.num_steps))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        options = {"run_dir": tmp_path / "run", "late_check": True, "checkpoint_steps": 3}
        with Trainer(run, model.eval(), optimizer, fails_once, **options) as trainer:
            model.train = lambda mode=True: model  # microbatches of one sample
            with pytest.raises(NonFiniteError) as caught:
                trainer.fit(points(), 1)
        return calls[-1], trainer.step.num_steps, str(caught.value)

    first, second = in_turns(2, program)
    assert first == second
    assert first[0] > first[1]


def test_skipped_steps_are_in_the_ledger_but_not_in_the_loss_of_the_epoch(tmp_path):
    def sometimes(model, batch):
        return classification(model, batch) * torch.where(
            (batch[0][:, 0] == points()[0][3, 0]).any(), float("nan"), 1.0
        )

    def program(communicator):
        run = Run(16, 4, communicator=communicator)
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Trainer(run, model, optimizer, sometimes, run_dir=tmp_path / "run", on_nonfinite="skip") as trainer:
            return trainer.fit(points(), 1)[0].train_loss

    assert math.isfinite(alone(program))
    ledger = steps_of(tmp_path / "run")
    assert [line["skipped"] for line in ledger].count(True) == 1
    assert [line["loss"] for line in ledger].count("nan") == 1


@pytest.fixture
def tiny_disk(tmp_path):
    """A folder on a file system of 64 KiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if mount is None or os.name != "posix" or subprocess.run(command, capture_output=True, timeout=30).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)  # an error may still hold a file open


@pytest.mark.parametrize("free_bytes", [0, 12288])
def test_a_full_disk_is_a_sentence_with_nothing_half_written(tiny_disk, free_bytes):
    (tiny_disk / "ballast").write_bytes(bytes(64 * 1024 - 4096 - free_bytes))
    with (tiny_disk / "rest").open("wb", buffering=0) as file:
        while free_bytes == 0:
            try:
                file.write(bytes(4096))
            except OSError:
                break

    def program(communicator):
        with make_trainer(communicator, run_dir=tiny_disk / "run") as trainer:
            trainer.fit(points(), 200)

    with pytest.raises(RunFolderError) as caught:
        alone(program)
    text = str(caught.value)
    assert text.startswith(f"cannot write {tiny_disk / 'run'}")
    assert "No space left on device" in text
    assert text.endswith("choose another folder by run_dir (--run-dir)")
    assert "\n" not in text
    assert isinstance(caught.value, SamestepError)
    for path in (tiny_disk / "run").rglob("*"):
        assert not path.name.startswith("."), "a temporary file was left"
        if path.suffix == ".jsonl" and path.stat().st_size:
            assert path.read_bytes().endswith(b"}\n")
            assert [json.loads(line) for line in path.read_text().splitlines()]
        if path.suffix == ".json":
            assert json.loads(path.read_text())


def score(name, metric, data, seed):
    """What a recipe's model scores on its test data after the recipe's own epochs."""
    train, test, _ = recipe_data(name, str(data), seed)
    run = Run(128, 4 if name == "mlp" else 8, seed)
    model = recipe_model(name, train)
    optimizer = make_optimizer(model, "adam" if name == "mlp" else "sgd", LR[name], 0.9)
    with Trainer(run, model, optimizer, RECIPES[name].loss_fn) as trainer:
        history = trainer.fit(train, 100 if name == "mlp" else 10, eval_data=test, metrics=RECIPES[name].METRICS)
    return history[-1].eval[metric]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # three trainings of minutes each
def test_lenet_learns_real_digits(shared_data):
    """The project's own bar: 97 % of the last 2,000 of 10,000 digits, mean of three seeds, ten epochs."""
    folder = shared_data / "mnist"
    scores = [score("lenet", "accuracy", folder, seed) for seed in range(3)]
    assert mean(scores) >= 0.97, scores


def test_mlp_learns_the_prices_of_houses(shared_data):
    """The project's own bar: a median error under 4.5 thousand dollars over five seeds, a hundred epochs."""
    table = shared_data / "boston" / "boston_housing.csv"
    scores = [score("mlp", "rmse", table, seed) for seed in range(5)]
    assert median(scores) < 4.5, scores


KILLED = """
import os, pathlib, signal, sys
from samestep.files import replacing, staging
run_file = pathlib.Path(sys.argv[1])
with replacing(run_file) as temporary, staging(run_file.parent / "checkpoints") as folder:
    temporary.write_text("half of it")
    (folder / "step-00000001").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_killed_processes_left_is_removed_when_a_run_is_resumed_even_if_nothing_is_left_to_do(tmp_path):
    def program(communicator, resume):
        with make_trainer(communicator, run_dir=tmp_path) as trainer:
            trainer.fit(points(), 1, resume=resume)

    def names():
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if "tfevents" not in path.name)

    alone(program, None)
    whole = names()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run.json")])
    assert killed.returncode == -signal.SIGKILL
    assert len(names()) == len(whole) + 6
    alone(program, "auto")
    assert names() == whole


def test_a_run_goes_on_though_a_checkpoint_cannot_be_written_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "MAX_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(files, "CHECKPOINT_RETRIES", 1000)
    in_the_way, blocking = tmp_path / "checkpoints", threading.Lock()

    def block(*_):
        if blocking.acquire(blocking=False):
            in_the_way.touch()
            threading.Timer(1.5, in_the_way.unlink).start()

    def program(communicator):
        with make_trainer(communicator, run_dir=tmp_path, checkpoint_steps=2) as trainer:
            trainer.model.register_forward_pre_hook(block)
            trainer.fit(points(), 1)
        return trainer.step.num_steps

    assert newest_checkpoint(in_the_way) is None
    assert alone(program) == newest_checkpoint(in_the_way).snapshot.step
    assert "until then the checkpoint before is the newest: trying again in 0 s" in capsys.readouterr().out
