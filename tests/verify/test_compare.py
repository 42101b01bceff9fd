"""Comparing recordings: the first difference is the first, and rounding is told from real differences."""

import copy
import math

import pytest

from samestep.verify.comparison import Tolerance, first_difference, ranks_apart, reached
from samestep.verify.recording import Recording
from samestep.verify.verdict import count_compared, idle_parameters, refusals

NUM_STEPS = 3


def vector(size, buckets=16):
    return [size / math.sqrt(buckets)] * buckets


def summary(size, mark=0):
    return {"bits": [1000 + mark], "norm": [size], "summary": [vector(size)]}


def step(number, ids, loss=1.0):
    return {
        "kind": "step",
        "step": number,
        "ids": list(ids),
        "rows": None,
        "num_samples": len(ids),
        "loss": [loss],
        "inputs": [],
        "microbatches": [],
        "epsilon": 2.0**-23,
        "gradients": [{"optimizer": 0, **summary(2.0, number)}],
        "states": [{"optimizer": 0, "lr": [0.1], "moments": [5], **summary(4.0, number)}],
        "buffers": {"names": ["1.running_mean"], **summary(1.0, number)},
    }


def recording(world_size, family="ddp", batch=4):
    """A run of three steps of four samples."""
    ranks = []
    for rank in range(world_size):
        lines = [
            {"kind": "start", "rank": rank, "world_size": world_size, "family": family, "logical": False},
            {
                "kind": "parameters",
                "optimizer": 0,
                "names": ["0.weight"],
                "numel": [8],
                "divided": False,
                **summary(3.0),
            },
        ]
        for number in range(NUM_STEPS):
            ids = range(number * batch, (number + 1) * batch)
            own = ids if family == "api" else ids[rank::world_size]
            line = step(number, own, loss=2.0 - number / 4)
            line["microbatches"] = (
                [[0, microbatch] for microbatch in range(4)][rank::world_size] if family != "ddp" else []
            )
            lines.append(line)
        lines.append({"kind": "end", "step": NUM_STEPS, "reason": "steps", "family": family})
        ranks.append(tuple(lines))
    return Recording(f"cpu:{world_size}", 0, tuple(ranks))


def changed(original, change, ranks=None):
    """A recording of which the step lines of some ranks (all by default) are changed."""
    lines = copy.deepcopy(original.ranks)
    for rank in range(len(lines)) if ranks is None else ranks:
        for line in lines[rank]:
            if line["kind"] == "step":
                change(line)
    return Recording(original.devices, original.attempt, lines)


def off(part, by):
    """Changes gradients or states by a relative amount."""

    def change(line):
        group = line[part][0] if part != "buffers" else line[part]
        group["bits"] = [group["bits"][0] + 7]
        group["summary"] = [vector(group["norm"][0] * (1 + by))]

    return change


def test_equal_runs_reach_the_highest_tier():
    assert first_difference(recording(1), recording(2), "bitwise") is None
    assert reached(recording(1), recording(2), None, counts=True) == "bitwise"


@pytest.mark.parametrize("part", ["gradients", "states"])
def test_rounding_is_a_difference_of_bits_alone(part):
    other = changed(recording(2), off(part, 1e-7))
    found = first_difference(recording(1), other, "bitwise")
    assert (found.step, found.name) == (1, "0.weight")
    assert reached(recording(1), other, None, counts=True) == "allclose"


@pytest.mark.parametrize(("part", "quantity"), [("gradients", "gradient"), ("states", "state"), ("buffers", "buffer")])
def test_more_than_rounding_is_a_difference_at_the_tier_allclose(part, quantity):
    other = changed(recording(2), off(part, 0.01))
    found = first_difference(recording(1), other, "allclose")
    assert (found.step, found.quantity) == (1, quantity)
    assert found.relative == pytest.approx(0.01)
    assert reached(recording(1), other, None, counts=True) == "count-exact"
    assert reached(recording(1), other, None, counts=False) == "sample-exact"


def test_the_first_step_that_differs_is_named():
    def late(line):
        if line["step"] == 2:
            off("gradients", 0.5)(line)

    assert first_difference(recording(1), changed(recording(2), late), "allclose").step == 3


def test_other_samples_come_before_what_follows_from_them():
    def change(line):
        line["ids"] = [number + 40 for number in line["ids"]]
        off("gradients", 0.5)(line)

    found = first_difference(recording(1), changed(recording(2), change), "sample-exact")
    assert (found.step, found.quantity) == (1, "samples")
    assert "only on cpu:2: 40, 41, 42, 43" in found.text
    assert reached(recording(1), changed(recording(2), change), None, counts=True) is None


