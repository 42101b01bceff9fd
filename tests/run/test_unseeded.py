"""Draws before `Run` that no seed decides are noticed, and nothing else is taken for them."""

import numpy as np
import pytest
import torch
from numpy.random import mtrand
from safetensors.torch import load_file
from torch import nn

from samestep.checkpoint.digest import state_checksum, state_digest
from samestep.checkpoint.verified_files import write_tensors
from samestep.data.checksums import tensor_checksum
from samestep.run.run import Run

MODEL = "the model has parameters that were drawn before samestep.Run, when torch's generator had no seed (weight)"
DATA = "data was made before samestep.Run, when"


@pytest.fixture(autouse=True)
def _without_a_seed():
    """Generators as in a new process."""
    before = mtrand.get_bit_generator()
    torch.seed()
    mtrand.set_bit_generator(np.random.MT19937())
    yield
    mtrand.set_bit_generator(before)


def rows():
    return torch.arange(48.0).view(16, 3)


def ones(model):
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    return model


def said(capsys, make=lambda: None, after=lambda model: None, data=rows, state=None, **options):
    """What is said on stderr of a run whose model and data are made before it, if they are."""
    model, given = make(), data()
    run = Run(8, 4)
    own = nn.Linear(3, 1) if model is None else model
    step = run.train_step(own, torch.optim.SGD(own.parameters(), 1e-4), lambda m, b: m(b).square().mean(), **options)
    if state is not None:
        step.num_steps = state
    after(own)
    for batch in run.loader(torch.randn(16, 3) if given is None else given):
        step(batch)
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("strategy", ["replicate", "sharded"])
def test_a_model_that_was_drawn_before_the_run_is_named_once_with_the_cure(capsys, strategy):
    (line,) = said(capsys, lambda: nn.Linear(3, 1), strategy=strategy)
    assert line.startswith(f"samestep: {MODEL}")
    assert "build samestep.Run first, or set a seed (torch.manual_seed) before the model" in line


def test_data_that_numpy_or_torch_drew_before_the_run_is_named(capsys):
    (line,) = said(capsys, data=lambda: torch.from_numpy(np.random.rand(16, 3)).float())
    assert f"{DATA} NumPy's generator" in line
    assert "numpy.random.seed" in line


def test_a_script_that_sets_its_own_seeds_hears_nothing(capsys):
    torch.manual_seed(0)
    np.random.seed(0)
    data = torch.from_numpy(np.random.rand(16, 3)).float()
    assert said(capsys, lambda: nn.Linear(3, 1), data=lambda: data) == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data": lambda: None},
        {"make": lambda: ones(nn.Linear(3, 1))},
        {"make": lambda: nn.Linear(3, 1), "after": ones},
        {"make": lambda: nn.Linear(3, 1), "state": 5},
    ],
    ids=["nothing drawn", "after the run", "weights loaded before", "weights loaded after", "resumed"],
)
def test_what_no_draw_before_the_run_decides_is_no_cause_for_alarm(capsys, options):
    assert said(capsys, **options) == []


def test_numbers_that_an_import_draws_are_no_cause_for_alarm(capsys):
    torch.rand(3)
    np.random.rand(3)
    assert said(capsys, data=lambda: None) == []


class Shifted(nn.Linear):
    """A layer with a frozen parameter and a buffer that have no version counter."""

    def __init__(self):
        super().__init__(3, 1)
        with torch.inference_mode():
            self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
            self.register_buffer("shift", torch.arange(3.0))

    def forward(self, x):
        return super().forward(x * self.scale + self.shift)


def test_data_of_inference_mode_is_data_as_any(capsys):
    with torch.inference_mode():
        data = torch.from_numpy(np.random.rand(16, 3)).float()
    (line,) = said(capsys, data=lambda: data)
    assert line.startswith(f"samestep: {DATA}")


@pytest.mark.parametrize("make", [Shifted, lambda: Shifted().to(torch.bfloat16).float()], ids=["made", "moved"])
def test_parts_of_models_of_inference_mode_are_trained_with_evaluated_and_saved(capsys, tmp_path, make):
    """`Module.to` leaves them without a version counter and out of inference mode: torch makes no views of those."""
    torch.manual_seed(0)
    np.random.seed(0)
    assert said(capsys, make) == []
    torch.seed()
    assert f"samestep: {MODEL}" in said(capsys, make)[0]
    found = Run(8, 4).evaluate(Shifted(), rows(), {"value": lambda output, b: output[:, 0]}, forward=lambda m, b: m(b))
    assert torch.isfinite(torch.tensor(found["value"]))
    torch.manual_seed(3)
    model = make()
    write_tensors(tmp_path / "model", dict(model.state_dict()))
    plain = nn.Linear(3, 1)  # with all of that as tensors that have a version counter
    plain.scale, plain.shift = nn.Parameter(torch.zeros(3)), nn.Buffer(torch.zeros(3))
    plain.load_state_dict(load_file(tmp_path / "model"))
    assert torch.equal(plain.scale, torch.ones(3))
    assert state_digest(model, []) == state_digest(plain, [])
    assert state_checksum(model) == state_checksum(plain)
    assert tensor_checksum(model.scale) == tensor_checksum(plain.scale)


def test_parameters_without_values_disturb_nothing(capsys):
    lazy = nn.LazyLinear(3)
    assert f"samestep: {MODEL}" in said(capsys, lambda: nn.Linear(3, 1))[0]
    del lazy
