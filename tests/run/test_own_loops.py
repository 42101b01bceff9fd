"""Loops of one's own: what `Run.save_checkpoint` and `load_checkpoint` keep, and the state dicts of all parts."""

import json
import random
from itertools import chain, islice, repeat
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from resume_programs import BATCH, NUM_MICROBATCHES, SEED, Noisy, classification, plain, points
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader
from worlds import alone, in_turns

from samestep.checkpoint import state
from samestep.checkpoint.digest import state_digest
from samestep.checkpoint.run_folder import CONTRACT_FILE
from samestep.checkpoint.storage import list_checkpoints
from samestep.checkpoint.verified_files import Manifest, manifest_bytes, read_manifest, write_sealed
from samestep.errors import CheckpointError, ContractError, UsageError
from samestep.files import write_json
from samestep.run.run import Run
from samestep.run.trainer import Trainer

ALLOWED = {"allow_contract_change": True}


class Parts:
    """A run with all that belongs to it."""

    def __init__(self, communicator, seed=SEED, model=plain, precision="32-true", shuffle=True):
        self.run = Run(BATCH, NUM_MICROBATCHES, seed, communicator=communicator)
        self.model = model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.02)
        self.scheduler = schedules.StepLR(self.optimizer, 2, gamma=0.8)
        self.step = self.run.train_step(
            self.model, self.optimizer, classification, scheduler=self.scheduler, precision=precision
        )
        self.loader = self.run.loader(Noisy(), shuffle=shuffle)
        self.batches = chain.from_iterable(repeat(self.loader))

    def train(self, num_steps):
        """Some steps more, over the ends of epochs."""
        for batch in islice(self.batches, num_steps):
            self.step(batch)
        return self

    def outcome(self):
        return state_digest(self.model, self.optimizer), self.optimizer.param_groups[0]["lr"], draws()


def draws():
    return torch.rand(1).item(), float(np.random.randn()), random.random()


def test_a_run_over_a_dataset_that_grows_with_the_epochs_goes_on_in_the_middle_of_one(tmp_path):
    def program(communicator, folder, place=None):
        run = Run(4, 4, SEED, communicator=communicator)
        data = list(torch.arange(8.0))
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        step = run.train_step(model, optimizer, lambda model, batch: model(batch[:, None]).square().mean())
        loader = run.loader(data, shuffle=True)
        if place is not None:
            run.load_checkpoint(place, step, loader)
        results = []
        while loader.cursor.epoch < 3:
            data[:] = torch.arange(8.0 + 3 * loader.cursor.epoch)
            for batch in loader:
                step(batch)
                results.append(batch)
                if place is None:
                    run.save_checkpoint(folder, step, loader, keep=100)
        return state_digest(model, optimizer), [batch.ids().tolist() for batch in results]

    reference = in_turns(1, program, tmp_path)[0]
    assert [sum(map(len, reference[1][a:b])) for a, b in ((0, 2), (2, 5), (5, 9))] == [8, 11, 14]
    for done in (1, 2, 3, 5, 8):
        resumed = in_turns(2, program, None, tmp_path / f"step-{done:08d}")
        assert resumed == [(reference[0], reference[1][done:])] * 2


def test_the_newest_is_taken_and_some_are_kept(tmp_path):
    def program(communicator):
        parts = Parts(communicator)
        for _ in range(5):
            path = parts.train(1).run.save_checkpoint(tmp_path / "kept", parts.step, parts.loader, keep=2)
            assert path.is_dir()
        reference = parts.train(4).outcome()
        again = Parts(communicator)
        assert again.run.load_checkpoint(tmp_path / "kept", again.step, again.loader) == {}
        assert again.step.num_steps == 5
        assert again.train(4).outcome() == reference

    alone(program)
    assert [step for step, _ in list_checkpoints(tmp_path / "kept")] == [4, 5]


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path, capsys):
    def program(communicator):
        parts = Parts(communicator)
        (tmp_path / "empty").mkdir(exist_ok=True)
        for folder in ("empty", "not there"):
            assert parts.run.load_checkpoint(tmp_path / folder, parts.step, parts.loader) is None
        assert not (tmp_path / "not there").exists()

    in_turns(2, program)
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / folder} holds no checkpoint: the run begins at its beginning" for folder in ("empty", "not there")
    ]


def resealed(path, change):
    """Changes the facts of a checkpoint and gives it the right checksums."""
    facts = json.loads((path / "state.json").read_bytes())
    facts = change(facts)
    content = read_manifest(path)
    (path / "state.json").unlink()
    written = write_sealed(path / "state.json", json.dumps(facts).encode())
    (path / "manifest.json").write_bytes(
        manifest_bytes(Manifest(content.step, {**content.files, "state.json": written}))
    )


