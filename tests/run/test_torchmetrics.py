"""Metrics of torchmetrics: those over all samples at once, with the same bits on every number of devices.

Its import takes seconds, in each process that collects the tests: it is left to the tests that use it.
"""

import importlib

import pytest
import torch
from worlds import cpu_only, in_turns

from samestep import metrics
from samestep.errors import UsageError
from samestep.extras import is_installed
from samestep.run.run import Run

pytestmark = pytest.mark.skipif(not is_installed("torchmetrics"), reason="torchmetrics is not installed")

NUM_SAMPLES, CLASSES = 61, 4
WORDS = ["one", "training", "step", "on", "any", "devices", "gives", "the", "same", "model", "as", "before"]


def made(kind, *args, **options):
    """A metric of torchmetrics, by the name of its class."""
    module, _, name = f"torchmetrics.{kind}".rpartition(".")
    return getattr(importlib.import_module(module), name)(*args, **options)


def boxes():
    """Mean overlap of each sample's boxes, collected like a mean average precision: lists without a reduction."""
    from torchmetrics import Metric

    class Boxes(Metric):
        full_state_update = True

        def __init__(self):
            super().__init__()
            self.add_state("found", default=[], dist_reduce_fx=None)
            self.add_state("wanted", default=[], dist_reduce_fx=None)

        def update(self, output, target):
            self.found += [entry["boxes"] for entry in output]
            self.wanted += [entry["boxes"] for entry in target]

        def compute(self):
            firsts = [found.mean() - wanted.sum() for found, wanted in zip(self.found, self.wanted, strict=True)]
            return {"mean": torch.stack(firsts).mean(), "counts": torch.tensor([len(self.found), len(self.wanted)])}

    return Boxes()


def scores():
    """Scores and classes of each sample."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_SAMPLES, CLASSES, generator=generator)
    return x, torch.randint(CLASSES, (NUM_SAMPLES,), generator=generator)


def numbers():
    """Two columns that go together."""
    x, _ = scores()
    return x[:, 0], x[:, 0] + 0.3 * x[:, 1]


MAKE = {
    "f1 of classes": (lambda: made("classification.MulticlassF1Score", CLASSES, average=None), scores),
    "auroc": (lambda: made("classification.MulticlassAUROC", CLASSES), scores),
    "pearson": (lambda: made("regression.PearsonCorrCoef"), numbers),
    "most": (lambda: made("MaxMetric"), numbers),
    "joined": (lambda: made("CatMetric"), numbers),
}


def firsts(output, batch):
    return output.flatten()[: len(output)]


def first_alone(metric, output, batch):
    metric.update(output)


def measure(communicator, name, batch=16):
    """The values of a metric over its data."""
    make, data = MAKE[name]
    run = Run(batch, 4, communicator=communicator)
    metric = metrics.from_torchmetrics(make(), first_alone) if name in ("most", "joined") else make()
    return run.evaluate(torch.nn.Identity(), data(), {"x": metric, "firsts": firsts})


def bits(values):
    return {name: value.hex() for name, value in values.items()}


@pytest.mark.parametrize("name", MAKE)
def test_a_metric_is_that_over_all_samples_at_once_on_every_number_of_devices(name):
    make, data = MAKE[name]
    whole = make()
    whole.update(*data()[: 1 if name in ("most", "joined") else 2])
    found = in_turns(1, measure, name)[0]
    expected = whole.compute()
    numbers = torch.tensor([value for key, value in found.items() if key.split("/")[0] == "x"])
    torch.testing.assert_close(numbers, expected.float().flatten(), rtol=1e-5, atol=1e-6)
    assert next(iter(found)).split("/")[0] == "x"
    assert list(found)[-1] == "firsts"
    for world_size in (2, 3):
        assert [bits(each) for each in in_turns(world_size, measure, name)] == [bits(found)] * world_size


@pytest.mark.parametrize(("world_size", "transport"), [(3, "auto"), (2, "gloo")])
def test_real_processes_give_the_same_values(worlds, world_size, transport):
    for name in ("auroc", "f1 of classes"):
        reference = bits(in_turns(1, measure, name)[0])
        found = worlds(world_size, transport).run(measure, name)
        assert [bits(each) for each in found] == [reference] * world_size


def test_twin_states_merged_by_rank_are_noticed(monkeypatch):
    reference = bits(in_turns(1, measure, "joined")[0])
    monkeypatch.setattr("samestep.run.evaluation.sorted", lambda pairs, key: reversed(pairs), raising=False)
    assert bits(in_turns(2, measure, "joined")[0]) != reference


class Pictures(torch.utils.data.Dataset):
    """Pictures of several sizes, with as many boxes as differ."""

    def __len__(self):
        return 13

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 8 + index % 3, 8, generator=generator)
        return image, {"boxes": torch.rand(1 + index % 3, 4, generator=generator)}


class Detector(torch.nn.Module):
    """A box for each picture, of the means of its colours."""

    def forward(self, images):
        return [{"boxes": image.mean((1, 2))[None], "labels": torch.ones(1, dtype=torch.long)} for image in images]


def as_lists(samples):
    return tuple(zip(*samples, strict=True))


def detect(communicator):
    run = Run(6, 3, communicator=communicator)
    values = run.evaluate(Detector(), Pictures(), {"map": boxes()}, collate_fn=as_lists)
    found = run.predict(Detector(), Pictures(), collate_fn=as_lists)
    return values, [entry["boxes"].tolist() for entry in found], [entry["labels"].tolist() for entry in found]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_detectors_lists_of_dicts_are_measured_and_predicted_in_the_order_of_the_samples(world_size):
    pictures = [Pictures()[index] for index in range(13)]
    expected = [image.mean((1, 2))[None] for image, _ in pictures]
    means = [box.mean() - target["boxes"].sum() for box, (_, target) in zip(expected, pictures, strict=True)]
    for values, boxes, labels in in_turns(world_size, detect):
        torch.testing.assert_close(torch.tensor(boxes), torch.stack(expected))
        assert labels == [[1]] * 13
        assert list(values) == ["map/mean", "map/counts/0", "map/counts/1"]
        assert (values["map/counts/0"], values["map/counts/1"]) == (13, 13)
        assert values["map/mean"] == pytest.approx(torch.stack(means).mean().item(), rel=1e-5)
    assert len({str(result) for result in in_turns(world_size, detect)}) == 1


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return " ".join(WORDS[: 5 + index % 7]), " ".join(WORDS[index % 3 : 6 + index % 5])


class Translator(torch.nn.Module):
    def forward(self, sentences):
        return [f"{sentence} now" for sentence in sentences]


def translate(communicator):
    def update(metric, output, batch):
        metric.update(output, [[target] for target in batch[1]])

    run = Run(4, 4, communicator=communicator)
    bleu = metrics.from_torchmetrics(made("text.BLEUScore", n_gram=2), update)
    return run.evaluate(Translator(), Sentences(), {"bleu": bleu}), run.predict(Translator(), Sentences())


@cpu_only("strings are no tensors")
def test_texts_are_measured_and_predicted():
    sources, targets = zip(*(Sentences()[index] for index in range(11)), strict=True)
    outputs = [f"{source} now" for source in sources]
    whole = made("text.BLEUScore", n_gram=2)
    whole.update(outputs, [[target] for target in targets])
    for world_size in (1, 3):
        for values, predicted in in_turns(world_size, translate):
            assert predicted == outputs
            assert values["bleu"] == pytest.approx(whole.compute().item(), rel=1e-6)


LENGTHS = (3, 1, 4, 1, 5)


class Sequences(torch.utils.data.Dataset):
    """Sequences of several lengths, of which some have one row."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return torch.arange(float(LENGTHS[index]))


