"""What a run may be resumed with: what is refused, what is told, and what becomes of what is allowed."""

import json

import pytest
import torch
from gpus import needs_fake_gpus
from gpus import run as run_on_gpus
from resume_programs import BATCH, NUM_MICROBATCHES, SEED, classification, plain, points
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler as schedules
from worlds import in_turns

from samestep.checkpoint.contract import code_hash, model_form
from samestep.errors import CheckpointError, ContractError, UsageError
from samestep.run.run import Run
from samestep.run.trainer import Trainer
from samestep.runs.ledger import from_line

STEP = "step-00000004"
ON_GPU = """
    import sys
    import torch
    import samestep

    folder, resume, allow = sys.argv[1], len(sys.argv) > 2, sys.argv[-1] == "allow"
    run = samestep.Run(8, 4, device="cuda")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = lambda model, batch: model(batch).square().mean()
    with samestep.Trainer(run, model, optimizer, loss, run_dir=folder, checkpoint_steps=1) as trainer:
        try:
            data, where = torch.ones(16, 2), "auto" if resume else None
            trainer.fit(data, 2 if resume else 1, resume=where, allow_contract_change=allow)
        except samestep.errors.ContractError as error:
            print(error)
        print(trainer.step.num_steps)
"""


@needs_fake_gpus
def test_another_model_of_gpu_and_another_workspace_of_cublas_are_named_and_may_be_allowed(tmp_path):
    folder, h100 = tmp_path / "run", {"FAKE_CUDA_NAME": "NVIDIA H100 80GB HBM3"}
    run_on_gpus(ON_GPU, folder, devices=1, **h100)
    again = run_on_gpus(ON_GPU, folder, "resume", devices=1, **h100)
    assert again.split()[-1] == "4"
    words = {"FAKE_CUDA_NAME": "NVIDIA A100-SXM4-80GB", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    other = run_on_gpus(ON_GPU, folder, "resume", devices=1, **words)
    assert "gpu.name: NVIDIA H100 80GB HBM3 before, NVIDIA A100-SXM4-80GB now (decides the kernels" in other
    assert "gpu.cublas_workspace: :4096:8 before, :16:8 now (decides" in other
    assert "allow_contract_change=True" in other
    assert run_on_gpus(ON_GPU, folder, "resume", "allow", devices=1, **words).split()[-1] == "4"


class Model(nn.Sequential):
    """A model of a class of its own."""

    def __init__(self, width=8, out=3):
        super().__init__(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, out))


class OtherModel(nn.Sequential):
    """The same parameters, used otherwise."""

    def __init__(self, width=8, out=3):
        super().__init__(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, out))

    def forward(self, x):
        return super().forward(x) * 2


def other_loss(model, batch):
    """Not the same."""
    return 2 * functional.cross_entropy(model(batch[0]), batch[1])


def sgd(model, lr=0.1, **more):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, **more)


def stepped(gamma=0.5):
    return lambda optimizer: schedules.StepLR(optimizer, 3, gamma=gamma)


def fit(communicator, run_dir=None, resume=None, allow=False, epochs=2, **changes):
    """Trains two epochs of three steps with a checkpoint each; the digest and the learning rate at the end."""
    c = {
        "seed": SEED,
        "batch": BATCH,
        "num_microbatches": NUM_MICROBATCHES,
        "model": Model,
        "loss": classification,
        **changes,
    }
    run = Run(c["batch"], c["num_microbatches"], c["seed"], communicator=communicator, num_threads=c.get("threads"))
    model = c["model"]()
    optimizer = c.get("optimizer", sgd)(model)
    scheduler = c["scheduler"](optimizer) if "scheduler" in c else None
    options = {"checkpoint_steps": 1, "checkpoint_minutes": None, "keep": 99, **c.get("options", {})}
    with Trainer(run, model, optimizer, c["loss"], run_dir=run_dir, scheduler=scheduler, **options) as trainer:
        trainer.fit(
            c.get("data", points()), epochs, shuffle=c.get("shuffle", True), resume=resume, allow_contract_change=allow
        )
        return trainer.digest, optimizer.param_groups[0]["lr"]


def alone(*args, **options):
    return in_turns(1, lambda communicator: fit(communicator, *args, **options))[0]


