"""Precision: autocast, and the loss scale of 16-bit floats."""

import pytest
import torch
from engine_programs import bits, in_turns, make_step, mean_squared, perceptron, table
from torch import nn
from worlds import cpu_only

from samestep.engine import precision as precision_module
from samestep.engine.losses import Mean
from samestep.engine.norms import block_norm, block_norms
from samestep.engine.precision import INITIAL_SCALE, LossScale
from samestep.errors import NonFiniteError
from samestep.metrics import mean_squared_error
from samestep.run.run import Run

ALWAYS = torch.tensor(True)


def large(model, batch):
    """A loss so large that scaled gradients leave the range of float16 at first."""
    return 200.0 * mean_squared(model, batch)


def overflowing(communicator, num_steps=12, loss=large, **options):
    """Steps in float16: the digest, which steps were skipped, and the scale after each."""
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = make_step(communicator, model, loss, optimizer, 6, precision="16-mixed", **options)
    seen = []
    for _ in range(num_steps):
        before = bits(model, optimizer)
        result = step(table())
        scale = step.state_dict()["loss_scale"]["scale"]
        seen.append((result.skipped, scale, bits(model, optimizer) == before, result.loss.hex()))
    return bits(model, optimizer), seen


def test_an_overflow_halves_the_scale_and_leaves_the_state_alone():
    ((_, seen),) = in_turns(1, overflowing)
    skipped = [entry[0] for entry in seen]
    assert skipped[0]
    assert not skipped[-1]
    scale = INITIAL_SCALE / 32  # of a sum over 24 samples
    for was_skipped, after, unchanged, loss in seen:
        assert after == (scale / 2 if was_skipped else scale)
        assert unchanged == was_skipped
        assert torch.isfinite(torch.tensor(float.fromhex(loss)))
        scale = after


def squares(model, batch):
    """A loss a sample, whose gradient is large."""
    return (300 * (model(batch[0]).float() - batch[1])).square().squeeze(1)


TOKENS = 1024  # a sample
FIRST_UPDATES = 24


def squares_by_token(model, batch):
    """The same mean, of as many equal losses a sample as it has tokens."""
    return Mean(TOKENS * squares(model, batch).sum(), torch.tensor(TOKENS * len(batch[0])))


FORMS = {
    "tokens": (squares_by_token, {}),
    "mean": (lambda model, batch: squares(model, batch).mean(), {}),
    "loss a sample": (squares, {}),
    "counts": (lambda model, batch, count: squares(model, batch).sum() / count, {"counts_fn": lambda b: len(b[0])}),
}


@pytest.mark.parametrize("num_microbatches", [1, 24])
@pytest.mark.parametrize("form", FORMS)
def test_as_many_first_updates_are_skipped_as_with_torchs_scaler_in_a_plain_loop(form, num_microbatches):
    expected = skipped_by_torch()
    assert expected >= 2
    # A microbatch's gradient may be larger than the mean's, whose terms cancel, and 24 samples round up to 32. The
    # count of tokens is known after a step.
    for world_size in {1, min(2, num_microbatches)}:
        assert all(abs(count - expected) <= 2 for count in in_turns(world_size, num_skipped, form, num_microbatches))


def test_twin_a_scale_for_samples_skips_an_update_for_each_doubling_of_the_tokens_in_one(monkeypatch):
    real = LossScale.update
    monkeypatch.setattr(LossScale, "update", lambda self, overflowed, active, count: real(self, overflowed, active))
    assert in_turns(1, num_skipped, "tokens", 4)[0] >= skipped_by_torch() + 8


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def num_skipped(communicator, form, num_microbatches):
    """How many of the first updates are skipped."""
    (loss, options), model = FORMS[form], small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    options = {**options, "precision": "16-mixed", "on_nonfinite": "skip"}
    step = make_step(communicator, model, loss, optimizer, num_microbatches, **options)
    return [step(table()).skipped for _ in range(FIRST_UPDATES)].count(True)


def skipped_by_torch():
    """The same of a plain loop with torch's scaler."""
    model, scaler, expected = small_model(), torch.amp.GradScaler("cpu"), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for _ in range(FIRST_UPDATES):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = squares(model, table()).mean()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        expected += scaler.get_scale() < before
    return expected


def test_a_gradient_that_never_fits_is_an_error_in_the_end():
    def endless(model, batch):
        return (
            torch.where(batch[1] > 5, 1.0, 1e38 * model(batch[0])).square().mean().clamp(max=3) * 0
            + (1e30 * model(batch[0]).float()).mean()
        )

    def program(communicator):
        with pytest.raises(NonFiniteError) as caught:
            overflowing(communicator, 40, endless)
        return str(caught.value)

    messages = in_turns(2, program)
    assert messages[0] == messages[1]
    assert "gradient of microbatch" in messages[0]


