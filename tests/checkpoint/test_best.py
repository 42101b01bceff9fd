"""The best checkpoint, early stopping, and the end by steps: decided alike everywhere, and again after a resume."""

import pytest
import torch
from resume_programs import BATCH, METRICS, NUM_MICROBATCHES, SEED, classification, plain, points
from worlds import in_turns

from samestep.checkpoint.resume import read_state
from samestep.checkpoint.storage import list_checkpoints
from samestep.errors import UsageError
from samestep.run.run import Run
from samestep.run.trainer import Trainer
from samestep.runs.history import BestMetric, EpochRecord


def make(communicator, lr=0.1, **options):
    run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
    model = plain()
    return Trainer(run, model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), classification, **options)


def fit(communicator, run_dir, best="loss", patience=None, resume=None, epochs=6, keep=1, strategy=None, **more):
    options = {"best": best, "patience": patience, "keep": keep, **(strategy or {})}
    with make(communicator, run_dir=run_dir, **options) as trainer:
        trainer.fit(points(), epochs, eval_data=points(), metrics=METRICS, resume=resume, **more)
        return trainer.digest, [record.eval for record in trainer.history], trainer.best.epoch


def records(*values):
    return [EpochRecord(n + 1, 1.0, 1.0, 0.0, {} if v is None else {"loss": v}) for n, v in enumerate(values)]


def test_the_best_is_the_first_of_equal_ones_and_never_one_that_is_not_finite():
    nan = float("nan")
    goal = BestMetric.of("loss", 2)
    assert goal.mode == "min"
    assert BestMetric.of("accuracy", None).mode == "max"
    assert BestMetric.of(("loss", "max"), None).best(records(1.0, 3.0, 2.0)).epoch == 2
    assert goal.best(records(nan, 2.0, 1.0, 1.0)).epoch == 3
    assert goal.best(records(None, nan)) is None
    assert not goal.is_given_up(records(1.0, 2.0))
    assert goal.is_given_up(records(1.0, None, 2.0, 1.0))  # as good is not better; epochs without a value do not count
    assert goal.is_given_up(records(nan, nan))
    assert not BestMetric.of("loss", None).is_given_up(records(1.0, 2.0, 3.0, 4.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "got best='f1', and fit has no eval_data"),
        ({"eval_data": points(), "metrics": METRICS}, "got best='f1', and fit has the metrics accuracy, loss; needed"),
    ],
)
def test_a_goal_that_is_not_measured_is_refused_before_the_first_step(options, message):
    def program(communicator):
        trainer = make(communicator, best="f1")
        with pytest.raises(UsageError, match=message):
            trainer.fit(points(), 1, **options)
        return trainer.step.num_steps

    assert in_turns(1, program) == [0]


@pytest.mark.parametrize("strategy", [{}, {"strategy": "sharded"}])
def test_the_best_checkpoint_is_kept_beside_the_newest_and_can_be_resumed(tmp_path, worlds, strategy):
    results = worlds(2).run(fit, tmp_path / "run", ("accuracy", "max"), None, None, 6, 1, strategy)
    digest, scores, best = results[0]
    assert results == [results[0]] * 2
    accuracies = [score["accuracy"] for score in scores]
    assert best == accuracies.index(max(accuracies)) + 1 < 6
    folder = tmp_path / "run" / "checkpoints"
    assert [step for step, _ in list_checkpoints(folder)] == [3 * best, 18]
    assert (folder / "best").read_text().strip() == f"step-{3 * best:08d}"

    def of_best(communicator):
        trainer = make(communicator, best=("accuracy", "max"))
        trainer.fit(points(), best, eval_data=points(), metrics=METRICS, resume=folder / "best")
        assert trainer.evaluate(points(), METRICS) == scores[best - 1]
        return trainer.step.num_steps

    assert in_turns(1, of_best) == [3 * best]
    resumed = in_turns(3, fit, None, ("accuracy", "max"), None, folder / "best")
    assert resumed == [(digest, scores, best)] * 3


@pytest.mark.parametrize("strategy", [{}, {"strategy": "sharded"}])
def test_the_best_weights_are_the_models_within_a_block(tmp_path, worlds, strategy):
    _, scores, best = in_turns(1, fit, tmp_path / "one", ("accuracy", "max"))[0]
    assert worlds(3).run(with_best_weights, tmp_path / "run", strategy) == [(scores[best - 1], scores[-1], True)] * 3


def with_best_weights(communicator, folder, strategy):
    with make(communicator, run_dir=folder, best=("accuracy", "max"), **strategy) as trainer:
        trainer.fit(points(), 6, eval_data=points(), metrics=METRICS)
        before = trainer.digest
        with trainer.best_weights() as model:
            assert model is trainer.model
            of_best = trainer.evaluate(points(), METRICS)
        return of_best, trainer.evaluate(points(), METRICS), trainer.digest == before


