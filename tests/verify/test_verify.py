"""`samestep verify`: programs that agree reach their tier; of others the place and the cause are found."""

import json
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samestep.cli.main import app, main
from samestep.cli.verify import show
from samestep.errors import UsageError, WorkerError

HERE = Path(__file__).resolve().parent
BREAKERS = HERE / "breakers"
EXAMPLES = HERE.parents[1] / "examples"
ADOPTED = {"num_microbatches": 4, "seed": 0, "wrap": None, "virtual": True}

PARALLEL = """
    import torch, torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for number in range(6):
        x = torch.randn(12, 3)
        mine = SHARE
        loss = model(mine).square().mean()
        optimizer.zero_grad()
        (loss * FACTOR).backward()
        optimizer.step()
"""


def parallel(lr="0.1", share="x[rank::size]", factor="1"):
    return PARALLEL.replace("LR", lr).replace("SHARE", share).replace("FACTOR", factor)


@pytest.fixture
def command():
    """Calls the command in this process, as a user would: the exit code and what it printed."""

    def call(*arguments):
        result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout

    return call


def test_distributed_data_parallel_as_it_should_be_is_equal_up_to_rounding(verdict_on):
    verdict = verdict_on(BREAKERS / "clean.py", devices=("cpu:1", "cpu:2", "cpu:3"))
    assert verdict.agrees
    assert (verdict.family, verdict.required, verdict.reached) == ("ddp", "allclose", "allclose")
    assert (verdict.compared.steps, verdict.compared.parameters, verdict.compared.samples) == (4, 4, 48)
    assert verdict.compared.nonzero_gradients == 16


@pytest.mark.parametrize(
    ("path", "adopt", "family", "samples"),
    [(BREAKERS / "api_clean.py", None, "api", 36), (BREAKERS / "adopted_clean.py", ADOPTED, "adopted", 33)],
    ids=("api", "adopted"),
)
def test_a_program_of_samestep_and_an_adopted_script_are_equal_to_the_bit(verdict_on, path, adopt, family, samples):
    verdict = verdict_on(path, adopt=adopt, steps=3)
    assert verdict.agrees
    assert (verdict.family, verdict.reached, verdict.compared.samples) == (family, "bitwise", samples)


@pytest.mark.parametrize(
    ("kind", "tier", "devices"),
    [
        ("pipeline", "bitwise", ("cpu:1", "cpu:2")),
        ("tensor", "allclose", ("cpu:1", "cpu:2")),
        pytest.param("tensor", "bitwise", ("cpu:2", "cpu:4"), marks=pytest.mark.slow),
        ("sharded", "bitwise", ("cpu:1", "cpu:2")),
        ("zero1", "bitwise", ("cpu:1", "cpu:2")),
    ],
)
def test_of_sharded_state_the_unsharded_tensors_are_compared(verdict_on, kind, tier, devices):
    verdict = verdict_on(BREAKERS / "api_strategies.py", kind, devices=devices, tier=tier)
    assert verdict.agrees
    assert (verdict.family, verdict.reached) == ("api", tier)
    assert (verdict.compared.steps, verdict.compared.parameters, verdict.compared.samples) == (4, 4, 48)
    assert (verdict.compared.microbatches, verdict.compared.nonzero_gradients) == (16, 16)


def test_twin_features_that_a_softmax_reads_in_parts_are_not_equal_even_up_to_rounding(verdict_on):
    verdict = verdict_on(BREAKERS / "api_strategies.py", "wrong", devices=("cpu:1", "cpu:2"), tier="allclose")
    assert not verdict.agrees
    assert verdict.reached == "sample-exact"


def test_batch_norm_is_found_named_confirmed_and_told(verdict_on, capsys):
    verdict = verdict_on(BREAKERS / "batchnorm.py")
    assert not verdict.agrees
    assert verdict.difference.step == 0
    assert (verdict.place.type, verdict.place.direction) == ("BatchNorm1d", "forward")
    assert [cause.key for cause in verdict.causes] == ["batchnorm"]
    assert verdict.unexplained is None
    assert verdict.reached == "count-exact"
    show(verdict)
    output = capsys.readouterr().out
    assert "cause       BatchNorm uses the statistics of each device's own batch" in output
    assert "where       1 (BatchNorm1d), forward: output differs between cpu:1 and cpu:2" in output
    assert "differs     reached: count-exact" in output