def test_a_loss_that_is_not_finite_is_an_error_at_once():
    with pytest.raises(NonFiniteError, match="the loss of microbatch 0"):
        in_turns(1, overflowing, 3, lambda m, b: mean_squared(m, b) * float("nan"))


def test_good_steps_in_a_row_double_the_scale(monkeypatch):
    monkeypatch.setattr(precision_module, "GROWTH_INTERVAL", 3)
    scale = LossScale(torch.device("cpu"), enabled=True)
    no, yes = torch.tensor(False), torch.tensor(True)
    seen = []
    for overflowed in (no, no, no, no, yes, no, no, no):
        scale.update(overflowed, yes)
        seen.append(float(scale.scale) / INITIAL_SCALE)
    assert seen == [1, 1, 2, 2, 1, 1, 1, 2]


def test_the_scale_never_grows_to_infinity(monkeypatch):
    monkeypatch.setattr(precision_module, "GROWTH_INTERVAL", 1)
    scale = LossScale(torch.device("cpu"), enabled=True)
    for _ in range(200):
        scale.update(torch.tensor(False), ALWAYS)
    assert float(scale.scale) == 2.0**127


def test_the_scale_survives_saving_and_loading():
    scale, other = (LossScale(torch.device("cpu"), enabled=True) for _ in range(2))
    scale.update(torch.tensor(True), torch.tensor(False))  # of a step that is not active
    assert scale.state_dict() == {"scale": INITIAL_SCALE, "good_steps": 0.0}
    scale.update(torch.tensor(True), ALWAYS)
    scale.update(torch.tensor(False), ALWAYS)
    other.load_state_dict(scale.state_dict())
    assert other.state_dict() == scale.state_dict() == {"scale": INITIAL_SCALE / 2, "good_steps": 1.0}
    assert LossScale(torch.device("cpu"), enabled=False).state_dict() == {}


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)]
)
def test_the_forward_runs_in_the_precision_asked_for_and_parameters_stay_float32(precision, dtype):
    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 1))
        seen = set()
        model[0].register_forward_hook(lambda module, args, output: seen.add(output.dtype))
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_squared, precision=precision)
        step(table())
        run.evaluate(model, table(), {"loss": lambda output, batch: output.float().squeeze(1)}, precision=precision)
        return seen, {p.dtype for p in model.parameters()}, {p.grad.dtype for p in model.parameters()}

    assert in_turns(1, program)[0] == ({dtype}, {torch.float32}, {torch.float32})


def test_each_norm_has_at_least_32_bits_whatever_stands_before_it():
    half, rough = torch.full((4,), 60000.0, dtype=torch.float16), torch.tensor([1.0, 0.1], dtype=torch.bfloat16)
    single, double = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 1e-9], dtype=torch.float64)
    for tensors in ([single, half, rough], [half, single, rough, double], [double, rough, half, single]):
        norms = block_norms(tensors)
        assert [norm.dtype for norm in norms] == [torch.promote_types(t.dtype, torch.float32) for t in tensors]
        for norm, tensor in zip(norms, tensors, strict=True):
            assert torch.equal(norm, block_norm(tensor))
    assert block_norms([single, half])[1] == 120000


def in_autocast_of_the_script(communicator, is_inside):
    """Steps and evaluations, of the weights and of others that take their place, within an autocast or without."""
    run = Run(24, 8, communicator=communicator)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_squared, precision="bf16-mixed")
    metrics = {"error": mean_squared_error}
    with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
        model(table()[0])
        found = [run.evaluate(model, table(), metrics, precision="bf16-mixed")]
        found += [step(table()).loss for _ in range(3)]
        model[0].weight.data = model[0].weight.data * 2
        found += [run.evaluate(model, table(), metrics, precision="bf16-mixed")]
        after = model[0](table()[0]).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(after, model[0](table()[0]).float()) == is_inside
    return found, bits(step)


def half_in_autocast(communicator, is_inside):
    """Steps of a model in float16 within an autocast to bfloat16 or without: their losses and bits."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_step(communicator, model, lambda model, x: model(x[0].half()).float().square().mean(), optimizer, 6)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
        return [step(table()).loss for _ in range(3)], bits(model, optimizer)


@cpu_only("autocast of the CPU")
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_autocast_of_the_script_changes_no_exchange(ranks):
    assert in_turns(ranks, half_in_autocast, True) == in_turns(ranks, half_in_autocast, False)


@cpu_only("autocast of the CPU")
def test_an_autocast_of_the_script_keeps_no_weights_beyond_an_update():
    inside, outside = (in_turns(1, in_autocast_of_the_script, is_inside)[0] for is_inside in (True, False))
    assert inside == outside
    assert len(set(inside[0][1:4])) == 3