def test_a_sample_that_is_taken_twice_is_named():
    def change(line):
        line["ids"] = [*line["ids"], line["ids"][0]]

    found = first_difference(recording(1), changed(recording(2), change, ranks=[1]), "sample-exact")
    assert "4 samples on cpu:1, 5 on cpu:2" in found.text
    assert "more than once on cpu:2: 1" in found.text


def test_one_sample_is_named_in_the_singular():
    found = first_difference(recording(1, batch=1), recording(2, batch=2), "sample-exact")
    assert "other samples: 1 sample on cpu:1, 2 on cpu:2" in found.text


def test_samples_nobody_saw_are_no_ground_for_a_tier():
    def change(line):
        line["ids"] = None
        off("gradients", 0.5)(line)

    unseen = changed(recording(2), change)
    assert first_difference(recording(1), unseen, "allclose").quantity == "gradient"
    assert reached(recording(1), unseen, None, counts=True) is None


def test_a_gradient_that_is_absent_is_zero_up_to_rounding_and_something_else_to_the_bit():
    def change(line):
        line["gradients"][0].update(bits=[None], norm=[None], summary=[None])

    def zero(line):
        line["gradients"][0].update(bits=[1], norm=[0.0], summary=[vector(0.0)])

    absent, zeros = changed(recording(1), change), changed(recording(2), zero)
    assert first_difference(absent, zeros, "allclose") is None
    assert first_difference(absent, zeros, "bitwise").quantity == "gradient"
    assert first_difference(recording(1), absent, "allclose").quantity == "gradient"


def test_ranks_that_hold_different_parameters_are_told_apart():
    torn = changed(recording(2), off("states", 0.1), ranks=[1])
    assert ranks_apart(recording(2)) is None
    assert ranks_apart(torn).quantity == "ranks"
    assert first_difference(recording(1), torn, "allclose").quantity == "ranks"


def test_the_loss_of_ranks_with_a_share_each_is_their_mean_or_their_sum():
    def shares(values):
        other = recording(2)
        for rank, value in enumerate(values):
            other = changed(other, lambda line, value=value: line.update(loss=[value * line["loss"][0]]), ranks=[rank])
        return changed(other, off("gradients", 0.5))

    def quantity(values):
        return first_difference(recording(1), shares(values), "allclose").quantity

    assert quantity([0.5, 1.5]) == "gradient"
    assert quantity([0.25, 0.75]) == "gradient"
    assert quantity([0.5, 1.0]) == "loss"


def test_fewer_steps_are_a_difference():
    other = recording(2)
    short = Recording(other.devices, 0, tuple(lines[:-2] for lines in other.ranks))
    found = first_difference(recording(1), short, "sample-exact")
    assert (found.step, found.quantity) == (3, "steps")


def with_metric(original, values, attempt=0):
    lines = tuple(
        (*lines, {"kind": "metric", "step": NUM_STEPS, "before": values, "after": values}) for lines in original.ranks
    )
    return Recording(original.devices, attempt, lines)


def test_a_reduced_number_may_be_a_sum_or_a_mean_over_ranks_and_nothing_else():
    ours = with_metric(recording(1), [0.8, 13.0])
    assert first_difference(ours, with_metric(recording(2), [1.6, 13.0]), "allclose") is None
    found = first_difference(ours, with_metric(recording(2), [1.6, 14.0]), "allclose")
    assert (found.quantity, found.step) == ("metric", NUM_STEPS + 1)


def test_a_number_that_differs_from_run_to_run_is_a_clock_and_not_compared():
    ours, again = with_metric(recording(1), [3.25]), with_metric(recording(1), [3.5], attempt=1)
    other = with_metric(recording(2), [9.0])
    assert first_difference(ours, other, "allclose") is not None
    clocks = Tolerance(ours, clocks=frozenset({0}))
    assert first_difference(ours, other, "allclose", clocks) is None
    assert first_difference(ours, again, "bitwise", clocks) is None


def test_rounding_that_grows_fast_in_a_program_is_allowed_what_it_was_seen_to_do():
    ours, other = recording(1), changed(recording(2), off("states", 0.01))
    nudged = changed(recording(1), off("states", 0.002))
    assert first_difference(ours, other, "allclose") is not None
    assert first_difference(ours, other, "allclose", Tolerance(ours, response=(ours, nudged))) is None
    far = changed(recording(2), off("states", 0.1))
    assert first_difference(ours, far, "allclose", Tolerance(ours, response=(ours, nudged))) is not None

    late = Tolerance(ours, response=(ours, nudged), since=1)
    assert first_difference(ours, other, "allclose", late).step == 1


