"""The options that are checked before torch is there are those that torch's side knows."""

import re
from dataclasses import fields
from typing import get_args

import pytest
import torch

from samestep.engine.config import AuditAction
from samestep.engine.precision import PRECISIONS
from samestep.engine.strategy_options import STRATEGIES
from samestep.errors import UsageError
from samestep.recipes.settings import JobConfig, read_file
from samestep.recipes.training import OPTIMIZERS, make_scheduler

RATES = {  # of a run of 6 steps, the first two of which warm up, in parts of the learning rate
    "cosine": [1 / 3, 2 / 3, 1, 0.853553, 0.5, 0.146447],
    "linear": [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25],
    "constant": [1 / 3, 2 / 3, 1, 1, 1, 1],
}


@pytest.mark.parametrize("name", [*RATES, None])
def test_schedules_warm_up_and_end_with_the_run(name):
    def rates(warmup_steps):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        scheduler, found = make_scheduler(optimizer, name, warmup_steps, 4 + warmup_steps), []
        for _ in range(4 + warmup_steps):
            found.append(optimizer.param_groups[0]["lr"] / 0.5)
            optimizer.step()
            scheduler.step()
        return found

    expected = RATES[name or "constant"]
    assert rates(2) == pytest.approx(expected, abs=1e-6)  # the decimals above
    if name is not None:
        assert rates(0) == pytest.approx(expected[2:], abs=1e-6)


def test_a_warmup_as_long_as_the_run_is_refused_and_without_options_there_is_no_schedule():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.raises(UsageError, match="got --warmup-steps 5 for a run of 5 steps; it must be less"):
        make_scheduler(optimizer, "cosine", 5, 5)
    assert make_scheduler(optimizer, None, 0, 5) is None


def test_a_file_gives_options_by_name(tmp_path):
    toml, other = tmp_path / "a.toml", tmp_path / "b.json"
    toml.write_text(
        'recipe = "gpt"\nlr = 1\nnum-microbatches = 4\ncompile = true\nshares = [3, 1]\n'
        "[options]\nlayers = 2\ntied = false\n"
    )
    expected = {"recipe": "gpt", "lr": 1, "num_microbatches": 4, "compile": True}
    expected |= {"shares": [3, 1], "options": {"layers": "2", "tied": "False"}}
    assert read_file(str(toml)) == expected
    other.write_text('{"max_steps": 3}')
    assert read_file(str(other)) == {"max_steps": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "has 'epoch', which is no option of samestep train; did you mean 'epochs'?"),
        ('epochs = "3"', "has epochs = '3'; needed: a whole number"),
        ("epochs = true", "has epochs = True; needed: a whole number"),
        ("lr = [1]", "needed: a number"),
        ("compile = 1", "needed: true or false"),
        ("shares = 3", "needed: a list of numbers"),
        ("options = 3", "needed: a table of names and values"),
        ("best = 3", "needed: a text"),
        ('shares = ["x"]', "needed: a list of numbers"),
        ("epochs 3", "cannot be read as TOML or .json"),
    ],
)
def test_a_file_with_options_that_cannot_be_is_refused(tmp_path, text, message):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        read_file(str(tmp_path / "a.toml"))


def test_a_file_that_is_not_there_or_holds_no_names_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_file(str(tmp_path / "none.toml"))
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(UsageError, match="which holds no options by name"):
        read_file(str(tmp_path / "a.json"))


def test_the_choices_at_the_door_are_those_inside():
    inside = {"optimizer": tuple(OPTIMIZERS), "precision": tuple(PRECISIONS)}
    inside["strategy"], inside["scheduler"] = tuple(STRATEGIES), tuple(RATES)
    inside["audit_action"] = get_args(AuditAction)
    at_the_door = {each.name: each.metadata["choices"] for each in fields(JobConfig) if each.metadata.get("choices")}
    assert at_the_door == inside
