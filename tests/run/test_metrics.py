"""Metrics: sums and counts that add up over microbatches, checked shapes, ties and NaN with one meaning."""

import math

import pytest
import torch
from torch.nn import functional

from samestep import metrics
from samestep.engine.losses import Mean
from samestep.errors import UsageError

CLASSIFICATION = {"accuracy": metrics.accuracy, "top_3": metrics.top_k(3), "cross_entropy": metrics.cross_entropy}
TOKENS = {
    "cross_entropy": metrics.cross_entropy,
    "token_accuracy": metrics.token_accuracy,
    "perplexity": metrics.perplexity,
}
REGRESSION = {
    "mse": metrics.mean_squared_error,
    "rmse": metrics.root_mean_squared_error,
    "mae": metrics.mean_absolute_error,
}


def over_microbatches(metric, output, batch, sizes):
    x, y = batch
    total = count = 0.0
    for part, part_x, part_y in zip(output.split(sizes), x.split(sizes), y.split(sizes), strict=True):
        microbatch_total, microbatch_count = metrics.sums(metric, part, (part_x, part_y))
        total, count = total + microbatch_total.item(), count + microbatch_count.item()
    return metrics.result(metric, total, count)


def whole(metric, output, batch):
    return over_microbatches(metric, output, batch, [len(output)])


@pytest.fixture
def classified():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(13, 5, generator=generator)
    return scores, (torch.zeros(13), torch.randint(5, (13,), generator=generator))


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(6, 4, 7, generator=generator)
    target = torch.randint(7, (6, 4), generator=generator)
    target[0], target[1:3, 2:], target[5, 0] = -100, -100, -100
    return scores, (torch.zeros(6), target)


def test_classification_metrics_equal_the_textbook(classified):
    scores, (x, y) = classified
    assert whole(metrics.accuracy, scores, (x, y)) == (scores.argmax(1) == y).double().mean().item()
    in_top = (scores.topk(3, 1).indices == y[:, None]).any(1).double().mean().item()
    assert whole(metrics.top_k(3), scores, (x, y)) == in_top
    assert 0 < whole(metrics.accuracy, scores, (x, y)) < in_top < whole(metrics.top_k(5), scores, (x, y)) == 1
    expected = functional.cross_entropy(scores.double(), y).item()
    assert whole(metrics.cross_entropy, scores, (x, y)) == pytest.approx(expected, rel=1e-6)  # losses are float32


def test_token_metrics_count_only_targets_that_are_not_ignored(tokens):
    scores, (x, y) = tokens
    kept = y != -100
    expected = functional.cross_entropy(scores[kept].double(), y[kept]).item()
    assert whole(metrics.cross_entropy, scores, (x, y)) == pytest.approx(expected, rel=1e-6)  # losses are float32
    assert whole(metrics.perplexity, scores, (x, y)) == pytest.approx(math.exp(expected), rel=1e-6)
    right = (scores[kept].argmax(1) == y[kept]).double().mean().item()
    assert whole(metrics.token_accuracy, scores, (x, y)) == right > 0


def test_regression_metrics_equal_the_textbook():
    output, y = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[0.0, 2.0], [1.0, 2.0]])
    batch = (torch.zeros(2), y)
    assert whole(metrics.mean_squared_error, output, batch) == (1 + 0 + 4 + 9) / 4
    assert whole(metrics.root_mean_squared_error, output, batch) == math.sqrt(14 / 4)
    assert whole(metrics.mean_absolute_error, output, batch) == (1 + 0 + 2 + 3) / 4


@pytest.mark.parametrize("sizes", [[13], [1] * 13, [5, 0, 8], [12, 1]])
@pytest.mark.parametrize("name", CLASSIFICATION)
def test_a_classification_metric_is_the_same_however_the_samples_are_sharded(classified, name, sizes):
    metric = CLASSIFICATION[name]
    # Cross-entropy adds float64 values in another order here; the counts are exact.
    assert over_microbatches(metric, *classified, sizes) == pytest.approx(whole(metric, *classified), rel=1e-14)


@pytest.mark.parametrize("sizes", [[6], [1] * 6, [0, 4, 2]])
@pytest.mark.parametrize("name", TOKENS)
def test_a_microbatch_without_a_valid_token_weighs_nothing(tokens, name, sizes):
    metric = TOKENS[name]
    # The first sample has no valid token; the order of adding float64 values differs.
    assert over_microbatches(metric, *tokens, sizes) == pytest.approx(whole(metric, *tokens), rel=1e-14)


