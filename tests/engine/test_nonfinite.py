"""Steps whose loss or gradient is not finite: named, undone, or left out."""

import copy
import threading

import pytest
import torch
from engine_programs import bits, in_turns, make_step, perceptron, table
from torch.nn import functional

from samestep.engine.finite_check import FiniteCheck
from samestep.engine.precision import LossScale
from samestep.engine.result import StepResult
from samestep.errors import DeterminismError, NonFiniteError, UsageError
from samestep.run.run import Run

NUM_SAMPLES, BATCH = 96, 24
BAD_ID = 13
KINDS = ["loss", "infinite loss", "gradient"]


def broken_at_bad_id(kind):
    """A loss that breaks at one sample: the first of its features is its id."""

    def loss(model, batch):
        x, y = batch
        ids, features = x[:, 0], x[:, 1:]
        output = model(features)
        is_bad = (ids == BAD_ID).float()
        value = functional.mse_loss(output, y)
        if kind == "loss":
            return value + torch.where(is_bad > 0, float("nan"), 0.0).sum()
        if kind == "infinite loss":
            return value + torch.where(is_bad > 0, float("inf"), 0.0).sum()
        return value + (0 * output.sum() + 1 - is_bad.sum()).sqrt()  # the slope of a root is infinite at 0

    return loss


def samples():
    x, y = table(NUM_SAMPLES)
    return torch.cat([torch.arange(NUM_SAMPLES).float().unsqueeze(1), x], 1), y


def make_optimizer(model, name):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=name == "fused adamw")