def test_a_cause_that_is_not_in_the_table_is_not_made_up(verdict_on, script):
    verdict = verdict_on(script(parallel(factor="(1 + 0.1 * size)")))
    assert not verdict.agrees
    assert verdict.causes == ()
    assert verdict.unexplained is not None
    assert (verdict.difference.step, verdict.difference.quantity) == (0, "loss")
    assert (verdict.place.module, verdict.place.direction) == ("2", "backward")


def test_what_happens_after_the_backward_is_placed_there(verdict_on, script):
    scaled = "for p in model.parameters(): p.grad *= 1 + 0.1 * size\n        optimizer.step()"
    verdict = verdict_on(script(parallel().replace("optimizer.step()", scaled)))
    assert (verdict.difference.quantity, verdict.place.direction) == ("gradient", "exchange")


def test_a_program_that_ends_its_process_group_is_not_told_that_it_never_started_one(verdict_on, script):
    verdict = verdict_on(script(parallel(factor="(1 + 0.1 * size)") + "    dist.destroy_process_group()\n"), steps=20)
    assert verdict.unexplained is not None
    assert "alone" not in {cause.key for cause in verdict.suspects}


def test_inputs_that_differ_are_told_before_any_module_and_what_is_not_explained_proves_no_count(verdict_on, script):
    shifted = parallel(share="x[rank::size] + size")
    verdict = verdict_on(script(shifted))
    assert verdict.unexplained is not None
    assert verdict.reached in (None, "sample-exact")
    assert verdict.place.direction == "input"
    assert "other contents" in verdict.place.text


PLAIN = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "adopt", "refusal"),
    [
        (parallel(lr="0.0"), None, "no parameter changed"),
        ("print('nothing to do')", None, "no optimizer took a step"),
        (PLAIN.replace("model(", "model.forward("), ADOPTED, "--wrap"),
    ],
    ids=("nothing is learned", "no step", "nothing is shared out"),
)
def test_agreement_of_runs_in_which_nothing_happens_is_refused(verdict_on, script, text, adopt, refusal):
    verdict = verdict_on(script(text), adopt=adopt)
    assert verdict.difference is None
    assert not verdict.agrees
    assert refusal in verdict.refusals[0]


def test_rounding_that_a_program_makes_large_is_no_difference(verdict_on, script):
    # The last bias cancels out: its gradient is nothing but rounding, which Adam makes as large as any other.
    adam = "torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-20)"
    text = parallel(share="torch.cat([x[rank::size], torch.ones(1, 3)])").replace(
        "torch.optim.SGD(model.parameters(), lr=0.1)", adam
    )
    text = text.replace("loss = model(mine).square()", "out = model(mine); loss = (out[:-1] - out[-1:]).square()")
    verdict = verdict_on(script(text), steps=6)
    assert verdict.reached == "allclose"
    assert verdict.difference is None


@pytest.mark.slow
def test_the_bits_of_distributed_data_parallel_are_not_those_of_one_device(verdict_on):
    verdict = verdict_on(BREAKERS / "clean.py", tier="bitwise", steps=2)
    assert not verdict.agrees
    assert (verdict.required, verdict.reached) == ("bitwise", "allclose")
    assert verdict.difference.relative < 1e-5


def test_a_program_that_fails_is_an_error_with_its_own_words(verdict_on, script):
    trained = textwrap.dedent(parallel())
    with pytest.raises(WorkerError, match=r"failed on cpu:2.*\n(.*\n)*.*only one"):
        verdict_on(script(f"import os\nif os.environ['WORLD_SIZE'] != '1': raise ValueError('only one')\n{trained}"))


def test_a_program_that_starts_its_ranks_itself_is_told_so_at_once(verdict_on, script):
    with pytest.raises(WorkerError, match="starts its ranks itself"):
        verdict_on(script("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)"), adopt=None)


def test_a_learning_rate_scaled_by_the_devices_is_named_in_programs_of_samesteps_own_too(verdict_on, script):
    text = """
        import torch, samestep
        from torch import nn

        run = samestep.Run(global_batch_size=12, num_microbatches=4, seed=0)
        model, x = nn.Linear(3, 1), torch.randn(24, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * run.world_size)
        step = run.train_step(model, optimizer, lambda model, batch: model(batch).square().mean())
        for batch in run.loader(x):
            step(batch)
    """
    verdict = verdict_on(script(text))
    assert [cause.key for cause in verdict.causes] == ["learning_rate"]


