"""`samestep verify` on scripts of the frameworks, as their documentation writes them."""

from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent / "frameworks"
NEEDED = {"accelerate": "accelerate", "lightning": "lightning", "fabric": "lightning", "transformers": "transformers"}
STEPS = 3

FIXES = {
    "ddp": {"global_batch": "batch_size // world_size", "batchnorm": "GroupNorm", "learning_rate": "the schedule"},
    "accelerate": {
        "global_batch": "DataLoaderConfiguration(split_batches=True)",
        "order": "use_seedable_sampler=True",
        "dropout": "samestep run --logical-devices V",
        "learning_rate": "split_batches=True",
    },
    "lightning": {"global_batch": "trainer.world_size", "batchnorm": "Trainer(sync_batchnorm=True)"},
    "fabric": {"sampler": "drop_last=True"},
    "transformers": {
        "global_batch": "per_device_train_batch_size",
        "dropout": "resid_pdrop",
        "mean_of_means": "average_tokens_across_devices=True",
    },
}
"""The causes in each script, and what their fixes name; with the argument `fixed` the script has these fixes."""


def script(name):
    for package in ("sklearn", *filter(None, [NEEDED.get(name)])):
        if find_spec(package) is None:  # not imported here: it would change the environment
            pytest.skip(f"{package} is not installed: pip install samestep[frameworks,recipes]")
    return SCRIPTS / f"{name}_digits.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXES)
def test_the_causes_in_a_script_of_a_framework_are_named_with_fixes_in_its_own_words(verdict_on, name):
    verdict = verdict_on(script(name), steps=STEPS)
    assert verdict.family == "ddp"
    assert verdict.difference.quantity == "samples"
    assert verdict.difference.step == (3 if name == "fabric" else 1)
    fixes = {cause.key: cause.advice for cause in verdict.causes}
    assert fixes.keys() == FIXES[name].keys()
    assert all(words in fixes[key] for key, words in FIXES[name].items())
    assert verdict.unexplained is None


@pytest.mark.slow
def test_samples_that_accelerate_repeats_to_make_batches_even_are_found(verdict_on):
    verdict = verdict_on(script("accelerate"), "fixed", "uneven", steps=STEPS)
    assert verdict.difference.step == 3
    assert [cause.key for cause in verdict.causes] == ["sampler"]
    assert "drop_last=True" in verdict.causes[0].advice
    assert "11 of them were taken twice" in verdict.causes[0].evidence


@pytest.mark.slow
def test_a_sample_that_fabric_repeats_in_a_batch_which_drop_last_keeps_is_found(verdict_on):
    verdict = verdict_on(script("fabric"), "fixed", "filled", steps=STEPS)
    assert [cause.key for cause in verdict.causes] == ["sampler"]
    assert "length a multiple of the number of devices" in verdict.causes[0].advice
    assert "unless they fill its last batch up" in verdict.causes[0].advice


@pytest.mark.slow
def test_a_loss_that_the_trainer_of_transformers_multiplies_by_the_devices_is_found(verdict_on):
    verdict = verdict_on(script("transformers"), "classes", steps=STEPS)
    fixes = {cause.key: cause.advice for cause in verdict.causes}
    assert fixes.keys() == {"global_batch", "dropout", "loss_factor"}
    assert "accepts_loss_kwargs = False" in fixes["loss_factor"]
    assert verdict_on(script("transformers"), "classes", "fixed", steps=STEPS).agrees


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXES)
def test_once_fixed_a_script_of_a_framework_is_equal_up_to_rounding(verdict_on, name):
    verdict = verdict_on(script(name), "fixed", steps=STEPS)
    assert verdict.agrees, verdict
    assert verdict.reached == "allclose"
    assert verdict.compared.samples == STEPS * (48 if name == "ddp" else 24)
