"""`samestep verify`: programs that agree reach their tier; of others the place and the cause are found."""

import json
import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from cause_pages import section
from typer.testing import CliRunner

from samestep.cli.main import app, main
from samestep.cli.verify import show
from samestep.errors import UsageError, WorkerError
from samestep.verify.causes.evidence import Evidence
from samestep.verify.comparison import first_difference, first_place
from samestep.verify.program_runner import RunSpec

HERE = Path(__file__).resolve().parent
BREAKERS = HERE / "breakers"
EXAMPLES = HERE.parents[1] / "examples"
SINGLE_PROCESS = {"num_microbatches": 4, "seed": 0, "wrap": None, "simulated": True}

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


def parallel(lr="0.1", share="x[rank::size]", factor="1", source=PARALLEL):
    return source.replace("LR", lr).replace("SHARE", share).replace("FACTOR", factor)


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
    assert verdict.causes == ()
    assert (verdict.family, verdict.required, verdict.reached) == ("ddp", "allclose", "allclose")
    assert (verdict.compared.steps, verdict.compared.parameters, verdict.compared.samples) == (4, 4, 48)
    assert verdict.compared.nonzero_gradients == 16


@pytest.mark.parametrize(
    ("path", "single_process", "family", "samples"),
    [
        (BREAKERS / "api_clean.py", None, "api", 36),
        (BREAKERS / "single_process_clean.py", SINGLE_PROCESS, "single-process", 33),
    ],
    ids=("api", "single-process"),
)
def test_a_program_of_samestep_and_a_single_process_script_are_equal_to_the_bit(
    verdict_on, path, single_process, family, samples
):
    verdict = verdict_on(path, single_process=single_process, steps=3)
    assert verdict.agrees
    assert verdict.causes == ()
    assert (verdict.family, verdict.reached, verdict.compared.samples) == (family, "bitwise", samples)


def test_modules_of_a_single_process_script_are_recorded_in_its_workers_as_in_one_process(runner_of):
    runner = runner_of(BREAKERS / "single_process_clean.py", single_process=SINGLE_PROCESS)
    one, two = (runner.record(RunSpec(devices, 2, detail=1)) for devices in ("cpu:1", "cpu:2"))
    assert (one.failure, two.failure) == (None, None)
    lines = list(two.lines("module", 1))
    assert {(line["step"], line["direction"], line["microbatch"]) for line in lines} == {
        (1, direction, number) for direction in ("forward", "backward") for number in (2, 3)
    }
    assert first_place(one, two, exact=True).direction == "exchange"
    assert [len(line["microbatches"]) for line in two.steps[0]] == [4, 7]  # three are of an evaluation
    for line in lines:
        other = replace(two, ranks=(two.ranks[0], tuple({**one, "bits": []} if one is line else one for one in lines)))
        place = first_place(one, other, exact=True)
        assert (place.module, place.direction) == (line["name"], line["direction"])
        assert f"microbatch {line['microbatch']}" in place.text


@pytest.mark.parametrize("kind", ["sharded", "zero1"])
def test_of_sharded_state_the_unsharded_tensors_are_compared(verdict_on, kind):
    verdict = verdict_on(BREAKERS / "api_strategies.py", kind, devices=("cpu:1", "cpu:2"), tier="bitwise")
    assert verdict.agrees
    assert (verdict.family, verdict.reached) == ("api", "bitwise")
    assert (verdict.compared.steps, verdict.compared.parameters, verdict.compared.samples) == (4, 4, 48)
    assert (verdict.compared.microbatches, verdict.compared.nonzero_gradients) == (16, 16)


LAYOUTS = HERE.parent / "cli" / "layouts.py"

PARTS = """
    import json, os, sys, torch, torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    common, part = nn.Linear(3, 3), [nn.Linear(3, 1) for _ in range(size)][rank if "parts" in sys.argv else 0]
    common = nn.parallel.DistributedDataParallel(common)
    trained = part.parameters() if "alone" in sys.argv else [*common.parameters(), *part.parameters()]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    place = json.loads(os.environ.get("SAMESTEP_WORKER", "{}")).get("device_index", rank)  # the device of this rank
    for number in range(3):
        x = torch.randn(12, 3)[rank::size]
        part(common(x)).square().mean().backward()
        if "leak" in sys.argv and rank == 1:
            part.weight.grad += place
        optimizer.step(), optimizer.zero_grad()
    dist.destroy_process_group()
"""