def misplace(facts):
    facts["run"]["generators"]["numpy"]["state"]["pos"] = 10**9
    return facts


def lengthen(facts):
    facts["run"]["generators"]["python"]["$tuple"][1]["$tuple"][100] = 2**63
    return facts


def shorten(facts):
    for moments in facts["optimizers"][0]["state"]["$dict"]:
        moments[1]["exp_avg"] = moments[1]["step"]
    return facts


def miscount(facts):
    facts["run"]["steps"][0]["num_steps"] = -3
    return facts


def mistype(facts):
    facts["run"]["rest"]["cursor"]["position"] = "8"
    return facts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (misplace, "NumPy's generator is at 1000000000 of 624 numbers"),
        (lengthen, "Python's generator has words of more than 32 bits"),
        (shorten, "the packed state is not in the form in which this version packs it"),
        (mistype, "the checkpoint's place in the data cannot be taken up"),
        (miscount, "does not belong to a run after 2 steps"),
        (lambda facts: [], "the state has format None"),
        (lambda facts: {**facts, "run": {}}, "something in it is missing, or of another kind"),
    ],
)
def test_a_state_that_nobody_has_saved_is_refused(tmp_path, change, message):
    def program(communicator):
        parts = Parts(communicator).train(2)
        parts.run.save_checkpoint(tmp_path, parts.step, parts.loader)
        resealed(tmp_path / "step-00000002", change)
        again = Parts(communicator)
        with pytest.raises(CheckpointError, match=message):
            again.run.load_checkpoint(tmp_path / "step-00000002", again.step, again.loader)

    alone(program)


def test_an_optimizers_tensor_of_another_size_than_its_parameter_is_refused():
    parameter = nn.Parameter(torch.ones(8, 2))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = saved["state"][0]["step"]
    with pytest.raises(CheckpointError, match=r"it has exp_avg float32\[\] of a parameter float32\[8, 2\]"):
        state.load_optimizer(optimizer, saved, None, 0)


def test_a_second_one_of_the_same_step_takes_the_place_of_the_first(tmp_path):
    def program(communicator):
        parts = Parts(communicator).train(2)
        for best in (0.5, 0.75, 0.75):
            parts.run.save_checkpoint(tmp_path / "run", parts.step, parts.loader, {"best": best})
        again = Parts(communicator)
        assert again.run.load_checkpoint(tmp_path / "run", again.step, again.loader) == {"best": 0.75}

    in_turns(2, program)
    assert [step for step, _ in list_checkpoints(tmp_path / "run")] == [2]


def test_checkpoints_of_another_run_are_not_added_to(tmp_path):
    def program(communicator):
        first = Parts(communicator).train(1)
        first.run.save_checkpoint(tmp_path / "run", first.step, first.loader)
        second = Parts(communicator).train(1)
        with pytest.raises(UsageError, match=r"holds checkpoints of another run; go on by run.load_checkpoint"):
            second.run.save_checkpoint(tmp_path / "run", second.step, second.loader)
        second.run.load_checkpoint(tmp_path / "run", second.step, second.loader)
        second.run.save_checkpoint(tmp_path / "run", second.train(1).step, second.loader)

    in_turns(2, program)
    assert [step for step, _ in list_checkpoints(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"seed": 9}, ContractError, r"seed: 5 before, 9 now"),
        ({"shuffle": False}, ContractError, r"shuffle: True before, False now"),
        ({"precision": "bf16-mixed"}, ContractError, r"precision: 32-true before, bf16-mixed now"),
        ({"model": lambda: plain(9)}, CheckpointError, r"its 0.weight is float32\[8, 2\]"),
    ],
    ids=["seed", "shuffle", "precision", "model"],
)
def test_another_contract_is_refused_on_all_ranks(tmp_path, changes, kind, sentence):
    def save(communicator):
        parts = Parts(communicator).train(2)
        parts.run.save_checkpoint(tmp_path / "run", parts.step, parts.loader)

    def load(communicator):
        parts = Parts(communicator, **changes)
        with pytest.raises(kind, match=sentence):
            parts.run.load_checkpoint(tmp_path / "run", parts.step, parts.loader)
        if kind is ContractError:
            found = parts.run.load_checkpoint(tmp_path / "run", parts.step, parts.loader, allow_contract_change=True)
            assert found == {}
            assert parts.step.num_steps == 2
        return True

    alone(save)
    assert in_turns(2, load) == [True, True]


