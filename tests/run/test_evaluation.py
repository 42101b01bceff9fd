"""Evaluation: every sample once, the same bits on every number of devices, the model as it was."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset
from train_programs import METRICS, classifier, evaluate, evaluate_with_draws, many_outputs, points, predict
from worlds import in_turns

from samestep.core.seeds import derive_seed
from samestep.engine.losses import Mean
from samestep.errors import DeterminismError, UsageError
from samestep.metrics import accuracy
from samestep.run import evaluation as evaluation_module
from samestep.run.run import Run


def in_run(program, world_size=1, batch=16, num_microbatches=4):
    """Runs `program(run)` on every rank."""
    return in_turns(world_size, lambda c: program(Run(batch, num_microbatches, 2, communicator=c)))


def whole(structure):
    """Every tensor of a prediction, in order."""
    return [structure["scores"], *structure["pair"], *structure["list"]]


def test_the_scores_are_those_of_a_plain_loop_over_each_sample_once():
    def program(run):
        model = classifier()
        return model, run.evaluate(model, points(), METRICS)

    model, scores = in_run(program)[0]
    model.eval()
    x, y = points()
    with torch.no_grad():
        output = torch.cat([model(x[i : i + 1]) for i in range(len(x))])
    assert scores["accuracy"] == (output.argmax(1) == y).double().mean().item()
    assert scores["wrong"] == (output.argmax(1) != y).double().mean().item()
    # The forward of one sample rounds otherwise than that of a microbatch.
    assert scores["loss"] == pytest.approx(functional.cross_entropy(output, y).item(), rel=1e-6)
    mine = y == 1
    assert scores["margin"] == pytest.approx((output[:, 1] - output[:, 0])[mine].mean().item(), rel=1e-5)


def test_real_processes_give_the_same_scores_and_predictions(worlds):
    assert worlds(3).run(evaluate) == worlds(1).run(evaluate) * 3
    reference = whole(worlds(1).run(predict)[0])
    for result in worlds(3).run(predict):
        assert all(torch.equal(a, b) for a, b in zip(whole(result), reference, strict=True))


@pytest.mark.parametrize("num_samples", [1, 17])
def test_more_devices_than_a_batch_has_microbatches(num_samples):
    scores = in_turns(1, evaluate, num_samples, 16, 7)[0]
    predictions = whole(in_turns(1, predict, num_samples, 16, 7)[0])
    assert in_turns(5, evaluate, num_samples, 16, 7) == [scores] * 5
    for result in in_turns(5, predict, num_samples, 16, 7):
        assert isinstance(result, dict)
        assert isinstance(result["pair"], tuple)
        assert isinstance(result["list"], list)
        assert all(torch.equal(a, b) for a, b in zip(whole(result), predictions, strict=True))


def test_twin_a_sample_that_is_counted_twice_is_noticed(monkeypatch):
    reference = in_turns(2, evaluate)[0]
    real = evaluation_module.sums

    def padded(metric, output, batch, **options):
        total, count = real(metric, output, batch, **options)
        return (total + total / count, count + 1) if len(batch[1]) == 3 and count else (total, count)

    monkeypatch.setattr(evaluation_module, "sums", padded)
    assert in_turns(2, evaluate)[0] != reference


def test_twin_randomness_by_rank_is_noticed(monkeypatch):
    def noisy(run):
        return run.evaluate(nn.Linear(2, 3), points(), {"noise": lambda output, batch: torch.rand(len(output))})

    reference = in_run(noisy)[0]
    assert in_run(noisy, 3) == [reference] * 3
    calls = []

    def by_call(*parts):
        calls.append(parts)
        return derive_seed(len(calls))

    monkeypatch.setattr(evaluation_module, "derive_seed", by_call)
    assert in_run(noisy, 3)[0] != reference


def test_a_metric_or_forward_that_draws_leaves_the_scripts_generators_alone(worlds):
    drawn = worlds(1).run(evaluate_with_draws)[0]
    assert worlds(3).run(evaluate_with_draws) == [drawn] * 3
    assert drawn[1:] == worlds(1).run(evaluate_with_draws, False)[0][1:]


def mixed_modes():
    model = classifier()
    model[1].eval()
    return model


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_the_modes_of_all_modules_are_put_back(verb):
    def program(run):
        model, seen = mixed_modes(), []
        before = modes(model)
        model[0].register_forward_hook(lambda *_: seen.append((modes(model), torch.is_grad_enabled())))
        if verb == "evaluate":
            run.evaluate(model, points(), METRICS)
        else:
            run.predict(model, points())
        assert seen
        assert all(not any(entry[0]) and not entry[1] for entry in seen)
        return before == modes(model)

    assert in_run(program, 2) == [True, True]


class Merging(nn.Linear):
    """Merges its weights for evaluation, and separates them again in `train(True)`, as adapters do."""

    is_merged = False

    def train(self, mode=True):
        self.is_merged = not mode
        return super().train(mode)


def test_a_module_that_does_more_in_train_than_to_set_the_mode_does_it_after_an_evaluation():
    def program(run):
        model = nn.Sequential(Merging(2, 3))
        merged = []
        model[0].register_forward_hook(lambda module, *_: merged.append(module.is_merged))
        run.predict(model, points())
        return all(merged), model[0].is_merged

    assert in_run(program) == [(True, False)]


@pytest.mark.parametrize("broken", ["model", "metric"])
def test_the_modes_and_generators_are_put_back_after_an_error(broken):
    def fail(*_):
        raise KeyError("the user's own")

    def program(run):
        model = mixed_modes()
        before, state = modes(model), torch.get_rng_state()
        with pytest.raises(KeyError):
            run.evaluate(
                model,
                points(),
                {"own": fail if broken == "metric" else accuracy},
                forward=fail if broken == "model" else None,
            )
        return before == modes(model) and torch.equal(state, torch.get_rng_state())

    assert in_run(program) == [True]
    assert torch.is_grad_enabled()


class Observing(nn.Module):
    """Changes its buffers in evaluation mode too."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", None)

    def forward(self, x):
        self.norm.train()
        self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        self.calls = self.calls + 1
        self.cache = x
        return self.norm(self.layer(x)) * self.largest * self.calls


