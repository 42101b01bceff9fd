"""Hooks, further state and the moving average: called alike on all ranks, kept by resumes, the same bits everywhere."""

from functools import partial

import numpy as np
import pytest
import torch
from resume_programs import BATCH, EPOCHS, METRICS, NUM_MICROBATCHES, SEED, classification, plain, points
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from worlds import in_turns

from samestep.checkpoint.digest import state_digest
from samestep.errors import ContractError, UsageError
from samestep.run.hooks import EMA, EVENTS, Hook
from samestep.run.run import Run
from samestep.run.trainer import Trainer

OF_A_CALL = ("on_fit_start", "on_fit_end", "on_checkpoint")  # made anew by a resumed program, and by each call of fit


def without(calls, *events):
    return [call for call in calls if call[0] not in events]


class Calls:
    """A hook with all methods that remembers its calls, as state; it asks for the end at given places."""

    def __init__(self, ends=(), asks=lambda trainer: True, name="calls"):
        self.calls, self.name, self._ends, self._asks = [], name, ends, asks

    def __getattr__(self, name):
        if name not in EVENTS:
            raise AttributeError(name)
        return partial(self._note, name)

    def _note(self, event, trainer, *args):
        shown = [getattr(arg, "step", getattr(arg, "epoch", arg)) for arg in args]
        place = [event, *[one if isinstance(one, int) else type(one).__name__ for one in shown]]
        self.calls.append(place)
        if tuple(place) in self._ends and self._asks(trainer):
            trainer.stop()

    def state_dict(self):
        return {"calls": without(self.calls, *OF_A_CALL)}

    def load_state_dict(self, state):
        self.calls = [list(call) for call in state["calls"]]


def make(communicator, hooks=(), loss=classification, options=None, **more):
    run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Trainer(run, model, optimizer, loss, hooks=hooks, **(options or {}), **more)


def averaged(communicator, run_dir=None, resume=None, calls=({"epochs": EPOCHS},)):
    """Trains with an average and a hook: digest, the average's, calls, and the scores of the average."""
    ema, notes = EMA(0.9), Calls()
    kept = {"checkpoint_steps": 1, "checkpoint_minutes": None, "keep": 1000, "digest_every": 1}
    with make(communicator, [ema, notes], run_dir=run_dir, **kept) as trainer:
        for call in calls:
            trainer.fit(points(), eval_data=points(), metrics=METRICS, resume=resume, **call)
        with ema.applied(trainer.model):
            scores = trainer.evaluate(points(), METRICS)
        weights = {name: tensor.cpu() for name, tensor in ema.weights.items()}
        return trainer.digest, weights, notes.calls, scores, trainer.history[-1].eval


def same(one, other):
    """Whether two results have the same bits, and the same calls of hooks but those that are made anew."""
    weights = one[1].keys() == other[1].keys() and all(torch.equal(one[1][n], other[1][n]) for n in one[1])
    calls = without(one[2], *OF_A_CALL) == without(other[2], *OF_A_CALL)
    return one[0] == other[0] and weights and calls and one[3:] == other[3:]


def test_the_average_is_torch_s_own_to_the_bit():
    def program(communicator):
        run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
        model = plain().to(run.device)
        reference, ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), EMA(0.9)
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), classification)
        for batch in run.loader(points(), shuffle=True):
            step(batch)
            reference.update_parameters(model)
            ema.update(model)
        expected = dict(reference.module.named_parameters())
        assert ema.weights.keys() == expected.keys()
        own = {name: parameter.clone() for name, parameter in model.named_parameters()}
        trained = own.keys() - {"0.bias"}  # whose gradient, before BatchNorm, is rounding and may be zero
        assert not any(torch.equal(ema.weights[name], own[name]) for name in trained)
        with ema.applied(model):
            assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
        assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())
        return all(torch.equal(ema.weights[name], expected[name]) for name in expected)

    assert in_turns(1, program) == [True]


def test_calls_that_end_within_epochs_end_as_one_call():
    whole = in_turns(1, averaged)[0]
    calls = tuple({"max_steps": steps} for steps in (2, 3, 7, 12))
    assert same(in_turns(2, averaged, None, None, calls)[0], whole)


def test_hooks_are_called_in_their_order_at_their_points(tmp_path):
    def program(communicator):
        first, second = Calls(name="first"), Calls(name="second")
        seen = []
        first.on_step_end = lambda trainer, result: seen.append(("first", trainer.step.num_steps, result.step))
        second.on_step_end = lambda trainer, result: seen.append(("second", trainer.step.num_steps, result.step))
        kept = {"run_dir": tmp_path / "run", "checkpoint_steps": 2, "checkpoint_minutes": None}
        with make(communicator, [first, second], **kept) as trainer:
            trainer.fit(points(), 2, eval_data=points(), metrics=METRICS, eval_every=2)
        assert first.calls == second.calls
        return seen, first.calls

    for seen, calls in in_turns(2, program):
        assert seen == [(name, step, step) for step in range(1, 7) for name in ("first", "second")]
        assert calls == [
            ["on_fit_start"],
            ["on_epoch_start", 1],
            ["on_checkpoint", 2],
            ["on_epoch_end", 1],
            ["on_epoch_start", 2],
            ["on_checkpoint", 4],
            ["on_checkpoint", 6],
            ["on_evaluation_end", "dict"],
            ["on_epoch_end", 2],
            ["on_fit_end"],
        ]