def test_of_several_steps_the_contract_is_listed_by_step(tmp_path):
    def program(communicator, lr):
        run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
        models = [plain(), plain(4)]
        steps = [
            run.train_step(m, torch.optim.SGD(m.parameters(), lr=rate), classification)
            for m, rate in zip(models, lr, strict=True)
        ]
        for step in steps:
            step(points(10))
        return run, steps, models

    def save(communicator):
        run, steps, models = program(communicator, (0.1, 0.2))
        assert run.save_checkpoint(tmp_path / "run", steps).name == "step-00000002"
        return [state_digest(model, []) for model in models]

    def load(communicator):
        run, steps, models = program(communicator, (0.1, 0.3))
        with pytest.raises(ContractError, match=r"steps.1.optimizer.lr: 0.2 before, 0.3 now"):
            run.load_checkpoint(tmp_path / "run", steps)
        with pytest.raises(CheckpointError, match="the state of 2 steps, this program has 1"):
            run.load_checkpoint(tmp_path / "run", steps[0], allow_contract_change=True)
        run.load_checkpoint(tmp_path / "run", steps, allow_contract_change=True)
        assert [step.optimizers[0].param_groups[0]["lr"] for step in steps] == [0.1, 0.3]
        return [state_digest(model, []) for model in models]

    assert alone(save) == alone(load)


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda p, f: p.run.save_checkpoint(f, p.step, DataLoader([1])), UsageError, "got a DataLoader as loader"),
        (lambda p, f: p.run.save_checkpoint(f, p.step, rest=object()), UsageError, "the state holds a object"),
        (lambda p, f: p.run.save_checkpoint(f, p.step, keep=0), UsageError, "got keep=0"),
        (lambda p, f: p.run.save_checkpoint(f / "step-00000003", p.step), UsageError, "names one checkpoint"),
        (lambda p, f: p.run.load_checkpoint(f / "step-00000003", p.step), CheckpointError, "there is no such folder"),
        (lambda p, f: p.run.save_checkpoint("/proc/nowhere", p.step), OSError, "cannot write /proc/nowhere"),
        (
            lambda p, f: p.run.load_checkpoint(p.run.save_checkpoint(f, p.step).with_name("step-1"), p.step),
            UsageError,
            r"there is no .*step-1; .* has step-00000000: name one",
        ),
        (
            lambda p, f: p.run.load_checkpoint(p.run.save_checkpoint(f, p.step), p.step, p.loader, **ALLOWED),
            UsageError,
            "was saved without a loader",
        ),
        (lambda p, f: p.run.load_checkpoint(__file__, p.step), UsageError, "is a file; needed: the folder"),
        (
            lambda p, f: write_json(f / CONTRACT_FILE, {}) or p.run.load_checkpoint(f, p.step),
            UsageError,
            "is the run folder of a Trainer or a command",
        ),
    ],
)
def test_a_mistake_is_an_error_on_all_ranks(tmp_path, call, kind, sentence):
    def program(communicator):
        with pytest.raises(kind, match=sentence):
            call(Parts(communicator), tmp_path)
        return True

    assert in_turns(2, program) == [True, True]


def test_the_state_of_a_run_holds_it_to_its_contract():
    def program(communicator):
        kept = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator).state_dict()
        expected = draws()
        run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
        draws()
        run.load_state_dict(kept)
        assert draws() == expected
        other = Run(BATCH, 2, SEED, communicator=communicator)
        with pytest.raises(ContractError, match="num_microbatches: 4 before, 2 now"):
            other.load_state_dict(kept)
        other.load_state_dict(kept, allow_contract_change=True)
        assert draws() == expected

    alone(program)


def test_numpy_s_other_generators_are_kept_too():
    def program(communicator):
        before = np.random.get_bit_generator()
        try:
            np.random.set_bit_generator(np.random.PCG64(7))
            kept = state.generator_states(communicator.device)
            expected = np.random.rand()
            state.restore_generators(kept, communicator.device)
            assert np.random.rand() == expected
        finally:
            np.random.set_bit_generator(before)

    alone(program)


def test_a_step_that_takes_up_a_state_forgets_what_was_bad_before(tmp_path):
    def program(communicator):
        def explode(model, batch):
            return model(batch[0]).mean() * (float("nan") if step.num_steps == 1 else 1.0)

        run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
        model = nn.Linear(2, 3)
        step = run.train_step(model, torch.optim.Adam(model.parameters(), fused=True), explode, late_check=True)
        step(points(10))
        path = run.save_checkpoint(tmp_path / "run", step)
        step(points(10))
        run.load_checkpoint(path, step)
        assert step.num_steps == 1
        step.check()

    alone(program)