def test_buffers_that_the_forward_changes_reach_neither_the_next_microbatch_nor_the_caller():
    def program(run):
        model = Observing()
        before = {name: value.clone() for name, value in model.to(run.device).named_buffers()}
        score = run.evaluate(
            model,
            points(),
            {"loss": lambda output, batch: functional.cross_entropy(output, batch[1], reduction="none")},
        )
        after = dict(model.named_buffers())
        assert model.cache is None
        return score, before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)

    reference = in_run(program)[0]
    assert reference[1]
    assert in_run(program, 3) == [reference] * 3


class ForceField(nn.Module):
    """Its forward differentiates, draws, and writes to a buffer."""

    def __init__(self):
        super().__init__()
        self.energy = classifier()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        x = x.detach().requires_grad_()
        energy = self.energy(x + 0.1 * torch.randn_like(x))[:, 0] * self.calls
        return energy, -torch.autograd.grad(energy.sum(), x, create_graph=self.training)[0]


def test_a_forward_that_differentiates_is_evaluated_and_predicts_as_with_gradients():
    def program(run, turn_on=False):
        torch.manual_seed(0)
        model = ForceField().to(run.device)

        def forward(model, batch):
            with torch.set_grad_enabled(turn_on or torch.is_grad_enabled()):
                return model(batch[0])

        def force(output, batch):
            assert not output[1].requires_grad
            return output[1].norm(dim=1)

        score = run.evaluate(model, points(), {"force": force}, forward=forward)
        predicted = run.predict(model, points(), forward=forward)
        return score, [part.tolist() for part in predicted], model.calls.item()

    (reference,) = in_run(lambda run: program(run, turn_on=True))
    for world_size in (1, 3):
        assert in_run(program, world_size) == [reference] * world_size


def test_predictions_come_in_the_order_of_the_data_and_keep_their_dtypes():
    def program(run):
        model = classifier()
        return model, run.predict(model, points(), forward=many_outputs)

    for model, result in in_run(program, 3):
        model.eval()
        with torch.no_grad():
            expected = many_outputs(model, points())
        for ours, theirs in zip(whole(result), whole(expected), strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            # A microbatch's forward rounds otherwise than that of all samples at once.
            torch.testing.assert_close(ours, theirs, rtol=1e-2 if ours.dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        assert torch.equal(result["list"][2], expected["list"][2])
        assert torch.equal(result["pair"][1], expected["pair"][1])


def test_outputs_of_any_dtype_and_views_of_a_buffer_are_gathered_as_they_are():
    class Reusing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("memory", torch.zeros(32, 2, dtype=torch.complex128))

        def forward(self, x):
            self.memory[: len(x)] = x
            return self.memory[: len(x), :1]

    x = points()[0].to(torch.complex128) * 1j
    for result in in_run(lambda run: run.predict(Reusing(), x), 3):
        assert torch.equal(result, x[:, :1])


class Drawing(Dataset):
    """Rows whose number is their value, each with noise of its own."""

    def __len__(self):
        return 61

    def __getitem__(self, index):
        return index + 0.5 * torch.rand(1)


class InOrder(IterableDataset):
    """The same as a stream."""

    def __iter__(self):
        return iter([index + 0.5 * torch.rand(1) for index in range(61)])


def row_stream(index, count):
    return list(torch.arange(61.0).unsqueeze(1)[index::count])


LOADERS = {
    "shuffled": lambda run: run.loader(torch.arange(61.0).unsqueeze(1), shuffle=True),
    "samples that draw": lambda run: run.loader(Drawing(), shuffle=True),
    "workers": lambda run: run.loader(Drawing(), shuffle=True, num_workers=1),
    "an iterable dataset": lambda run: run.loader(InOrder()),
    "streams": lambda run: run.loader(streams=row_stream),
    "streams, exact": lambda run: run.loader(streams=row_stream, exact_states=True),
}


def epochs_with(communicator, kind, begun, evaluates):
    """Two epochs of a loader, the first of which may have begun before, and what is measured between its batches."""
    run = Run(8, 4, 2, communicator=communicator)
    loader, seen, found = LOADERS[kind](run), [], []
    if begun:
        other = LOADERS[kind](run)
        next(iter(other))
        loader.load_state_dict(other.state_dict())
    for _ in range(2):
        for batch in loader:
            seen.append((batch.epoch, batch.position, {k: v.flatten().tolist() for k, v in batch.microbatches.items()}))
            if evaluates:
                mean = run.evaluate(nn.Identity(), loader, {"mean": lambda output, batch: output[:, 0].floor()})
                found.append((mean["mean"], run.predict(nn.Identity(), loader).flatten().tolist()))
    return seen, found


def check_whole_epochs(run, kind, begun):
    reference, measured = (run(3, epochs_with, kind, begun, evaluates) for evaluates in (False, True))
    assert [seen for seen, _ in measured] == [seen for seen, _ in reference]
    assert measured[0][1] == measured[1][1] == run(1, epochs_with, kind, begun, True)[0][1]
    of_epoch = {}
    for (epoch, *_), (mean, outputs) in zip(*measured[0], strict=True):
        assert mean == 30
        assert sorted(map(int, outputs)) == list(range(61))
        assert kind.startswith("streams") or [int(value) for value in outputs] == list(range(61))
        assert of_epoch.setdefault(epoch, outputs) == outputs


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind != "workers"])
def test_a_whole_epoch_is_measured_in_the_order_of_the_data_wherever_the_loader_is(kind, begun):
    check_whole_epochs(in_turns, kind, begun)