@pytest.mark.parametrize("name", REGRESSION)
def test_a_root_is_taken_of_the_global_mean_not_of_each_microbatch(name):
    output, y = torch.arange(6.0), torch.tensor([0.0, 3.0, 0.0, 9.0, 4.0, 5.0])
    metric = REGRESSION[name]
    assert over_microbatches(metric, output, (y, y), [1, 2, 3]) == whole(metric, output, (y, y))


def test_two_dimensional_regression_against_a_flat_target_is_not_broadcast():
    output, y = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 3.0])
    assert whole(metrics.mean_squared_error, output, (y, y)) == 1 / 3
    assert whole(metrics.mean_squared_error, output[:, 0], (y, y[:, None])) == 1 / 3


def test_of_equal_scores_the_lower_class_ranks_first():
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0]] * 4)
    batch = (scores, torch.arange(4))
    assert metrics.accuracy.measure(scores, batch).tolist() == [False, True, False, False]
    assert metrics.top_k(2).measure(scores, batch).tolist() == [False, True, True, False]
    assert metrics.top_k(4).measure(scores, batch).tolist() == [True] * 4


def test_a_model_that_gives_only_nan_or_only_zeros_is_not_right_by_accident():
    batch = (torch.zeros(4), torch.arange(4))
    assert metrics.accuracy.measure(torch.full((4, 4), math.nan), batch).sum() == 0
    assert metrics.top_k(4).measure(torch.full((4, 4), math.nan), batch).sum() == 0
    assert metrics.accuracy.measure(torch.zeros(4, 4), batch).sum() == 1
    scores = torch.tensor([[math.nan, 5.0, 1.0]])
    assert not metrics.accuracy.measure(scores, (scores, torch.tensor([1]))).item()


def test_classes_may_lie_along_dim_one_as_in_torch_or_last():
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(2, 3, 4, 5, generator=generator)
    target = torch.randint(3, (2, 4, 5), generator=generator)
    expected = functional.cross_entropy(scores.double(), target).item()
    assert whole(metrics.cross_entropy, scores, (target, target)) == pytest.approx(expected, rel=1e-6)
    last = scores.movedim(1, -1)
    assert whole(metrics.cross_entropy, last, (target, target)) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(UsageError, match="token_accuracy"):
        whole(metrics.token_accuracy, scores, (target, target))
    pixel_accuracy = metrics.token_accuracy_with(class_dim=1)
    assert whole(pixel_accuracy, scores, (target, target)) == whole(metrics.token_accuracy, last, (target, target))


def test_an_ambiguous_dim_of_classes_is_refused_and_can_be_said():
    scores, target = torch.randn(2, 6, 6), torch.randint(6, (2, 6))
    with pytest.raises(UsageError, match=r"needs metrics\.cross_entropy_with\(class_dim=1\)"):
        whole(metrics.cross_entropy, scores, (target, target))
    first = whole(metrics.cross_entropy_with(class_dim=1), scores, (target, target))
    last = whole(metrics.cross_entropy_with(class_dim=-1), scores.transpose(1, 2), (target, target))
    assert first == pytest.approx(last, rel=1e-6)
    assert whole(metrics.perplexity, scores.transpose(1, 2), (target, target)) == pytest.approx(math.exp(first))


@pytest.mark.parametrize(
    ("metric", "output", "target", "message"),
    [
        (metrics.accuracy, torch.zeros(4, 1), torch.zeros(4).long(), "at least 2 classes"),
        (metrics.accuracy, torch.zeros(4, 3), torch.zeros(5).long(), "'accuracy'"),
        (metrics.accuracy, torch.zeros(4, 3), torch.zeros(4), "classes as integers"),
        (metrics.accuracy, torch.zeros(4, 3), torch.zeros(4, 1).long(), "a class a sample"),
        (metrics.accuracy, torch.zeros(4, 3, 2), torch.zeros(4).long(), "one dim more"),
        (metrics.accuracy, {"logits": torch.zeros(4, 3)}, torch.zeros(4).long(), "a tensor as output, got a dict"),
        (metrics.top_k(4), torch.zeros(4, 3), torch.zeros(4).long(), "'top_4' needs at least 4 classes"),
        (metrics.perplexity, torch.zeros(4, 3), torch.zeros(3).long(), "'perplexity'"),
        (metrics.mean_absolute_error, None, torch.zeros(3), "'mean_absolute_error'.*got None"),
        *(
            (metrics.mean_squared_error, torch.zeros(output), torch.zeros(target), r"'mean_squared_error'.*shape \[")
            for output, target in [((3, 2), (3,)), ((3,), (2,)), ((2, 3), (3, 2)), ((), ())]
        ),
    ],
)
def test_a_shape_that_does_not_fit_is_an_error_that_says_what_was_got(metric, output, target, message):
    with pytest.raises(UsageError, match=message):
        metrics.sums(metric, output, (0, target))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda k=k: metrics.top_k(k), "must be (a whole number, )?1 or more") for k in (0, -1, 1.5, True, "1")),
        (lambda: metrics.cross_entropy_with(class_dim=2), "class_dim"),
        *((lambda bad=bad: metrics.as_metric(bad), "a function of") for bad in ("accuracy", None, 3)),
    ],
)
def test_metrics_that_cannot_be_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_sums_are_wide_detached_and_do_not_lose_small_values():
    output = torch.full((3,), 1e8, requires_grad=True)
    total, count = metrics.sums(metrics.Metric(lambda out, batch: out + torch.tensor([1.0, 0, 0])), output, None)
    assert total.dtype == count.dtype == torch.float64
    assert total.shape == count.shape == ()
    assert not total.requires_grad
    assert count == 3
    uneven = torch.tensor([2.0**24, 1.0])  # their sum is no float32
    assert metrics.sums(metrics.Metric(lambda out, batch: out), uneven, None)[0] == 2**24 + 1