@pytest.mark.parametrize(
    ("of_groups", "allow", "sentence"),
    [
        (
            lambda m: m.parameters(),
            False,
            r"has the state of Adam over 2 parameters, and this program's holds 6 parameters; give it the same",
        ),
        (
            lambda m: [{"params": [p]} for p in m[-1].parameters()],
            True,
            r"this program's holds 2 parameters in groups of 1 and 1; .* before `fit` also .* add_param_group",
        ),
    ],
    ids=["the whole model", "other groups"],
)
@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_a_checkpoint_of_an_optimizer_over_other_parameters_changes_nothing(
    tmp_path, of_groups, allow, sentence, strategy
):
    def make(communicator, groups):
        run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
        model = plain()
        optimizer = torch.optim.Adam(groups(model), 0.02)
        return run, model, run.train_step(model, optimizer, classification, strategy=strategy)

    def save(communicator):
        run, _, step = make(communicator, lambda m: m[-1].parameters())
        step(points(10))
        run.save_checkpoint(tmp_path / "run", step)

    def load(communicator):
        run, model, step = make(communicator, of_groups)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(CheckpointError, match=sentence):
            run.load_checkpoint(tmp_path / "run", step, allow_contract_change=allow)
        assert step.num_steps == 0
        return all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))

    in_turns(2, save)
    assert in_turns(2, load) == [True, True]


def test_a_run_that_has_added_a_group_goes_on_in_a_program_that_makes_the_optimizer_with_it(tmp_path):
    """As the sentence says: otherwise the resume is refused."""

    def train(communicator, epochs, folder, source=None, is_added=False):
        run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
        model = plain()
        optimizer = torch.optim.SGD(model[-1].parameters(), 0.1, momentum=0.9)
        later = {"params": list(model[0].parameters()), "lr": 0.05}
        if is_added:
            optimizer.add_param_group(later)
        hook = SimpleNamespace(on_epoch_start=lambda _, epoch: epoch == 2 and optimizer.add_param_group(later))
        before = model[0].weight.clone()
        with Trainer(run, model, optimizer, classification, hooks=[hook], run_dir=folder) as trainer:
            trainer.fit(points(), epochs, resume=source, allow_contract_change=is_added)
            return trainer.digest, bool((model[0].weight.cpu() == before).all())

    assert alone(train, 1, tmp_path / "first")[1]
    whole = alone(train, 4, tmp_path / "whole")
    assert not whole[1]
    alone(train, 2, tmp_path / "half")
    with pytest.raises(CheckpointError, match="add_param_group"):
        alone(train, 4, tmp_path / "refused", tmp_path / "half")
    assert alone(train, 4, tmp_path / "on", tmp_path / "half", is_added=True) == whole


def test_a_model_that_no_checkpoint_can_hold_is_refused_before_the_training(tmp_path):
    def program(communicator, dtype):
        run, model = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator), plain()
        model.register_buffer("roots", torch.ones(2, dtype=dtype))
        optimizer = torch.optim.Adam(model.parameters())
        step = run.train_step(model, optimizer, classification)
        Trainer(run, model, optimizer, classification, run_dir=tmp_path / str(dtype)).close()
        return run.save_checkpoint(tmp_path / f"{dtype} alone", step)

    with pytest.raises(UsageError, match=r"roots is complex128\[2\], which no checkpoint holds; use complex64"):
        alone(program, torch.complex128)
    assert alone(program, torch.complex64).is_dir()


def test_the_part_of_a_divided_optimizer_is_taken_up_by_the_same_rank_alone(capfd):
    def program(communicator, given, options):
        parts = Parts(communicator)
        optimizer = torch.optim.Adam(parts.model.parameters(), 0.02)
        parts.run.train_step(parts.model, optimizer, classification, **options)(next(iter(parts.loader)))
        optimizer.load_state_dict(optimizer.state_dict())  # as a loop does that goes back to where it was
        if given is None:
            return optimizer.state_dict()
        try:
            optimizer.load_state_dict(given)
        except UsageError as error:
            return str(error)
        return "loaded"

    text = (
        "Adam.state_dict() has this rank's part of the state alone, and cannot be resumed on others; save by run.save_"
    )
    divided = {"strategy": "zero1"}
    state, *_ = in_turns(2, program, None, divided)
    assert capfd.readouterr().err.count(text) == 1
    first, second = in_turns(2, program, state, divided)
    assert first == "loaded"
    assert second.startswith(
        "this state of Adam is part 0 of 2, and rank 1 of 2 cannot take it up; save by run.save_ch"
    )
    assert "part 0 of 2, and rank 0 of 3 cannot" in in_turns(3, program, state, divided)[0]
    capfd.readouterr()
    whole, *_ = in_turns(2, program, None, {})
    assert in_turns(3, program, whole, {}) == ["loaded"] * 3
    assert text not in capfd.readouterr().err
