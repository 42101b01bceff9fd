"""The table of causes: each is found and confirmed in its smallest script, and in other programs that have it."""

import json
import random
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cause_pages import KEYS, PAGE, cure, section
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel.distributed import _DDPSink
from torch.optim import optimizer as hooks
from torch.utils.data import DataLoader, TensorDataset

from samestep.cli import explain as explain_module
from samestep.cli.main import main
from samestep.cli.verify import show
from samestep.patch import applied
from samestep.verify import verdict as verdict_module
from samestep.verify.causes.evidence import Evidence
from samestep.verify.causes.means import divisor
from samestep.verify.causes.rounding import ROUNDING
from samestep.verify.causes.table import CAUSES, FactRecorder
from samestep.verify.program_runner import RunSpec

BREAKERS = Path(__file__).resolve().parent / "breakers"
ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    "alone": "alone",
    "learning_rate_stepped": "learning_rate",
    "own_mean": "mean_of_means",
    "skipped": "loss_scale",
    "stochastic_depth": "draws",
    "tokens": "mean_of_means",
}
"""Scripts that have a cause in another way than the page's script; held to `allclose`."""

API = {"api_dataset_generator": "own_generator", "api_loss_draws": "own_generator", "api_module_state": "module_state"}
"""Programs that use samestep and still break its promise; held to `bitwise`."""

QUICK = ("alone", "mean_of_means", "stream", "tokens")
TOGETHER = (
    *("augmentation", "batchnorm", "buffers", "dropout", "global_batch", "learning_rate", "local_clip"),
    *("mean_of_means", "module_state", "order", "sampler"),
)
"""The breakers that `several.py` can switch on."""
PAIRS = [
    ("order", "sampler"),  # whose antidotes are at one place
    *random.Random(2024).sample([(one, other) for one in TOGETHER for other in TOGETHER if one < other], 4),
]

UNEXCHANGED = {
    "no_sync": "1 of 2 forwards were in no_sync",
    "thawed": "it required no gradient when DistributedDataParallel wrapped the model",
    "module": "DistributedDataParallel was not called in that step, but a module within it (.module)",
    "forgotten": "nothing exchanged it",
}
"""Ways of `unexchanged.py` in which gradients stay on their ranks, and the reasons that are given."""


def quick(name):
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)


def named(verdict):
    return {cause.key for cause in verdict.causes}


@pytest.mark.parametrize("name", [quick(name) for name in sorted(ROWS)])
def test_a_breaker_is_caught_named_and_confirmed_without_which_the_runs_agree(verdict_on, name):
    verdict = verdict_on(BREAKERS / f"{name}.py", steps=6)
    assert verdict.difference is not None
    assert named(verdict) == {ROWS[name]}
    assert verdict.unexplained is None


def test_a_cause_of_more_than_rounding_is_confirmed_beside_rounding_if_bits_are_required(verdict_on):
    verdict = verdict_on(BREAKERS / "loss_factor.py", steps=6, tier="bitwise")
    assert named(verdict) == {"loss_factor", "rounding"}
    assert verdict.unexplained is None


def test_twin_without_a_sign_of_another_order_nothing_is_taken_for_rounding(verdict_on, monkeypatch):
    monkeypatch.setattr(verdict_module, "ROUNDING", replace(ROUNDING, suspect=lambda evidence: None))
    verdict = verdict_on(BREAKERS / "loss_factor.py", steps=6, tier="bitwise")
    assert "rounding" not in named(verdict)
    assert verdict.unexplained is not None


def test_a_module_that_one_device_calls_by_itself_has_the_name_that_it_has_on_several(runner_of, script):
    program = script(
        """
        import torch
        import torch.distributed as dist
        from torch import nn

        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

            def forward(self, x):
                return self.net(x)

        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        whole = Whole()
        call = nn.parallel.DistributedDataParallel(whole) if world_size > 1 else whole.net
        call(torch.randn(24, 4)[rank::world_size]).square().mean().backward()
        torch.optim.SGD(whole.parameters(), lr=0.1).step()
        """
    )
    runner = runner_of(program)
    evidence = Evidence(tuple(runner.record(RunSpec(devices, 1)) for devices in ("cpu:1", "cpu:2")))
    seen = {cause.key: cause.suspect(evidence) for cause in CAUSES}
    assert seen["batchnorm"].startswith("module net.1 (BatchNorm1d) took")
    assert seen["batchnorm"].endswith(": 24 samples on 1 device, 12 samples on 2 devices")
    assert "in net.2 (p=0.5), from" in seen["dropout"]