@pytest.mark.parametrize("microbatches", [2, 5])
def test_lists_of_tensors_by_sample_are_told_from_tensors_of_all_samples(microbatches):
    def program(communicator, forward):
        run = Run(5, microbatches, communicator=communicator)
        return run.predict(torch.nn.Identity(), Sequences(), collate_fn=list, forward=forward)

    for world_size in (1, 2):
        for found in in_turns(world_size, program, lambda model, batch: [each * 2 for each in batch]):
            assert [each.tolist() for each in found] == [[2.0 * k for k in range(n)] for n in LENGTHS]
        whole = in_turns(world_size, program, lambda model, batch: [torch.tensor([len(each) for each in batch])])
        assert [[each.tolist() for each in found] for found in whole] == [[list(LENGTHS)]] * world_size
    with pytest.raises(UsageError, match=r"predict got outputs of shapes .* for the microbatches, which cannot be"):
        in_turns(1, program, lambda model, batch: torch.nn.utils.rnn.pad_sequence(batch, batch_first=True))


def with_state(state, default, reduction):
    """A metric with one state."""
    from torchmetrics import Metric

    class OneState(Metric):
        def __init__(self):
            super().__init__()
            self.add_state(state, default, dist_reduce_fx=reduction)

        def update(self, *args):
            pass

        def compute(self):
            return getattr(self, state)

    return OneState()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made("MetricCollection", [made("SumMetric")]), "MetricCollection holds other metrics"),
        (lambda: made("wrappers.MinMaxMetric", made("SumMetric")), "MinMaxMetric holds other metrics"),
        (lambda: made("SumMetric") + made("SumMetric"), "CompositionalMetric holds other metrics"),
        (lambda: made("wrappers.Running", made("SumMetric")), "Running holds other metrics"),
        (
            lambda: with_state("total", torch.ones(()), "sum"),
            "OneState sums its state 'total' from a default that is not 0",
        ),
        (lambda: torch.nn.Identity(), "as metric; needed: a metric of torchmetrics"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(make, message):
    with pytest.raises(UsageError, match=message):
        metrics.from_torchmetrics(make())


def test_a_mean_of_means_is_refused():
    metric = with_state("mean", torch.zeros(()), "mean")
    with pytest.raises(UsageError, match="OneState averages its state 'mean' over updates: use a metric"):
        Run(4, 2).evaluate(torch.nn.Identity(), scores(), {"x": metric})


def test_an_error_of_a_metric_names_it():
    def fail(self):
        raise IndexError("no value")

    kind = type("Failing", (type(made("MaxMetric")),), {"compute": fail})
    metric = metrics.from_torchmetrics(kind(), first_alone)
    with pytest.raises(UsageError, match=r"the metric x \(Failing\) cannot be computed .*: IndexError: no value"):
        Run(4, 2).evaluate(torch.nn.Identity(), numbers(), {"x": metric})


def test_the_metric_that_is_given_stays_as_it_was():
    metric = made("classification.MulticlassAccuracy", CLASSES)
    metric.update(*scores())
    before = metric.compute()
    Run(16, 4).evaluate(torch.nn.Identity(), scores(), {"x": metric})
    assert metric.compute() == before
