"""The catalog: every recipe is a short script, and a wrong name gets the right one."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from samestep.errors import UsageError
from samestep.recipes.catalog import MODULES, NAMES, module_of
from samestep.recipes.command_line import make_parser, number


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_a_script_that_fits_on_a_screen_or_two(name):
    module = import_module(module_of(name))
    assert len(Path(module.__file__).read_text().splitlines()) <= 90
    assert callable(module.main)
    assert module.__name__ in MODULES


def test_an_unknown_name_is_refused_with_a_close_one_and_all():
    with pytest.raises(UsageError, match=r"got NAME='LeNet5'; did you mean 'lenet'\? It is one of lenet, mlp"):
        module_of("LeNet5")
    with pytest.raises(UsageError, match="got NAME='xyz'; it is one of lenet, mlp, simplenet, vgg, gpt"):
        module_of("xyz")


def test_the_names_are_known_without_importing_torch():
    program = "import sys, samestep.recipes.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "0"], "argument --epochs: got 0; it must be 1 or more"),
        (["--lr", "nan"], "argument --lr: got nan; it must be a finite number, above 0"),
        (["--dropout", "1"], "argument --dropout: got 1; it must be from 0 and below 1"),
        (["--seed", "2.5"], "argument --seed: got 2.5; it must be a whole number, 0 or more"),
        (["--strategy", "fsdp"], "argument --strategy: invalid choice: 'fsdp'"),
        (["--dat", "x"], "unrecognized arguments: --dat x"),
    ],
)
def test_a_value_that_cannot_be_is_one_line_and_bad_usage(capsys, words, message):
    parser = make_parser("A recipe.", data="a file", epochs=2, batch=8, lr=0.1)
    parser.add_argument("--dropout", type=number(0, below=1, whole=False), default=0.5)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(words)
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert message in said
    assert said.count("\n") == 1
