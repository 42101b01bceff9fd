"""`samestep train` with strategies, as a user types it: the digest of one device, and sentences for mistakes."""

import json

import pytest
from cli_commands import samestep
from test_train_command import tables, train_json

from samestep.runs.ledger import from_line

__all__ = ["tables"]

STRATEGIES = [
    ["--devices", "cpu:2", "--strategy", "sharded"],
    ["--devices", "cpu:2", "--shard-optimizer"],
    ["--devices", "cpu:2", "--strategy", "pipeline", "--mesh", "pipe=2"],
]


def test_every_strategy_ends_with_the_digest_of_one_device_and_goes_on_from_another(tables, tmp_path):
    def train(name, *args):
        return train_json(*args, "--run-dir", name, cwd=tmp_path)

    def steps(name):
        lines = map(from_line, (tmp_path / name / "ledger.jsonl").read_bytes().splitlines())
        return [{**line, "world_size": 2, "seconds": None} for line in lines if "event" not in line]

    common = ["mlp", "--data", tables, "--optimizer", "adam", "--max-grad-norm", 1, "--num-microbatches", 4]
    common += ["--digest-every", 1]
    alone = train("alone", *common, "--epochs", 3, "--devices", "cpu:1")
    train("run", *common, "--epochs", 1, *STRATEGIES[0])
    train("run", "--resume", "run", "--epochs", 2, *STRATEGIES[2])
    ended = train("run", "--resume", "run", "--epochs", 3, "--strategy", "replicate", *STRATEGIES[1])
    assert ended["digest"] == alone["digest"]
    assert steps("run") == steps("alone")
    assert len({step["digest"] for step in steps("alone")}) == len(steps("alone")) > 3
    audited = samestep("audit", "run", "--all", "--json", cwd=tmp_path)  # on one device, whatever each segment had
    assert audited.returncode == 0, audited.stdout + audited.stderr
    assert len(json.loads(audited.stdout)["segments"]) == 3
    exported = samestep("export", "run", "weights.safetensors", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "weights.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--strategy", "fsdp"], "it is one of replicate, sharded, pipeline (--strategy)"),
        (["--strategy", "pipeline"], "--strategy pipeline --mesh pipe=2"),
        (["--mesh", "pipe=2"], "is for --strategy pipeline"),
        (["--mesh", "tensor=2"], 'parallelize_module(model, run.mesh["tensor"], plan)'),
        (["--strategy", "tensor"], "(--strategy)"),
        (["--strategy", "pipeline", "--mesh", "pipe=6", "--devices", "cpu:6"], "mlp has 5 parts for 6 stages"),
        (["--strategy", "pipeline", "--mesh", "pipe=3"], "its sizes multiply to 3"),
        (["--strategy", "pipeline", "--mesh", "stage=2"], "'data', 'pipe'"),
        (["--mesh", "two"], "such as data=2,pipe=4"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_a_worker_starts(tables, tmp_path, monkeypatch, refused, args, words):
    monkeypatch.chdir(tmp_path)
    assert words in refused("train", "mlp", "--data", tables, "--devices", "cpu:2", *args)
    assert not (tmp_path / "runs").exists()