DIVIDED = """
    import json, os, sys, torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model = parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = json.loads(os.environ.get("SAMESTEP_WORKER", "{}")).get("device_index", rank)  # the device of this rank
    for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 3)), 4):
        model(x).square().mean().backward()
        if "leak" in sys.argv and rank == 1:
            model[0].weight.grad.to_local().add_(place)
        optimizer.step(), optimizer.zero_grad()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "name", ["hybrid", *(pytest.param(each, marks=pytest.mark.slow) for each in ("data by tensor", "experts"))]
)
def test_layouts_of_four_ranks_agree_to_the_bit_though_each_holds_a_part(verdict_on, name):
    verdict = verdict_on(LAYOUTS, "cpu", name, logical=4, steps=3, tier="bitwise")
    assert (verdict.agrees, verdict.reached) == (True, "bitwise"), verdict.difference
    assert any("other values on other ranks" in note for note in verdict.notes) == (name == "experts")


def test_parameters_that_each_rank_begins_by_itself_are_parts_and_compared_on_each(verdict_on, script):
    verdict = verdict_on(script(PARTS), "parts", logical=2, steps=3, tier="bitwise")
    assert (verdict.agrees, verdict.reached) == (True, "bitwise"), verdict.difference
    assert verdict.notes[0] == (
        "2 of 4 parameters begin with other values on other ranks, each a part of the model: weight, bias; if they are "
        "to be copies, begin them alike"
    )
    verdict = verdict_on(script(PARTS), "parts", "alone", logical=2, steps=3, tier="bitwise")
    assert verdict.notes[0].startswith("2 of 2 parameters begin with other values")
    assert "same on all ranks" in verdict_on(script(PARTS), "parts", "alone", steps=3).difference.text
    difference = verdict_on(script(PARTS), "parts", "leak", logical=2, steps=3, tier="bitwise").difference
    assert difference.text.startswith("on rank 1: the gradient of weight differs")


def test_ranks_that_share_a_model_may_train_on_the_same_samples(verdict_on, script):
    verdict = verdict_on(script(DIVIDED), logical=2, steps=3, tier="bitwise")
    assert (verdict.agrees, verdict.refusals, verdict.compared.parameters) == (True, (), 4), verdict.difference


def test_twin_a_shard_that_differs_on_another_rank_alone_is_found(runner_of, script):
    runner = runner_of(script(DIVIDED), "leak", logical=2)
    found = first_difference(*(runner.record(RunSpec(devices, 3)) for devices in ("cpu:1", "cpu:2")), "bitwise")
    assert (found.step, found.quantity, found.name, found.runs) == (1, "gradient", "0.weight", ("cpu:1", "cpu:2"))


def test_parameters_that_ranks_begin_alike_and_do_not_exchange_are_named(verdict_on, script):
    verdict = verdict_on(script(PARTS), logical=2, steps=3, tier="bitwise")
    assert "is not the same on all ranks of cpu:1" in verdict.difference.text
    assert verdict.difference.quantity == "ranks"


def test_batch_norm_is_found_named_confirmed_and_told(verdict_on, script, capsys):
    verdict = verdict_on(script(section("batchnorm")[0]))
    assert not verdict.agrees
    assert verdict.difference.step == 1
    assert (verdict.place.type, verdict.place.direction) == ("BatchNorm1d", "forward")
    assert [cause.key for cause in verdict.causes] == ["batchnorm"]
    assert verdict.unexplained is None
    assert verdict.reached == "count-exact"
    show(verdict)
    output = capsys.readouterr().out
    assert "cause       BatchNorm uses the statistics of each device's own batch" in output
    assert "where       1 (BatchNorm1d), forward: output differs between cpu:1 and cpu:2" in output
    assert "differs     the same samples, divided by the true counts, but not equal up to rounding\n" in output


def test_a_cause_that_is_not_in_the_table_is_not_made_up(verdict_on, script):
    verdict = verdict_on(script(parallel(factor="(1 + 0.1 * size)") + "    dist.destroy_process_group()\n"), steps=20)
    assert not verdict.agrees
    assert verdict.causes == ()
    assert "alone" not in {cause.key for cause in verdict.suspects}, "it has started a process group, and ended it"
    assert verdict.unexplained is not None
    assert (verdict.difference.step, verdict.difference.quantity) == (1, "loss")
    assert (verdict.place.module, verdict.place.direction) == ("2", "backward")


def test_what_happens_after_the_backward_is_placed_there(verdict_on, script):
    scaled = "for p in model.parameters(): p.grad *= 1 + 0.1 * size\n        optimizer.step()"
    verdict = verdict_on(script(parallel().replace("optimizer.step()", scaled)))
    assert (verdict.difference.quantity, verdict.place.direction) == ("gradient", "exchange")


def test_what_is_left_under_all_antidotes_is_told_with_its_place(verdict_on, script, capsys):
    text = parallel(factor="(1 + 0.1 * size)", share="nn.functional.dropout(x[rank::size], 0.1)")
    verdict = verdict_on(script(text))
    assert {cause.key for cause in verdict.suspects} == {"dropout", "draws"}
    assert (verdict.unexplained.step, verdict.unexplained.quantity) == (1, "loss")
    assert verdict.unexplained_place.direction == "backward"
    show(verdict)
    printed = capsys.readouterr().out
    assert f"without the effect of dropout, draws there is left: step 1: {verdict.unexplained.text}" in printed
    assert verdict.unexplained_place.text in printed


# Drawn before the optimizer is made, so that no draw is suspected.
DRAWN = PARALLEL.replace("    model =", "    data = torch.randn(6, 12, 3)\n    model =").replace(
    "torch.randn(12, 3)", "data[number]"
)
CENTERED = (
    parallel(source=DRAWN)
    .replace(
        "dist.init",
        """class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            WRITE
            return self.layer(x - READ)

    dist.init""",
    )
    .replace("nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))", "Centered()")
)


@pytest.mark.parametrize("write", ["self.mean.lerp_(x.mean(0), 0.5)", "self.mean = (self.mean + x.mean(0)) / 2"])
def test_a_buffer_that_is_written_and_read_in_one_forward_is_confirmed_as_the_cause(verdict_on, script, write):
    verdict = verdict_on(script(CENTERED.replace("WRITE", write).replace("READ", "self.mean")))
    assert [cause.key for cause in verdict.causes] == ["buffers"]
    assert verdict.unexplained is None


def test_of_a_forward_that_uses_the_other_samples_of_its_batch_the_line_is_named(verdict_on, script, capsys):
    text = CENTERED.replace("WRITE", "self.seen = x.mean(0)").replace("READ", "self.seen")
    path = script(text)
    verdict = verdict_on(path)
    number = 1 + next(index for index, line in enumerate(path.read_text().splitlines()) if "self.layer(x" in line)
    assert (verdict.place.module, verdict.place.line) == ("layer", f"{path}, line {number}")
    assert verdict.seen[-1].startswith(f"samples of the same content have other outputs there: what {path}, line")
    assert verdict.unexplained is not None
    show(verdict)
    assert f"seen: {verdict.seen[-1]}" in capsys.readouterr().out


COUNTED = parallel(factor="(1 / (1 + count))", source=DRAWN).replace("optimizer.step()", "optimizer.step(); count += 1")


def test_a_counter_that_begins_elsewhere_is_named_with_the_numbers_that_follow(verdict_on, script):
    verdict = verdict_on(script(COUNTED.replace("for number", "count = 4 * size\n    for number")))
    assert (verdict.causes, verdict.suspects) == ((), ())
    (seen,) = verdict.seen
    assert "these numbers of the script differ: count is 4 on cpu:1 and 8 on cpu:2" in seen
    assert "size is" not in seen
    assert verdict_on(script(COUNTED.replace("for number", "count = 4\n    for number"))).agrees


def test_a_file_that_one_run_leaves_to_the_next_is_named_with_its_line_and_no_cause_is_made_up(
    verdict_on, script, tmp_path
):
    read = "import os, sys\n    count = int(open(sys.argv[1]).read()) if os.path.exists(sys.argv[1]) else 0\n    "
    write = "    dist.barrier()\n    if rank == 0: open(sys.argv[1], 'w').write(str(count))\n"
    path = script(COUNTED.replace("for number", f"{read}for number") + write)
    verdict = verdict_on(path, tmp_path / "count", steps=20)
    assert (verdict.causes, verdict.suspects) == ((), ())
    assert verdict.seen[0].startswith(f"cpu:1 (again) read {tmp_path / 'count'} at {path}, line ")
    assert "count is 0 on cpu:1 and 6 on cpu:1 (again)" in verdict.seen[1]
    # What was there before is the program's own, and so is what a run writes into its own folder.
    assert verdict_on(path, tmp_path / "count", steps=4).agrees
    assert verdict_on(path, "{folder}-count", steps=20).agrees


def test_a_cause_that_another_hides_is_looked_for_once_that_is_gone(verdict_on, script, monkeypatch):
    # Without the sign that its sampler gives, ranks that take the same samples are seen once the orders agree.
    facts = Evidence.facts
    monkeypatch.setattr(Evidence, "facts", lambda self, kind: [] if kind == "draws_alone" else facts(self, kind))
    text = """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        dist.init_process_group("gloo")
        torch.manual_seed(1234 + dist.get_rank())
        x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (part,) in DataLoader(TensorDataset(x), batch_size=12 // dist.get_world_size(), shuffle=True):
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
    """
    verdict = verdict_on(script(text))
    assert [cause.key for cause in verdict.causes] == ["unshared"]
    assert verdict.causes[0].evidence.endswith("(without the effect of order)")
    assert verdict.unexplained is None


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
    ("text", "single_process", "refusal"),
    [
        (parallel(lr="0.0"), None, "no parameter changed"),
        ("print('nothing to do')", None, "no optimizer took a step"),
        (PLAIN.replace("model(", "model.forward("), SINGLE_PROCESS, "--wrap"),
    ],
    ids=("nothing is learned", "no step", "nothing is shared out"),
)
def test_agreement_of_runs_in_which_nothing_happens_is_refused(verdict_on, script, text, single_process, refusal):
    verdict = verdict_on(script(text), single_process=single_process)
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


NOISY = """
    import random, torch, torch.distributed as dist
    import numpy as np
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    BEFORE
    torch.manual_seed(0)
    x, factor = torch.randn(72, 3), 1.0
    DATA
    data = TensorDataset(x)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data, shuffle=False)
    for (part,) in DataLoader(data, batch_size=12 // dist.get_world_size(), sampler=sampler):
        STEP
        optimizer.zero_grad()
        (model(part).square().mean() * factor).backward()
        optimizer.step()
        AFTER
    dist.destroy_process_group()
"""
METRIC = "score = {}; dist.all_reduce(score); score /= dist.get_world_size()"


def noisy(**places):
    text = NOISY
    for place in ("BEFORE", "DATA", "STEP", "AFTER"):
        text = text.replace(place, places.get(place.lower(), "pass"))
    return text


@pytest.mark.parametrize(
    "places",
    [
        {"before": "noise = torch.randn(72, 3)", "data": "x = x + noise"},
        {"data": "x = x + torch.from_numpy(np.random.default_rng().normal(size=(72, 3))).float()"},
        {"step": "factor = random.Random().uniform(0.5, 1.5)"},
        {"before": "chosen = random.sample(range(72), 9)", "after": METRIC.format("model.module(x[chosen]).mean()")},
    ],
    ids=("the data", "a generator of numpy's", "a generator of python's", "an evaluation"),
)
def test_what_nobody_seeded_is_no_rounding_but_named_and_confirmed(verdict_on, script, places):
    verdict = verdict_on(script(noisy(**places)))
    assert not verdict.agrees
    assert verdict.reached in (None, "count-exact", "sample-exact")
    assert [cause.key for cause in verdict.causes] == ["unseeded"]
    assert verdict.unexplained is None
    assert not any("order of chance" in note for note in verdict.notes)
    seeded = noisy(**places).replace('group("gloo")', 'group("gloo"); torch.manual_seed(1); random.seed(1)')
    seeded = seeded.replace("default_rng()", "default_rng(1)").replace("Random()", "Random(1)")
    assert verdict_on(script(seeded)).agrees


@pytest.mark.parametrize(
    ("after", "note"),
    [
        (f"import time; {METRIC.format('torch.tensor(time.time() % 60)')}", "0 are compared: .* 3 differ on cpu:1"),
        ("if dist.get_world_size() > 1: dist.all_reduce(torch.tensor(0.5))", "0 are compared: .* 3 on cpu:2$"),
    ],
    ids=("a clock", "on several devices only"),
)
def test_of_reduced_numbers_that_are_not_compared_is_said_why(verdict_on, script, after, note):
    verdict = verdict_on(script(noisy(after=after)))
    assert verdict.agrees
    assert any(re.search(note, text) for text in verdict.notes)


def test_an_order_of_chance_excuses_no_draws(verdict_on, script):
    race = "chance = torch.tensor(os.urandom(1)[0] / 256); dist.broadcast(chance, 0)\n        "
    race += "for p in model.parameters(): p.grad *= 1 + 4e-7 * chance\n        optimizer.step()"
    text = noisy(before="import os", step="factor = 1").replace("optimizer.step()", race)
    assert verdict_on(script(text)).reached == "allclose"
    text = text.replace("factor = 1", "number = locals().get('number', 0) + 1; factor = 1 + NOISE").replace(
        "NOISE",
        "1e-2 * random.random() * (number > 2)",  # far from equal by chance
    )
    verdict = verdict_on(script(text))
    assert [cause.key for cause in verdict.causes] == ["unseeded"]
    assert verdict.unexplained is None


def test_where_no_metric_was_reached_agreement_says_so(verdict_on, script):
    for steps, is_said in ((2, True), (20, False)):
        verdict = verdict_on(script(noisy()), steps=steps)
        assert verdict.agrees
        assert any("no metric was compared" in note for note in verdict.notes) is is_said


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        # At which of these rates differences of rounding have grown so far in six steps depends on the CPU's kernels.
        ([("lr=LR", f"lr={rate}") for rate in (400, 100, 4000)], "rounding alone may change the loss"),
        ([("loss = model(mine)", "loss = model(mine / (number < 2))")], "from step 3 on parameters are not finite"),
    ],
    ids=("chaos", "NaN"),
)
def test_agreement_of_what_cannot_be_told_apart_is_refused(verdict_on, script, changes, refusal):
    for change in changes:
        verdict = verdict_on(script(parallel(source=PARALLEL.replace(*change))), steps=6)
        if not verdict.agrees:
            break
    assert not verdict.agrees
    assert verdict.difference is None
    assert refusal in verdict.refusals[0]


def test_a_program_that_fails_is_an_error_with_its_own_words(verdict_on, script):
    trained = textwrap.dedent(parallel())
    with pytest.raises(WorkerError, match=r"failed on cpu:2.*\n(.*\n)*.*only one"):
        verdict_on(script(f"import os\nif os.environ['WORLD_SIZE'] != '1': raise ValueError('only one')\n{trained}"))


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
    assert verdict["difference"]["step"] == 1
    assert verdict["place"]["direction"] == "backward"


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
        (["--seed", "4", str(BREAKERS / "clean.py")], "this one is written for several"),
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


@pytest.mark.slow
def test_an_example_whose_module_is_named_is_equal_to_the_bit(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ("--devices", "cpu:1,cpu:2,cpu:3", "--steps", 4, "--tier", "bitwise", "--wrap", "model")
    code, output = command(*words, EXAMPLES / "simple_gpu.py", "--epochs", 2, "--samples", 100)
    assert code == 0, output


ON_GPUS = """
    import os, torch, torch.distributed as dist
    from torch import nn

    dist.init_process_group("nccl")
    rank, size, place = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(place)
    torch.manual_seed(0)
    x, y = torch.randn(96, 8), torch.randint(2, (96,))
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    net = nn.parallel.DistributedDataParallel(WRAPPED.cuda(), device_ids=[place])
    optimizer = torch.optim.Adam(net.parameters())
    for first in range(0, 96, 24):
        inputs, labels = (rows[first : first + 24][rank::size].cuda() for rows in (x, y))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        dist.all_reduce((labels == 1).sum().float(), op=dist.ReduceOp.AVG)  # to be divided by an average of counts
"""


def test_a_script_for_gpus_finds_one_for_each_worker_where_there_is_none(command, script):
    words = ("--devices", "cpu:1,cpu:2")
    code, output = command(*words, script(ON_GPUS.replace("WRAPPED", "net")))
    assert code == 1
    assert "note        processes on the CPU stand in for GPUs" in output
    assert re.findall("^cause       (.*)$", output, re.M) == [
        "BatchNorm uses the statistics of each device's own batch"
    ]
    assert "confirmed" in output
    synchronised = script(ON_GPUS.replace("WRAPPED", "nn.SyncBatchNorm.convert_sync_batchnorm(net)"))
    code, output = command(*words, synchronised)
    assert (code, output.splitlines()[-1]) == (0, "agrees      equal up to rounding (allclose)")