@pytest.mark.parametrize("way", UNEXCHANGED)
def test_of_a_gradient_that_is_not_exchanged_the_reason_is_given(verdict_on, way):
    verdict = verdict_on(BREAKERS / "unexchanged.py", way, steps=3)
    assert named(verdict) == {"alone"}
    assert verdict.unexplained is None
    assert verdict.causes[0].evidence.endswith(f"; {UNEXCHANGED[way]}")


@pytest.mark.parametrize("way", ["blocks", "held", "workers"])
def test_a_stream_that_is_not_shared_in_turn_is_named_in_all_its_ways(verdict_on, way):
    verdict = verdict_on(BREAKERS / "stream.py", way, steps=3)
    assert named(verdict) == {"stream"}
    assert verdict.unexplained is None
    assert "islice" in verdict.causes[0].advice


@pytest.mark.parametrize(("way", "causes"), [("", "unshared order"), ("alike", "unshared")])
def test_samples_that_each_device_draws_for_itself_are_not_shared_whatever_their_sampler(verdict_on, way, causes):
    verdict = verdict_on(BREAKERS / "weighted.py", way, steps=3)
    assert named(verdict) == set(causes.split())
    assert verdict.unexplained is None
    assert all("[rank::world_size]" in cause.advice for cause in verdict.causes)


@pytest.mark.parametrize("name", ["skipped", "stochastic_depth", "stream", "unexchanged", "weighted"])
def test_the_cure_of_a_breaker_takes_it_away(verdict_on, name):
    assert verdict_on(BREAKERS / f"{name}.py", "cured").agrees


@pytest.mark.parametrize("name", [quick(name) for name in sorted(API)])
def test_a_program_of_samesteps_own_that_breaks_its_promise_is_told_why(verdict_on, name):
    verdict = verdict_on(BREAKERS / f"{name}.py", steps=4)
    assert verdict.family == "api"
    assert named(verdict) == {API[name]}
    assert verdict.unexplained is None


@pytest.mark.parametrize(
    "pair", [PAIRS[0], *(pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS[1:])], ids="-".join
)
def test_two_breakers_are_both_named_and_nothing_else(verdict_on, pair):
    verdict = verdict_on(BREAKERS / "several.py", *pair, steps=4)
    assert named(verdict) == set(pair)
    assert verdict.unexplained is None


def test_another_sampler_on_several_devices_is_found_beside_another_batch(verdict_on):
    verdict = verdict_on(BREAKERS / "two_samplers.py", steps=2)
    assert named(verdict) == {"global_batch", "order"}
    assert verdict.unexplained is None


@pytest.mark.slow
def test_without_a_breaker_the_script_of_all_breakers_raises_no_alarm(verdict_on):
    assert verdict_on(BREAKERS / "several.py", steps=4).agrees


def test_what_a_program_divides_its_loss_by_is_read_from_its_graph():
    x, weights = torch.randn(6, requires_grad=True), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.5])
    total = (x * weights).sum()
    for loss, count in (
        (x.mean(), 6),
        (total / weights.sum(), 3.5),
        (-x[:4].mean() / 2, 8),
        (total * 0.25, 4),
        (1024 * (total / 5), 5),
        (x.view(2, 3).mean(0).sum() / 3, 3),
    ):
        assert divisor(loss)[1] == count
    module = SimpleNamespace(_ddp_sink_clone=True)  # of it DistributedDataParallel's sink asks no more in a forward
    _, passed = _DDPSink.apply(lambda: module, 2 * x, total / 5)
    assert divisor(passed / 1)[1] == 5
    for loss in (total, F.mse_loss(x, weights), x.mean() + total, total / x.sum(), x, weights.mean(), [total / 2]):
        assert divisor(loss) is None


def test_every_cause_is_documented_and_no_other():
    assert sorted(KEYS) == sorted(cause.key for cause in CAUSES)