def test_half_precision_outputs_are_measured_in_float32():
    scores = torch.tensor([[10.0, 0.0], [0.0, 9.0]], dtype=torch.bfloat16)
    target = torch.tensor([0, 1])
    measured = whole(metrics.cross_entropy, scores, (target, target))
    assert measured == pytest.approx(functional.cross_entropy(scores.double(), target).item(), rel=1e-4)


def test_a_plain_function_is_a_metric_and_keeps_its_name_in_messages():
    def hits(output, batch):
        return output == batch[1]

    metric = metrics.as_metric(hits)
    assert metrics.as_metric(metric) is metric
    assert whole(metric, torch.tensor([1, 2, 3]), (torch.zeros(3), torch.tensor([1, 2, 4]))) == 2 / 3
    with pytest.raises(UsageError, match=r"'hits' returned a bool tensor of shape \[2, 2\]"):
        metrics.sums(metric, torch.zeros(2, 2), (0, torch.zeros(2, 2)))
    with pytest.raises(UsageError, match="'mine' returned a float"):
        metrics.sums(metrics.as_metric(lambda output, batch: 0.5), None, None, name="mine")


@pytest.mark.parametrize(
    "measured",
    [torch.tensor(0.5), Mean(torch.zeros(2), 1), Mean(0.5, 1), Mean(torch.tensor(1.0), torch.ones(2)), [1.0], None],
)
def test_a_mean_over_the_microbatch_or_another_shape_is_refused_by_the_metrics_name(measured):
    with pytest.raises(UsageError, match="'broken'"):
        metrics.sums(metrics.Metric(lambda output, batch: measured, name="broken"), None, None)


def test_a_wrong_number_of_values_is_refused_where_the_number_of_samples_is_known():
    metric = metrics.Metric(lambda output, batch: torch.ones(3), name="short")
    with pytest.raises(
        UsageError, match=r"'short' returned a float32 tensor of shape \[3\]; needed: .*\(4 values, one a sample\)"
    ):
        metrics.sums(metric, None, None, num_samples=4)
    assert metrics.sums(metric, None, None, num_samples=3)[1] == 3


def test_the_result_of_nothing_is_nan_and_an_overflowing_perplexity_is_infinite():
    assert math.isnan(metrics.result(metrics.accuracy, 0.0, 0.0))
    assert metrics.result(metrics.perplexity, 1e6, 1.0) == math.inf
    assert math.isnan(metrics.result(metrics.root_mean_squared_error, math.nan, 1.0))


@pytest.mark.parametrize("key", metrics.TARGET_KEYS)
def test_the_target_is_the_last_of_a_tuple_or_found_by_name(key):
    target = torch.arange(3)
    assert metrics.target_of((0, 1, target)) is target
    assert metrics.target_of([0, target]) is target
    assert metrics.target_of({"image": torch.zeros(3), key: target}) is target


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"image": torch.zeros(1)}, "keys 'image'"),
        ({"label": torch.zeros(1), "target": torch.zeros(1)}, "'label' and 'target'"),
        (torch.zeros(3, 2), r"a float32 tensor of shape \[3, 2\]"),
        ((torch.zeros(3),), "a tuple of 1"),
        ((0, "cat"), "a str"),
        (None, "None"),
    ],
)
def test_a_batch_without_one_clear_target_is_an_error_that_says_what_it_holds(batch, message):
    with pytest.raises(UsageError, match=message):
        metrics.target_of(batch)