def ended(communicator, ends, asking):
    notes = Calls([ends], (lambda trainer: trainer.run.rank in asking))
    with make(communicator, [notes]) as trainer:
        trainer.fit(points(), 4)
        at = trainer.step.num_steps
        trainer.fit(points(), 1)  # a later call is not concerned
        return at, len(trainer.history), trainer.step.num_steps, state_digest(trainer.model, trainer.step.optimizers)


@pytest.mark.parametrize(
    ("ends", "at"), [(("on_step_end", 4), 5), (("on_step_end", 5), 6), (("on_epoch_end", 1), 3), (("on_fit_start",), 1)]
)
def test_a_request_to_end_is_that_of_all_ranks(ends, at):
    alone = in_turns(1, ended, ends, [0])
    assert alone[0][0] == at
    for asking in ([0, 1, 2], [1]):
        assert in_turns(3, ended, ends, asking) == alone * 3


def test_a_failure_is_told_to_the_hooks():
    notes = Calls()

    def fails(model, batch):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        in_turns(1, lambda communicator: make(communicator, [notes], fails).fit(points(), 1))
    assert notes.calls == [["on_fit_start"], ["on_epoch_start", 1], ["on_failure", "ValueError"]]


class Misspelt(Hook):
    def on_step_ends(self, trainer, result):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hooks": [Misspelt()]}, "has a method on_step_ends, which no trainer calls; did you mean on_step_end"),
        ({"hooks": [EMA]}, "got the class EMA as a hook; needed: an object with"),
        ({"hooks": EMA()}, "got a EMA as hooks; needed: a list"),
        ({"hooks": [3]}, "got an int as a hook; needed: an object with some of the methods on_fit_start"),
        ({"hooks": [EMA(), EMA(0.5)]}, "two parts of the state with the name 'ema'"),
        ({"hooks": [EMA()], "state": {"ema": EMA()}}, "two parts of the state with the name 'ema'"),
        ({"state": [EMA()]}, "got a list as state; needed: objects by name"),
        ({"state": {"x": 3}}, "got an int as state 'x'; needed: an object that state_dict saves"),
        ({"state": {"": EMA()}}, "got '' as a name in state"),
    ],
)
def test_hooks_and_state_that_cannot_be_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        in_turns(1, lambda communicator: make(communicator, **options))


@pytest.mark.parametrize("decay", [-0.1, 1.5, "0.9", True])
def test_a_decay_that_cannot_be_is_named(decay):
    with pytest.raises(UsageError, match=r"it must be (a finite number, )?from 0 to 1"):
        EMA(decay)


def test_a_decay_of_numpy_goes_into_the_contract_of_a_run():
    assert type(EMA(np.float32(0.5)).decay) is float


def test_an_average_that_has_not_begun_or_is_of_another_model_is_not_applied():
    model, ema = plain(), EMA()
    with pytest.raises(UsageError, match="the average is empty"), ema.applied(model):
        pass
    ema.update(plain(width=4))
    with pytest.raises(UsageError, match="other names or shapes"), ema.applied(model):
        pass


def test_a_restored_average_of_another_model_is_refused_before_the_first_step():
    def program(communicator):
        ema = EMA()
        ema.update(plain(width=4))
        with make(communicator, [ema]) as trainer:
            with pytest.raises(UsageError, match="other names or shapes"):
                trainer.fit(points(), 1)
            return trainer.step.num_steps

    assert in_turns(1, program) == [0]


def test_further_state_is_part_of_the_digest_and_of_the_contract(tmp_path):
    class Counter:
        def __init__(self, start=0):
            self.values = {"n": start, "tensor": torch.zeros(2), "list": [1.5, "x", None]}

        def state_dict(self):
            return self.values

        def load_state_dict(self, state):
            self.values = state

    def program(communicator, state=None, resume=None, allow=False, **options):
        with make(communicator, state=state, **options) as trainer:
            trainer.fit(points(), 1, resume=resume, allow_contract_change=allow)
            return trainer.digest, state_digest(trainer.model, trainer.step.optimizers)

    def alone(*args, **options):
        return in_turns(1, lambda communicator: program(communicator, *args, **options))[0]

    digest, of_model = alone()
    assert digest == of_model
    (zero, _), (one, same_model) = alone({"c": Counter()}), alone({"c": Counter(1)})
    assert same_model == of_model
    assert len({digest, zero, one}) == 3
    counter = Counter(1)
    alone({"c": counter}, run_dir=tmp_path / "run")
    other = Counter(7)
    alone({"c": other}, tmp_path / "run", run_dir=tmp_path / "run")
    assert other.values["n"] == 1
    with pytest.raises(ContractError, match=r"state\.c\.class: Counter before, \(not recorded\) now"):
        alone(None, tmp_path / "run", run_dir=tmp_path / "run")
    alone(None, tmp_path / "run", run_dir=tmp_path / "other", allow=True)
    with pytest.raises(ContractError, match=r"state\.ema\.decay"):
        alone({"c": Counter(), "ema": EMA()}, tmp_path / "run", run_dir=tmp_path / "run")