def explained(capsys, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["samestep", "explain", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr()
    return stopped.value.code, said.out, said.err


@pytest.mark.parametrize("key", KEYS)
def test_the_command_of_a_verdict_s_line_prints_the_page_of_the_cause(key, capsys, monkeypatch):
    code, said, _ = explained(capsys, monkeypatch, key)
    assert code == 0
    assert said.startswith(f"# {key}\n\n**Sign.**")
    assert all(lines in said for lines in cure(key))
    assert not re.search(r"\]\(|^##", said, re.MULTILINE)


def test_the_causes_are_listed_without_a_name_and_by_a_wrong_one(capsys, monkeypatch):
    code, said, _ = explained(capsys, monkeypatch)
    assert code == 0
    assert all(f"\n| `{key}` |" in said for key in KEYS)
    code, _, said = explained(capsys, monkeypatch, "batch_norm")
    assert code == 2
    assert said.startswith("samestep: error: got CAUSE='batch_norm'; did you mean 'batchnorm'? It is one of ")
    assert all(key in said for key in KEYS)


def test_an_installed_package_has_the_page_where_the_command_looks_for_them():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {"docs/causes.md": f"samestep/{explain_module.PAGES[0].relative_to(explain_module.PACKAGE)}"}
    assert explain_module.PAGES[1] == PAGE


def judged(verdict_on, path, command, text):
    """The verdict on a script by the command that is beside it."""
    options = dict(zip(command[2:-1:2], command[3:-1:2], strict=True))
    assert command[:2] == ["samestep", "verify"]
    assert path.name == command[-1]
    path.write_text(text, encoding="utf-8")
    steps = int(options.get("--steps", 20))
    return verdict_on(path, devices=options["--devices"].split(","), steps=steps, tier=options.get("--tier"))


def named_lines(printed):
    """The lines of causes, without numbers: a loss has other last digits on another kind of CPU."""
    lines = printed.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("cause"))
    return [re.sub(r"[\d.]+(e-?\d+)?", "#", line) for line in lines[start:]]


@pytest.mark.parametrize("key", [quick(key) for key in KEYS])
def test_verify_names_the_cause_of_its_smallest_script_in_its_words(verdict_on, tmp_path, capsys, key):
    script, command, output, _ = section(key)
    verdict = judged(verdict_on, tmp_path / f"cause_{key}.py", command, script)
    assert key in named(verdict)
    show(verdict)
    assert named_lines(capsys.readouterr().out.replace(f"{tmp_path}/", "")) == named_lines(output)


@pytest.mark.parametrize("key", [quick(key) for key in KEYS if section(key)[3] is not None])
def test_the_cure_of_a_page_takes_the_cause_away(verdict_on, tmp_path, key):
    _, command, _, cured = section(key)
    verdict = judged(verdict_on, tmp_path / f"cause_{key}.py", command, cured)
    assert key not in named(verdict)
    assert verdict.agrees or key == "nondeterministic"  # kernels still add by the shape of the local batch


def trained():
    """The weights after a short training that draws, drops, normalises, clips and loads; and all generators' states."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)
    data = TensorDataset(torch.randn(24, 4), torch.randint(3, (24,)))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for x, y in DataLoader(data, batch_size=5, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x + torch.randn_like(x) * random.random()), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    state = [*model.state_dict().values(), torch.get_rng_state(), torch.tensor(np.random.random())]
    return [*state, torch.tensor(random.random())]


@pytest.fixture(scope="module")
def warm():
    """The first optimizer imports more of torch, which then has more names."""
    trained()


def places(*owners):
    return [dict(vars(owner)) for owner in owners]


OWNERS = (torch, torch.nn.functional, torch.Tensor, nn.Module, torch.optim.Optimizer, DataLoader, np.random, random)


def test_listening_changes_no_number_and_leaves_torch_as_it_was(warm):
    alone, before = trained(), places(*OWNERS)
    recorder = FactRecorder()
    with applied(recorder.patches()):
        listened = trained()
        facts = recorder.facts()
    assert all(torch.equal(one, other) for one, other in zip(alone, listened, strict=True))
    assert places(*OWNERS) == before
    assert {"dropout", "batch_norm", "clip", "draw", "mean", "backward", "forward"} <= {fact["name"] for fact in facts}
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause.neutralise], ids=lambda cause: cause.key)
def test_an_antidote_can_be_taken_and_leaves_torch_as_it_was(warm, cause):
    before, flags = places(*OWNERS), torch.get_deterministic_debug_mode()
    with cause.neutralise():
        assert all(torch.isfinite(value).all() for value in trained())
    assert places(*OWNERS) == before
    assert torch.get_deterministic_debug_mode() == flags
    assert not hooks._global_optimizer_pre_hooks


def test_dropout_keeps_its_own_defaults_while_it_is_recorded():
    recorder, x = FactRecorder(), torch.ones(64)
    with applied(recorder.patches()):
        assert torch.equal(F.alpha_dropout(x, 0.5), x)  # in training only if it is told so
        assert not torch.equal(F.dropout(x), x)
        F.scaled_dot_product_attention(x.view(1, 8, 8), x.view(1, 8, 8), x.view(1, 8, 8), dropout_p=0.25)
    assert sorted(fact["p"] for fact in recorder.facts() if fact["name"] == "dropout") == [0.25, 0.5]