def lines(folder, event=None):
    entries = [from_line(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()]
    return [entry for entry in entries if entry.get("event") == event]


@pytest.fixture
def run_dir(tmp_path):
    """A run that has ended, with a checkpoint of each of its six steps."""
    alone(tmp_path / "run")
    return tmp_path / "run"


def at_step_4(run_dir):
    return run_dir / "checkpoints" / STEP


def test_everything_that_decides_the_bits_is_listed_at_once_field_by_field(run_dir):
    changes = {"seed": 6, "batch": 12, "num_microbatches": 2, "loss": other_loss, "shuffle": False, "data": points(20)}
    options = {"max_grad_norm": 1.0, "precision": "bf16-mixed"}
    with pytest.raises(ContractError) as caught:
        alone(None, run_dir, optimizer=lambda m: sgd(m, 0.2, weight_decay=0.1), options=options, **changes)
    text = str(caught.value)
    for line in (
        "  global_batch_size: 10 before, 12 now (decides which samples make a step)",
        "  num_microbatches: 4 before, 2 now",
        "  seed: 5 before, 6 now (decides the order of the samples",
        "  shuffle: True before, False now",
        "  num_samples: 28 before, 20 now (decides what is trained on)",
        "  loss_code: ",
        "  max_grad_norm: none before, 1.0 now",
        "  precision: 32-true before, bf16-mixed now",
        "  optimizer.lr: 0.1 before, 0.2 now (decides the update)",
        "  optimizer.weight_decay: 0 before, 0.1 now",
    ):
        assert text.count(line) == 1, text
    assert "allow_contract_change=True" in text
    assert "should not" not in text


@pytest.mark.parametrize(
    ("resume", "kind", "sentence"),
    [
        ("nowhere", UsageError, "nowhere holds neither a run nor a checkpoint"),
        ("run/checkpoints/step-00000099", CheckpointError, "there is no such folder"),
        ("auto", UsageError, "without a run folder"),
    ],
)
def test_what_rank_0_does_not_find_is_an_error_on_all_ranks(run_dir, monkeypatch, resume, kind, sentence):
    monkeypatch.chdir(run_dir.parent)
    caught = []

    def program(communicator):
        try:
            fit(communicator, None, resume)
        except kind as error:
            caught.append(str(error))

    in_turns(2, program)
    assert len(caught) == 2
    assert all(sentence in text for text in caught)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: Model(width=9), r"its 0.weight is float32\[8, 2\], the model's float32\[9, 2\]"),
        (lambda: Model().double(), r"its 0.weight is float32\[8, 2\], the model's float64\[8, 2\]"),
        (lambda: nn.Sequential(nn.Linear(2, 3)), "it has also 2.bias, 2.weight"),
        (lambda: nn.Sequential(*Model(), nn.Linear(3, 3)), "it has no 3.weight, 3.bias"),
    ],
    ids=["width", "dtype", "fewer", "more"],
)
def test_a_checkpoint_of_another_model_is_an_error_that_names_the_parameter(run_dir, model, sentence):
    for allow in (False, True):
        with pytest.raises(CheckpointError, match="the checkpoint is of another model: .*" + sentence):
            alone(None, run_dir, allow=allow, model=model, data=_doubled(points(), model))