def test_sharded_parameters_are_refused(worlds):
    assert worlds(2).run(refused) == [True] * 2


def refused(communicator):
    with pytest.raises(UsageError, match="each rank has only a part of each here"):
        make(communicator, [EMA()], options={"strategy": "sharded"}).fit(points(), 1)
    return True


RIDING = "which changes in training and is in no checkpoint"


class ByHand:
    """A hook that keeps an average, in ways that scripts have."""

    def __init__(self, **held):
        self.held, self.weight = held, torch.ones(3)

    def on_step_end(self, trainer, result):
        for value in self.held.values():
            if isinstance(value, AveragedModel):
                value.update_parameters(trainer.model)
            elif isinstance(value, dict):
                value["x"].mul_(0.9)


def riders(capsys, run_dir, make_hooks, loss=classification):
    def program(communicator):
        run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
        model = plain().to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Trainer(run, model, optimizer, loss, run_dir=run_dir, hooks=make_hooks(model)) as trainer:
            trainer.fit(points(), 1)

    in_turns(1, program)
    return [line for line in capsys.readouterr().err.splitlines() if RIDING in line]


def test_what_changes_unsaved_is_named_with_its_remedy(tmp_path, capsys):
    (line,) = riders(capsys, tmp_path / "a", lambda model: [ByHand(ema=AveragedModel(model))])
    assert line.startswith("samestep: the hook ByHand has held (dict), which changes in training")
    assert line.endswith("keep it in an object with state_dict and load_state_dict, and give that by state={…}")

    def of_closure(model):
        ema = AveragedModel(model)

        class Updates:
            def on_step_end(self, trainer, result):
                ema.update_parameters(trainer.model)

        return [Updates()]

    (line,) = riders(capsys, tmp_path / "b", of_closure)
    assert "the hook Updates has ema (AveragedModel)" in line
    assert line.endswith("a resumed run would begin it anew; give it by state={'ema': ema}")
    shadow = torch.zeros(3)

    def remembers(model, batch):
        shadow.add_(1)
        return classification(model, batch)

    (line,) = riders(capsys, tmp_path / "c", lambda model: [], remembers)
    assert "the loss function has shadow (Tensor)" in line


def test_what_is_constant_saved_or_of_a_run_without_a_folder_is_not_named(tmp_path, capsys):
    weight, teacher = torch.ones(3), plain()

    def weighted(model, batch):
        teacher.to(batch[0].device).eval()(batch[0])
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], weight.to(batch[0].device))

    class Looks:
        def __init__(self, model):
            self.model, self.teacher, self.weight = model, teacher, weight

        def on_step_end(self, trainer, result):
            self.last = trainer.model[0].weight

    assert riders(capsys, tmp_path / "a", lambda model: [Looks(model)], weighted) == []
    assert riders(capsys, tmp_path / "b", lambda model: [EMA()]) == []
    assert riders(capsys, None, lambda model: [ByHand(ema=AveragedModel(model))]) == []


def test_a_saved_average_of_the_script_s_own_is_not_named_and_is_kept(tmp_path, capsys):
    def program(communicator):
        run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
        model = plain().to(run.device)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        class Updates:
            def on_step_end(self, trainer, result):
                ema.update_parameters(trainer.model)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Trainer(
            run, model, optimizer, classification, hooks=[Updates()], state={"ema": ema}, run_dir=tmp_path / "run"
        ) as trainer:
            trainer.fit(points(), 2, resume="auto")
            return trainer.digest, int(ema.n_averaged)

    first = in_turns(2, program)
    assert first[0][1] == 6
    assert in_turns(1, program) == first[:1]
    assert RIDING not in capsys.readouterr().err


def test_a_variable_of_a_hook_that_has_no_value_yet_ends_no_run(tmp_path):
    def program(communicator):
        class Later(Hook):
            def on_epoch_end(self, trainer, record):
                if record.epoch > 1:
                    seen.append(extra)

        seen = []
        with make(communicator, [Later()], run_dir=tmp_path / "run") as trainer:
            trainer.fit(points(), 1)
        extra = 3
        return seen

    assert in_turns(1, program) == [[]]


def test_a_hook_of_a_step_is_not_taken_for_a_step_that_hangs():
    phases = []

    class Slow(Hook):
        def on_step_end(self, trainer, result):
            phases.append(trainer.run.membership.heartbeat.enter("script"))

    def program(communicator):
        make(communicator, [Slow()]).fit(points(), 1)

    in_turns(1, program)
    assert set(phases) == {"script"}
