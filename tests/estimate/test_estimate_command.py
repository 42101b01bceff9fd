"""`samestep estimate`: its output, and the sentences of its refusals."""

import json
import sys
from dataclasses import replace

import pytest

from samestep.cli.main import main
from samestep.devices.selection import select
from samestep.errors import UsageError
from samestep.estimate import costs

MODELS = """
import torch
from torch import nn
from torch.nn import functional

def plain():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def triple():
    return plain(), lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]), (
        torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64))

class Choosy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        if x.sum() > 0:  # CHOICE
            return self.layer(x)
        return self.layer(-x)

def number():
    return 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "models.py"
    path.write_text(MODELS, encoding="utf-8")
    return path


@pytest.fixture
def estimate(capsys, monkeypatch):
    """`estimate(words…)`: the exit code, stdout and stderr."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["samestep", "estimate", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return caught.value.code, said.out, said.err

    return call


def test_devices_of_this_machine_are_named_as_for_any_other_command(estimate):
    code, out, _ = estimate("mlp", "--devices", "cpu:2", "--json")
    assert code == 0
    asked = json.loads(out)["devices"]
    assert (asked["kind"], asked["count"], asked["nodes"]) == ("cpu", 2, 1)
    code, _, err = estimate("mlp", "--devices", "cpu:0")
    assert code == 2
    assert "cpu:N is a number of CPU workers" in err


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.1, "A100-80"),
        ("NVIDIA H200", 140, "H200"),
        ("NVIDIA GH200 480GB", 94, "H200"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX4090"),
    ],
)
def test_an_accelerator_of_this_machine_is_known_by_its_name_and_memory(monkeypatch, name, gib, kind):
    found = select("cpu:2")
    device = replace(found.devices[0], kind="cuda", name=name, memory_total=int(gib * 2**30))
    monkeypatch.setattr(costs, "select", lambda text: replace(found, kind="cuda", devices=(device,) * 2))
    assert str(costs.read_cluster("auto")) == f"2 × {kind}"


def test_an_accelerator_with_a_longer_name_is_another_kind(monkeypatch):
    found = select("cpu:2")
    device = replace(found.devices[0], kind="cuda", name="NVIDIA L40S", memory_total=48 * 2**30)
    monkeypatch.setattr(costs, "select", lambda text: replace(found, kind="cuda", devices=(device,)))
    with pytest.raises(UsageError, match="NVIDIA L40S is not in the table of devices"):
        costs.read_cluster("auto")


def test_a_recipe_is_estimated_in_the_terminal(estimate):
    code, out, _ = estimate("gpt", "--devices", "4xL4")
    assert code == 0
    assert "834,304 parameters" in out
    assert "4 × L4, 22 GiB each" in out
    assert "→ replicate" in out
    for name in ("parameters", "activations", "communication", "total"):
        assert name in out


