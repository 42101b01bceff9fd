"""The page of ten recipes: each script differs by its cause in the words of the page, and by its cure no more."""

import re
from pathlib import Path

import pytest
from cause_pages import changed

from samestep.cli.verify import show

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "why"
SECTIONS = (ROOT / "docs" / "ten-recipes.md").read_text(encoding="utf-8").split("\n## ")
RECIPES = {name: text for text in SECTIONS for name in re.findall(r"\]\(\.\./examples/why/(\w+)\.py\)", text)}
QUICK, UNWRAPPED = ("batchnorm", "noise", "repeats"), "unwrapped"


def quick(name):
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)


def shown(name, language):
    (text,) = re.findall(rf"^```{language}\n(.*?)\n```$", RECIPES[name], re.MULTILINE | re.DOTALL)
    return text


def without_digits(line):
    return re.sub(r"\d[\d.e-]*", "#", line)


def test_the_page_has_ten_scripts_and_there_are_no_others():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {*RECIPES}
    assert len(RECIPES) == 10


@pytest.mark.parametrize("name", [quick(name) for name in RECIPES])
def test_verify_names_the_one_cause_of_a_recipe_in_the_words_of_the_page(verdict_on, capsys, name):
    verdict = verdict_on(SCRIPTS / f"{name}.py", steps=20)
    show(verdict)
    printed = [without_digits(line) for line in capsys.readouterr().out.replace(f"{ROOT}/", "").splitlines()]
    for line in shown(name, "text").splitlines():
        pattern = re.escape(without_digits(line)).replace("…", ".*")
        assert [each for each in printed if re.fullmatch(pattern, each)], printed
    assert len(verdict.causes) == 1
    assert verdict.unexplained is None


@pytest.mark.parametrize("name", [quick(name) for name in RECIPES])
def test_the_cure_of_a_recipe_lets_the_runs_agree(verdict_on, tmp_path, name):
    path = tmp_path / f"{name}.py"
    path.write_text(changed((SCRIPTS / path.name).read_text(encoding="utf-8"), shown(name, "diff")), encoding="utf-8")
    assert verdict_on(path, steps=20).agrees


@pytest.mark.parametrize("name", [quick(name) for name in RECIPES])
def test_on_logical_devices_a_recipe_has_the_same_bits_or_is_wrong_on_any(verdict_on, name):
    verdict = verdict_on(SCRIPTS / f"{name}.py", steps=20, logical=2)
    assert [cause.key for cause in verdict.causes] == ["alone"] * (name == UNWRAPPED)
    assert verdict.agrees == (verdict.reached == "bitwise") == (name != UNWRAPPED)