@pytest.mark.parametrize("best", [None, "loss"])
def test_a_checkpoint_of_an_epochs_last_step_gives_way_to_the_one_with_the_record(tmp_path, best):
    def program(communicator):
        with make(communicator, run_dir=tmp_path / "run", best=best, checkpoint_steps=3) as trainer:
            trainer.fit(points(), 3, eval_data=points(), metrics=METRICS)
            if best is not None:
                with trainer.best_weights() as model:
                    assert trainer.run.evaluate(model, points(), METRICS) == trainer.best.eval
            last = 3 if best is None else trainer.best.epoch
            return [record.eval for record in trainer.history[:last]]

    history = in_turns(2, program)[0]
    newest = read_state(tmp_path / "run" / "checkpoints" / ("latest" if best is None else "best"))
    assert (newest.name, [record["eval"] for record in newest.rest["history"]]) == (
        f"step-{3 * len(history):08d}",
        history,
    )


def test_the_best_checkpoint_that_a_writer_did_not_live_to_name_is_named_by_the_run_that_goes_on_from_it(tmp_path):
    def program(communicator, epochs):
        with make(communicator, run_dir=tmp_path / "run", best=("loss", "min"), keep=1) as trainer:
            trainer.fit(points(), epochs, eval_data=points(), metrics=METRICS, resume="auto")
            with trainer.best_weights():
                return trainer.best.epoch, trainer.evaluate(points(), METRICS) == trainer.best.eval

    assert in_turns(1, program, 2) == [(2, True)]
    (tmp_path / "run" / "checkpoints" / "best").write_text("step-00000003\n")  # of the epoch before
    assert in_turns(2, program, 2) == [(2, True)] * 2


@pytest.mark.parametrize("options", [{}, {"best": "loss"}, {"run_dir": "run"}])
def test_best_weights_that_nobody_keeps_are_refused(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    trainer = make(None, **options)
    trainer.fit(points(), 1, eval_data=points(), metrics=METRICS)
    with trainer, pytest.raises(UsageError, match="there are no best weights"), trainer.best_weights():
        pass


def test_best_weights_of_another_metric_are_refused(tmp_path):
    folder = tmp_path / "run"
    in_turns(1, fit, folder, ("accuracy", "max"))
    trainer = make(None, run_dir=folder, best=("accuracy", "min"))
    trainer.fit(points(), 6, eval_data=points(), metrics=METRICS, resume="auto")
    message = r"the best weights, of epoch \d, are not in .*, which has step-"
    with trainer, pytest.raises(UsageError, match=message), trainer.best_weights():
        pass


def test_a_metric_with_several_entries_is_a_goal_by_one_of_them():
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = {"f1": torchmetrics.classification.MulticlassF1Score(3, average=None)}
    trainer = make(None, best="f1/1")
    trainer.fit(points(), 2, eval_data=points(), metrics=metrics)
    assert trainer.best is not None
    with pytest.raises(UsageError, match="got best='f1'; the evaluation gave f1/0, f1/1, f1/2: name one"):
        make(None, best="f1").fit(points(), 2, eval_data=points(), metrics=metrics)


def test_an_end_by_steps_is_exact_and_a_resume_keeps_to_it(tmp_path):
    def program(communicator, run_dir=None, resume=None, **options):
        with make(communicator, run_dir=run_dir) as trainer:
            trainer.fit(points(), resume=resume, **options)
            return trainer.digest, trainer.step.num_steps, len(trainer.history)

    whole = in_turns(1, lambda c: program(c, epochs=3))[0]
    cut = in_turns(2, lambda c: program(c, tmp_path / "run", max_steps=7))[0]
    assert cut[1:] == (7, 2)
    assert in_turns(3, lambda c: program(c, None, tmp_path / "run", max_steps=7))[0] == cut
    assert in_turns(3, lambda c: program(c, None, tmp_path / "run", max_steps=9))[0] == whole == (whole[0], 9, 3)
    assert in_turns(1, lambda c: program(c, epochs=1, max_steps=7))[0][1:] == (3, 1)


def test_evaluations_are_as_rare_as_asked_for():
    scores = in_turns(1, fit, None, "loss", None, None, 5)[0]
    rare = in_turns(1, lambda c: fit(c, None, "loss", None, None, 5, eval_every=2))[0]
    assert rare[0] == scores[0]
    assert rare[1] == [scores[1][n] if n % 2 else {} for n in range(5)]


@pytest.mark.parametrize(
    ("goal", "end", "message"),
    [
        ({}, {}, "got neither epochs nor max_steps"),
        ({}, {"max_steps": 0}, "got max_steps=0; it must be 1 or more"),
        ({}, {"epochs": 2, "eval_every": 0}, "got eval_every=0; it must be 1 or more"),
        ({}, {"epochs": 1.5}, "got epochs=1.5; it must be a whole number, 1 or more"),
        ({}, {"epochs": 1, "resume": True}, 'got resume=True; needed: "auto", the folder of a run, or a checkpoint'),
        ({"patience": 2}, {}, "got patience=2 without best"),
        ({"best": ("loss", "least")}, {}, "the name of a metric, or its name and 'min' or 'max'"),
        ({"best": ""}, {}, "the name of a metric"),
        ({"best": "loss", "patience": 0}, {}, "got patience=0; it must be 1 or more"),
    ],
)
def test_goals_and_ends_that_cannot_be_are_named(goal, end, message):
    with pytest.raises(UsageError, match=message):
        in_turns(1, lambda communicator: make(communicator, **goal).fit(points(), **end))