def test_json_has_the_same_and_adds_up(estimate):
    code, out, _ = estimate("lenet", "--devices", "8xH100", "--nnodes", 2, "--global-batch-size", 256, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["devices"] == {"kind": "H100", "count": 16, "nodes": 2, "memory": 79.1 * 2**30}
    assert found["fits"] is True
    memory = dict(found["recommended"]["memory"])
    del memory["phase"]
    assert memory.pop("total") == pytest.approx(sum(memory.values()))


def test_a_function_of_ones_own_is_estimated_with_shapes_or_with_its_own_batch(estimate, file):
    shapes = ("--input-shape", "8", "--target-shape", "")
    first = estimate(f"{file}:plain", "--devices", "2xA100", *shapes, "--json")
    second = estimate(f"{file}:triple", "--devices", "2xA100", "--json")
    assert (first[0], second[0]) == (0, 0)
    own, given = (json.loads(said[1])["recommended"]["memory"] for said in (first, second))
    assert own == given


def test_nothing_fits_is_exit_code_1(estimate, file):
    code, out, _ = estimate(
        f"{file}:triple", "--devices", "1xL4", "--global-batch-size", 10**10, "--num-microbatches", 1
    )
    assert code == 1
    assert "✗ nothing fits" in out
    assert "--num-microbatches 2" in out


REFUSED = {
    "an unknown device": (["lenet", "--devices", "8xH101"], "did you mean H100?"),
    "no device at all": (["lenet", "--devices", "many"], "8xH100"),
    "devices that no nodes hold": (["lenet", "--devices", "9xH100"], "do not divide among nodes of 8"),
    "an unknown model": (["lenett", "--devices", "1xH100"], "did you mean 'lenet'?"),
    "a mesh of other devices": (["gpt", "--devices", "8xH100", "--mesh", "pipe=3"], "their product must be the number"),
    "a mesh of other axes": (["gpt", "--devices", "8xH100", "--mesh", "tensor=2"], "takes pipe=N, and data=-1, alone"),
    "more stages than blocks": (["gpt", "--devices", "8xH100", "--mesh", "pipe=8"], "too few for 8 stages"),
    "a batch smaller than devices": (["lenet", "--devices", "8xH100", "--global-batch-size", "4"], "4 samples"),
    "fewer microbatches than devices": (
        ["lenet", "--devices", "8xH100", "--num-microbatches", "4"],
        "--num-microbatches 8",
    ),
    "no blocks to recompute": (["lenet", "--devices", "2xH100", "--checkpointing"], "leave --checkpointing out"),
    "an unknown strategy": (["lenet", "--devices", "2xH100", "--strategy", "magic"], "one of replicate"),
    "an unknown precision": (["lenet", "--devices", "2xH100", "--precision", "8"], "32-true"),
    "a rate of nothing": (["lenet", "--devices", "1xL4", "--rate", "0"], "above 0"),
    "stages of sharded state": (
        ["gpt", "--devices", "2xL4", "--mesh", "pipe=2", "--strategy", "sharded"],
        "--strategy pipeline",
    ),
}


@pytest.mark.parametrize(("words", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_what_would_do(estimate, words, sentence):
    code, _, err = estimate(*words)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err


def test_a_program_that_depends_on_values_is_refused_with_its_line(estimate, file):
    line = MODELS[: MODELS.index("# CHOICE")].count("\n") + 1
    code, _, err = estimate(f"{file}:Choosy", "--devices", "1xH100", "--input-shape", "8")
    assert code == 2
    assert f"{file}:{line}" in err
    assert "_local_scalar_dense" in err


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("plain", (), "--input-shape"),
        ("number", ("--input-shape", "8"), "returns a int"),
        ("absent", (), "it has plain, triple, Choosy, number"),
        ("plain", ("--input-shape", "9"), "failed on a batch of 2 samples"),
    ],
)
def test_a_function_that_does_not_fit_is_refused(estimate, file, name, words, sentence):
    code, _, err = estimate(f"{file}:{name}", "--devices", "1xH100", *words)
    assert code == 2
    assert sentence in err


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_a_model_s_code_that_ends_the_program_ends_no_estimate(estimate, tmp_path, end):
    (tmp_path / "ends.py").write_text(f"import os, sys\nprint('of the file')\ndef build():\n    {end}\n")
    (tmp_path / "script.py").write_text(f"import os, sys\n{end}\n")
    for name in ("ends.py:build", "script.py:build"):
        words = ("--devices", "1xH100", "--input-shape", "8", "--json")
        code, out, err = estimate(f"{tmp_path}/{name}", *words)
        assert (code, out) == (2, "")
        assert f"the code of {tmp_path}/{name} ended the program, with the exit code 0; needed: a function" in err


def test_a_published_model_has_the_parameters_of_its_paper():
    from samestep.estimate.trace import trace
    from samestep.estimate.workload import published

    counts = {"gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "llama-3.1-8b": 8_030_261_248}
    assert {name: trace(published(name), 2, True).num_parameters for name in counts} == counts