def test_a_loss_that_rounding_alone_changes_much_is_lost_from_that_step_on():
    def grows(line):
        line["loss"] = [line["loss"][0] * (1 + 1e-4 * 100 ** line["step"])]

    ours = recording(1)
    assert list(Tolerance(ours).lost()) == []
    (reason,) = Tolerance(ours, response=(ours, changed(ours, grows))).lost()
    assert reason.startswith("from step 2 on")


def put(path, value):
    """Changes one entry of a step's line."""

    def change(line):
        *outer, last = path
        for key in outer:
            line = line[key]
        line[last] = value

    return change


INFINITE = {"norm": [math.inf], "bits": [3], "summary": [vector(math.inf)]}


@pytest.mark.parametrize(
    ("ours", "theirs", "quantity"),
    [
        (put(["states", 0], {"optimizer": 0, "lr": [0.1], "moments": [5], **INFINITE}), None, "state"),
        (put(["buffers"], {"names": ["1.running_mean"], **INFINITE}), None, "buffer"),
        (put(["buffers", "names"], []), None, "buffer"),
        (put(["states", 0, "lr"], [math.nan]), None, "lr"),
        (put(["rows"], [1, 2, 3, 4]), put(["rows"], [5, 6, 7, 8]), "samples"),
    ],
    ids=("an infinite parameter", "an infinite buffer", "no buffer", "no rate", "other contents of equal numbers"),
)
def test_nothing_is_equal_because_it_cannot_be_compared(ours, theirs, quantity):
    runs = [changed(recording(1), change or (lambda line: None)) for change in (ours, theirs)]
    for pair in (runs, reversed(runs)):
        assert first_difference(*pair, "allclose").quantity == quantity


def test_a_reduced_number_that_is_not_finite_differs_from_one_that_is():
    for value in (math.nan, math.inf):
        broken = with_metric(recording(2), [value])
        assert first_difference(broken, broken, "allclose") is None
        for pair in ((with_metric(recording(1), [0.5]), broken), (broken, with_metric(recording(1), [0.5]))):
            assert first_difference(*pair, "allclose").quantity == "metric"


@pytest.mark.parametrize("family", ["ddp", "api"])
def test_the_samples_of_all_ranks_are_counted_once(family):
    assert count_compared([recording(2, family)]).samples == NUM_STEPS * 4


def test_parameters_whose_gradients_are_always_zero_are_named_and_absent_gradients_are_not():
    def zero(line):
        line["gradients"][0]["norm"] = [0.0]

    def absent(line):
        line["gradients"][0]["norm"] = [None]

    names = [name for line in recording(1).lines("parameters") for name in line["names"]]
    assert idle_parameters(recording(1)) == []
    assert idle_parameters(changed(recording(1), zero)) == names
    assert idle_parameters(changed(recording(1), absent)) == []


def poison(line):
    if line["step"] > 0:
        line["states"][0]["norm"] = [math.nan]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (put(["gradients", 0, "norm"], [0.0]), "all gradients are zero"),
        (poison, "from step 2 on parameters are not finite"),
        (put(["loss"], [1.5]), "the loss is 1.5 in all 3 steps"),
        (put(["states", 0, "bits"], [1000]), "no parameter changed"),
    ],
    ids=("no gradients", "NaN", "a constant loss", "frozen parameters"),
)
def test_a_model_that_learns_nothing_proves_nothing(change, sentence):
    runs = [changed(run, change) for run in (recording(1), recording(2))]
    assert sentence in next(refusals(runs))
    assert (count_compared(runs).nonzero_gradients == 0) == ("gradients" in sentence)
    assert list(refusals([recording(1), recording(2)])) == []


def test_ranks_that_all_do_everything_prove_nothing():
    def everything(line):
        line["ids"] = list(range(line["step"] * 4, line["step"] * 4 + 4))

    assert "nothing is shared out" in next(refusals([recording(1), changed(recording(2), everything)]))

    def all_microbatches(line):
        line["microbatches"] = [[0, microbatch] for microbatch in range(4)]

    shared, repeated = recording(2, "single-process"), changed(recording(2, "single-process"), all_microbatches)
    assert list(refusals([recording(1, "single-process"), shared])) == []
    assert "was computed 2 times" in next(refusals([recording(1, "single-process"), repeated]))
    none = changed(recording(2, "single-process"), lambda line: line.update(microbatches=[]))
    assert "no work was shared out" in next(refusals([recording(1, "single-process"), none]))