def test_the_command_prints_the_verdict_as_json_and_fails_on_a_difference(command, script):
    path = script(parallel(factor="(1 + 0.1 * size)"))
    code, output = command("--devices", "cpu:1,cpu:2", "--steps", 2, "--json", path)
    verdict = json.loads(output)
    assert code == 1
    assert verdict["agrees"] is False
    assert verdict["difference"]["step"] == 0
    assert verdict["place"]["direction"] == "backward"


@pytest.mark.slow
def test_the_command_says_what_was_compared_and_which_tier_a_recipe_reached(command):
    code, output = command("--devices", "cpu:1,cpu:2", "--steps", 2, "mlp", "--epochs", 1)
    assert code == 0
    assert "agrees      bitwise" in output
    assert "2 steps, 6 parameters, 12 of 12 gradients not zero" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to verify"),
        (["--tier", "close", "mlp"], "--tier"),
        (["--devices", "cpu:1,cpu:1", "mlp"], "different ones"),
        (["--devices", "cpu:2", "mlp"], "two or more"),
        (["--logical-devices", "4", "mlp"], "--logical-devices before a recipe"),
        (
            ["mlp", "--devices=1,2"],
            "got --devices after mlp; verify's own options go before the program: samestep verify",
        ),
        (["mlp", "--lr", "1", "--tier", "bitwise", "--json"], "got --tier, --json after mlp; verify's own options"),
        (["--seed", "4", str(BREAKERS / "clean.py")], "deals with ranks itself"),
        (["no_such_script.py"], "there is no script"),
        (["lenett"], "recipes are lenet"),
    ],
)
def test_options_that_cannot_be_are_told_before_anything_runs(command, arguments, message):
    with pytest.raises(UsageError, match=message):
        command(*arguments)


@pytest.mark.parametrize(
    ("text", "words", "named"),
    [
        ("print(1)", ["--devices", "1,2", "--lr", "1"], "--devices"),
        ("print(1)", ["--steps=3", "--tier", "bitwise"], "--steps, --tier"),
        ("parser.add_argument('--devices')", ["--devices", "1,2"], ""),
        ("print(1)", ["-m", "--lr", "1"], ""),
    ],
)
def test_own_options_after_a_script_that_does_not_know_them_are_pointed_out(
    script, monkeypatch, capsys, text, words, named
):
    path = script(text)
    monkeypatch.setattr(sys, "argv", ["samestep", "verify", "--devices", "cpu:1", str(path), *words])
    with pytest.raises(SystemExit):
        main()  # one device is not enough: nothing is run
    err = capsys.readouterr().err
    assert "needed: two or more" in err
    sentence = f"samestep: {named} after {path} is given to the program; verify's own options go before it: "
    assert (sentence in err) is bool(named)
    assert ("verify's own options" in err) is bool(named)


SMALL_GPT = ("-o", "layers=1", "-o", "width=32", "-o", "heads=2", "-o", "context=16")


def example(name, *arguments, before=()):
    return pytest.param([*before, EXAMPLES / f"{name}.py", *arguments], id=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["lenet", "--epochs", 1], id="lenet"),
        pytest.param(["mlp", "--epochs", 3], id="mlp"),
        pytest.param(["simplenet", "--epochs", 1, "--optimizer", "adam"], id="simplenet"),
        pytest.param(["vgg", "--epochs", 1, "-o", "width=0.0625", "--global-batch-size", 16], id="vgg"),
        pytest.param(["gpt", "--epochs", 1, *SMALL_GPT], id="gpt"),
        example("house_prices", "--epochs", 3),
        example("vgg_parts", "--epochs", 1, "--samples", 42, "--batch-size", 16, "--workers", 2),
        example("simple_gpu", "--epochs", 2, "--samples", 100, before=("--wrap", "model")),
        example("detection", "--epochs", 2, "--samples", 12, "--batch-size", 7),
    ],
)
def test_recipes_and_examples_are_equal_to_the_bit(command, monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    code, output = command("--devices", "cpu:1,cpu:2,cpu:3", "--steps", 4, "--tier", "bitwise", *arguments)
    assert code == 0, output


@pytest.mark.slow
def test_the_example_of_distributed_data_parallel_is_equal_up_to_rounding(command):
    code, output = command("--devices", "cpu:1,cpu:2", "--steps", 6, EXAMPLES / "ddp_native.py")
    assert code == 0, output
    assert "agrees      allclose" in output