@pytest.mark.parametrize("begun", [False, True])
def test_a_loader_with_workers_is_measured_so_too(worlds, begun):
    # In processes: a data worker that a thread forks may inherit a lock that another thread holds.
    check_whole_epochs(lambda size, *arguments: worlds(size).run(*arguments), "workers", begun)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_ranks_whose_datasets_differ_in_length_are_an_error(method):
    def program(run):
        rows = torch.zeros(61 + run.rank, 2)
        if method == "predict":
            run.predict(nn.Linear(2, 3), rows)
        else:
            run.evaluate(nn.Linear(2, 3), (rows,), {"mean": lambda output, batch: output.mean(1)})

    with pytest.raises(DeterminismError, match=r"datasets of \[61, 62\] samples"):
        in_run(program, 2)


def test_a_tensor_comes_back_as_a_tensor_on_the_host():
    (result,) = in_run(lambda run: run.predict(nn.Linear(2, 3), points()[0]))
    assert (result.shape, result.device.type, result.requires_grad) == ((61, 3), "cpu", False)


def predicted(forward):
    return lambda run: run.predict(nn.Linear(2, 3), points()[0], forward=forward)


def measured(metrics, **options):
    return lambda run: run.evaluate(nn.Linear(2, 3), points(), metrics, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (predicted(lambda m, b: m(b).mean()), "a float32 tensor of shape []"),
        (predicted(lambda m, b: m(b).mean(0)), "a float32 tensor of shape [3] for 4 samples"),
        (predicted(lambda m, b: (m(b), None)), "None for 4 samples"),
        (predicted(lambda m, b: {"text": "no tensor"}), "a str"),
        (predicted(lambda m, b: {}), "the model returned no tensor to predict with"),
        (measured({}), "evaluate needs at least one metric"),
        (measured({"top": 3}), "got an int as a metric; needed: a samestep metric or a function"),
        (measured({"mine": lambda o, b: o.mean()}), "metric 'mine' returned a float32 tensor of shape []"),
        (measured({"mine": lambda o, b: o.sum(0)}), "metric 'mine' returned a float32 tensor of shape [3]; needed"),
        (
            measured({"mine": lambda o, b: Mean(o.sum(0), 1)}),
            "metric 'mine' returned a Mean of a float32 tensor of shape [3]",
        ),
        (measured(METRICS, precision="half"), "got precision="),
    ],
)
def test_what_cannot_be_measured_or_predicted_is_named(call, message):
    with pytest.raises(UsageError) as caught:
        in_run(call)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_batches_that_are_dicts_need_a_forward():
    x, y = points()

    def program(run):
        model = nn.Linear(2, 3)
        with pytest.raises(UsageError, match="a batch is a dict; say how to run the model on it: forward="):
            run.evaluate(model, {"x": x, "label": y}, {"accuracy": accuracy})
        return run.evaluate(model, {"x": x, "label": y}, {"accuracy": accuracy}, forward=lambda m, b: m(b["x"]))

    assert 0 <= in_run(program)[0]["accuracy"] <= 1


def test_a_metric_that_counts_nothing_is_nan():
    nothing = {"empty": lambda output, batch: Mean(output.sum() * 0, 0)}
    assert math.isnan(in_run(lambda run: run.evaluate(nn.Linear(2, 3), points(), nothing), 2)[1]["empty"])