def train(communicator, kind, optimizer_name="sgd", on_nonfinite="raise"):
    """Trains on; notes for each bad step its number, what was said, and whether the state was that from before it."""
    run = Run(BATCH, 8, seed=5, communicator=communicator)
    model = perceptron()
    optimizer = make_optimizer(model, optimizer_name)
    step = run.train_step(model, optimizer, broken_at_bad_id(kind), on_nonfinite=on_nonfinite)
    notes = []
    for _ in range(2):
        for batch in run.loader(samples(), shuffle=True):
            before = (bits(model, optimizer), step.num_steps)
            try:
                result = step(batch)
                if result.skipped:
                    notes.append((result.loss.hex(), before[0] == bits(model, optimizer), step.num_steps - before[1]))
            except NonFiniteError as error:
                unchanged = before == (bits(model, optimizer), step.num_steps)
                notes.append((before[1], str(error), unchanged, batch.ids().tolist()))
    return notes, bits(model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_is_named_undone_and_can_be_left_behind(kind):
    notes, digest = in_turns(1, train, kind)[0]
    assert len(notes) == 2, "one bad batch an epoch"
    for step, message, unchanged, ids in notes:
        assert unchanged
        assert "\n" not in message
        place = ids.index(BAD_ID)
        microbatch = place // (BATCH // 8)
        first = ", ".join(map(str, ids[3 * microbatch : 3 * microbatch + 3]))
        assert message.startswith(f"step {step + 1}: not finite: the {kind.split()[-1]} of microbatch {microbatch} (")
        assert f"sample ids {first})" in message
        assert "on_nonfinite='skip'" in message
    assert in_turns(3, train, kind) == [(notes, digest)] * 3


def test_a_plain_batch_is_named_by_its_rows():
    def program(communicator):
        step = make_step(communicator, perceptron(), broken_at_bad_id("loss"))
        with pytest.raises(NonFiniteError, match=r"the loss of microbatch 4 \(nan; rows 12 to 14 of the batch\)"):
            step(tuple(t[:BATCH] for t in samples()))

    in_turns(2, program)


def test_of_a_large_gradient_that_is_not_finite_both_siblings_are_named_where_one_rank_adds_them(monkeypatch):
    monkeypatch.setattr("samestep.engine.gradients.REUSED_BYTES", 0)

    def program(communicator, kind):
        step = make_step(communicator, perceptron(), broken_at_bad_id(kind))
        with pytest.raises(NonFiniteError) as raised:
            step(tuple(t[:BATCH] for t in samples()))
        return str(raised.value).partition("not finite: ")[2]

    for world_size in (1, 2):
        for told in in_turns(world_size, program, "gradient"):
            rows = "rows 12 to 14 of the batch or rows 15 to 17 of the batch"
            assert told.startswith("the gradient of microbatch 4 or 5 (nan; " + rows)
    assert in_turns(8, program, "gradient")[0].startswith("the gradient of microbatch 4 (nan; rows 12 to 14 of")
    assert in_turns(1, program, "loss")[0].startswith("the loss of microbatch 4 (nan; rows 12 to 14 of the batch)")


@pytest.mark.parametrize("is_alone", [False, True])
def test_the_imaginary_part_of_a_gradient_is_named(is_alone):
    def loss(model, batch):
        is_bad = (batch[0][:, 0] == BAD_ID).float().sum()
        still = model.turn.imag - model.turn.imag.detach()
        return (still + 1 - is_bad).sqrt().mean() + (0 if is_alone else model.line(batch[0]).mean())

    def program(communicator):
        model = torch.nn.ParameterDict({"turn": torch.zeros((), dtype=torch.complex64)})
        if not is_alone:
            model.line = torch.nn.Linear(6, 1)
        step = make_step(communicator, model, loss)
        with pytest.raises(NonFiniteError, match=r"the gradient of microbatch 4 \((nan|inf|-inf); rows 12 to 14"):
            step(tuple(t[:BATCH] for t in samples()))

    for world_size in (1, 2, 3):
        in_turns(world_size, program)


@pytest.mark.parametrize("kind", KINDS)
def test_skip_leaves_the_update_out_and_counts_the_step(kind):
    notes, digest = in_turns(1, train, kind, "adamw", "skip")[0]
    assert len(notes) == 2
    for loss, unchanged, steps in notes:
        assert unchanged
        assert steps == 1
        assert (loss in ("nan", "inf")) == (kind != "gradient")
    assert in_turns(3, train, kind, "adamw", "skip") == [(notes, digest)] * 3


def test_twin_a_step_that_is_not_undone_is_noticed(monkeypatch):
    real = FiniteCheck.judge

    def always_updates(self, *numbers, **options):
        ok, first = real(self, *numbers, **options)
        return ok | True, first

    monkeypatch.setattr(FiniteCheck, "judge", always_updates)
    _, digest = in_turns(1, train, "loss", "sgd", "skip")[0]
    monkeypatch.undo()
    assert in_turns(1, train, "loss", "sgd", "skip")[0][1] != digest


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_starts_broken_is_told_that_it_is_not_finite(value):
    told = r"step 1: not finite: the loss of microbatch 0.* Parameter 0\.weight held NaN or infinity before the first"

    def program(communicator):
        model = perceptron()
        model[0].weight.data[0, 0] = value
        step = make_step(communicator, model, broken_at_bad_id("loss"))
        for _ in range(2):
            with pytest.raises(NonFiniteError, match=told):
                step(tuple(t[-BATCH:] for t in samples()))

    for world_size in (1, 2):
        in_turns(world_size, program)


def test_a_write_to_a_model_that_holds_nan_is_still_noticed():
    def loss(model, batch):
        model[0].weight.data[1, 1] += 1
        return broken_at_bad_id("loss")(model, batch)

    def program(communicator):
        model = perceptron()
        model[0].weight.data[0, 0] = float("nan")
        with pytest.raises(DeterminismError, match=r"0\.weight was written to"):
            make_step(communicator, model, loss)(tuple(t[:BATCH] for t in samples()))

    in_turns(1, program)


def late_run(communicator, late, bad=2, scheduler=False):
    """Six steps of which one is bad; where the check is late nobody reads the scalars before the end."""
    run = Run(BATCH, 4, communicator=communicator)
    torch.manual_seed(3)
    model = perceptron()
    optimizer = make_optimizer(model, "fused adamw")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduler else None
    step = run.train_step(model, optimizer, broken_at_bad_id("loss"), late_check=late, scheduler=schedule)
    x, y = samples()
    batches = [(x[24:48] + k, y[24:48]) for k in range(6)]
    batches[bad] = (x[:24], y[:24])
    states, messages = [], []
    k = 0
    while k < len(batches):
        states.append((bits(model, optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])))
        try:
            step(batches[k])
            k += 1
            if k == len(batches):
                step.check()
        except NonFiniteError as error:
            messages.append(str(error))
            after = (bits(model, optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"]))
            at = step.num_steps
            break
    noops = [s[0] for s in states[bad + 1 :]]
    del batches[bad]
    for batch in batches[bad:]:
        step(batch)
    step.check()
    return {
        "messages": messages,
        "undone": after[0] == states[bad][0],
        "rates undone": after[1] == states[bad][1],
        "no-ops": all(s == states[bad][0] for s in noops),
        "num no-ops": len(noops),
        "at": at,
        "final": bits(model, optimizer),
    }


@pytest.fixture
def nobody_looks(monkeypatch):
    """Scalars that are never there, as on a device that lags behind the host."""
    monkeypatch.setattr(StepResult, "is_there", property(lambda self: False))


@pytest.mark.parametrize(("bad", "scheduler"), [(2, False), (2, True), (0, False)])
def test_a_late_check_makes_later_steps_no_ops_until_it_is_read(nobody_looks, bad, scheduler):
    on_host = in_turns(1, late_run, False, bad, scheduler)[0]
    assert on_host["num no-ops"] == 0
    has_state = {} if bad else {"undone": False, "no-ops": False}  # the first update makes the optimizer's state
    for world_size in (1, 3):
        for late in in_turns(world_size, late_run, True, bad, scheduler):
            assert late == {**on_host, "num no-ops": 5 - bad, **has_state}
    assert on_host["no-ops"]
    assert on_host["undone"]
    assert on_host["rates undone"]
    assert on_host["at"] == bad


HERE = threading.local()  # ranks that take turns are threads


def test_ranks_raise_a_late_failure_in_the_same_call_whichever_has_read_it(monkeypatch):
    def program(communicator, quick):
        HERE.rank = communicator.rank
        model = perceptron()
        optimizer = make_optimizer(model, "fused adamw")
        step = make_step(communicator, model, broken_at_bad_id("loss"), optimizer, late_check=True)
        x, y = samples()
        for call in range(4):
            before = bits(model, optimizer)
            try:
                step((x[:24], y[:24]) if call == 1 else (x[24:48] + call, y[24:48]))
            except NonFiniteError as error:
                return call, step.num_steps, str(error), bits(model, optimizer) == before
        return None

    for quick in (0, 2):
        monkeypatch.setattr(StepResult, "is_there", property(lambda self, quick=quick: HERE.rank == quick))
        results = in_turns(3, program, quick)
        assert results[0][:2] == (2, 1)
        assert results[0][2].startswith("step 2: not finite: the loss of microbatch")
        assert results[0][3]
        assert results == [results[0]] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_clipped_update_has_the_same_bits_whether_the_host_or_the_device_divides(dtype):
    def program(communicator, late):
        model = perceptron().to(dtype)
        optimizer = make_optimizer(model, "fused adamw")
        options = {"late_check": late, "max_grad_norm": 0.01}
        step = make_step(communicator, model, optimizer=optimizer, num_microbatches=3, **options)
        for k in range(6):
            step(tuple((tensor + k)[: 24 - k].to(dtype) for tensor in table()))
        step.check()
        return bits(model, optimizer)

    assert in_turns(1, program, True) == in_turns(1, program, False)


def test_a_check_is_not_late_where_the_update_is_one_of_the_cpu():
    device, optimizer = torch.device("meta"), make_optimizer(perceptron(), "fused adamw")
    scale = LossScale(device, enabled=False)
    assert FiniteCheck(device, [optimizer], scale, "raise", None).is_late
    assert not FiniteCheck(device, [optimizer], scale, "raise", None, is_offloaded=True).is_late
    with pytest.raises(UsageError, match=r"leave it or Sharded"):
        FiniteCheck(device, [optimizer], scale, "raise", True, is_offloaded=True)


def test_a_late_check_reads_what_is_there_before_the_next_step():
    late = in_turns(1, late_run, True)[0]
    assert late["undone"]
    assert late["num no-ops"] == 1
    assert late["final"] == in_turns(1, late_run, False)[0]["final"]


def test_reading_a_late_result_raises_by_itself(nobody_looks):
    def program(communicator):
        model = perceptron()
        optimizer = make_optimizer(model, "fused adamw")
        step = make_step(communicator, model, broken_at_bad_id("loss"), optimizer, late_check=True)
        result = step(tuple(t[:24] for t in samples()))
        with pytest.raises(NonFiniteError, match="step 1: not finite"):
            _ = result.loss

    in_turns(1, program)