def _doubled(data, model):
    dtype = next(model().parameters()).dtype
    return data[0].to(dtype), data[1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optimizer": lambda m: torch.optim.Adam(m.parameters())}, "has the state of SGD, which Adam cannot take up"),
        ({"optimizer": lambda m: [sgd(m[0]), sgd(m[2])]}, "the state of 1 optimizers, this program has 2"),
        ({"scheduler": stepped()}, "has the state of no scheduler, and this program has StepLR"),
    ],
    ids=["class", "number", "scheduler"],
)
def test_a_state_that_cannot_be_taken_up_is_an_error_though_changes_are_allowed(run_dir, changes, sentence):
    with pytest.raises(ContractError, match=r"optimizer|scheduler"):
        alone(None, run_dir, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        alone(None, run_dir, allow=True, **changes)


def test_the_code_of_the_model_s_classes_counts(run_dir):
    with pytest.raises(ContractError, match=r"model.class: Model before, OtherModel now[\s\S]*model.code: "):
        alone(None, run_dir, model=OtherModel)


def test_a_change_that_is_allowed_is_carried_out_said_and_written_down(run_dir, tmp_path, capsys):
    _, rate = alone(tmp_path / "new", at_step_4(run_dir), allow=True, optimizer=lambda m: sgd(m, 0.05))
    assert rate == 0.05
    assert "changed since the checkpoint: optimizer.lr: 0.1 -> 0.05" in capsys.readouterr().out
    (event,) = lines(tmp_path / "new", "contract_change")
    assert (event["step"], event["fields"]) == (4, [["optimizer.lr", 0.1, 0.05]])
    assert [line["lr"] for line in lines(tmp_path / "new")] == [[(0.05).hex()]] * 2
    assert json.loads((tmp_path / "new" / "run.json").read_text())["optimizer"]["lr"] == 0.05
    alone(None, tmp_path / "new", optimizer=lambda m: sgd(m, 0.05))  # the new contract is the one to keep now
    with pytest.raises(ContractError, match=r"optimizer.lr: 0.05 before"):
        alone(None, tmp_path / "new", optimizer=sgd)


def test_a_changed_learning_rate_keeps_its_place_in_the_schedule(tmp_path):
    alone(tmp_path / "run", scheduler=stepped())
    place = tmp_path / "run" / "checkpoints" / STEP
    _, rate = alone(None, place, allow=True, scheduler=stepped(), optimizer=lambda m: sgd(m, 0.2))
    assert rate == pytest.approx(0.2 * 0.5**2)
    _, rate = alone(None, place, allow=True, scheduler=stepped(gamma=0.1))
    assert rate == pytest.approx(0.1 * 0.5 * 0.1)


def test_a_change_that_does_not_decide_the_bits_is_told_and_goes_on(run_dir, tmp_path, capsys):
    reference = alone()[0]
    alone(tmp_path / "first", options={"contract": {"processor": "one", "job": {"epochs": 2}, "devices": ["cpu"]}})
    capsys.readouterr()
    more = {"contract": {"processor": "another", "job": {"epochs": 3}, "devices": ["cpu"] * 2}}
    assert alone(tmp_path / "first", tmp_path / "first" / "checkpoints" / STEP, options=more)[0] == reference
    said = capsys.readouterr().out
    assert "changed since the checkpoint: processor: one -> another" in said
    assert "job" not in said
    assert "devices" not in said
    (event,) = lines(tmp_path / "first", "contract_change")
    assert event["fields"] == [["processor", "one", "another"]]


def test_newer_checkpoints_of_the_old_contract_are_not_left_among_those_of_the_new_one(run_dir, tmp_path):
    changed = {"allow": True, "optimizer": lambda m: sgd(m, 0.05)}
    with pytest.raises(
        ContractError, match=r"has checkpoints after step-00000004, up to step-00000006[\s\S]*--run-dir"
    ):
        alone(run_dir, at_step_4(run_dir), **changed)
    assert lines(run_dir, "resume") == []
    alone(tmp_path / "new", at_step_4(run_dir), **changed)
    alone(run_dir, run_dir, epochs=3, **changed)  # from the newest all is well


def test_a_run_goes_on_in_another_folder_and_the_old_one_is_untouched(run_dir, tmp_path):
    before = {path: (path.read_bytes() if path.is_file() else None) for path in run_dir.rglob("*")}
    times = {path: path.stat().st_mtime_ns for path in before}
    reference = alone()[0]
    assert alone(tmp_path / "new", at_step_4(run_dir))[0] == reference
    assert {path: (path.read_bytes() if path.is_file() else None) for path in run_dir.rglob("*")} == before
    assert {path: path.stat().st_mtime_ns for path in before} == times
    assert [line["step"] for line in lines(tmp_path / "new")] == [5, 6]
    assert alone(None, tmp_path / "new")[0] == reference


def test_a_model_has_a_form_and_that_of_its_classes_code():
    assert code_hash(print) is None
    assert model_form(plain()).keys() == {"class", "elements", "form"}
    assert model_form(Model())["code"] != model_form(OtherModel())["code"]
