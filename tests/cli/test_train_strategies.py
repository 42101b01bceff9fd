"""`samestep train` with strategies, as a user types it: the digest of one device, and sentences for mistakes."""

import json

from cli_commands import samestep
from test_train_command import tables, train_json

from samestep.runs.ledger import from_line

__all__ = ["tables"]

STRATEGIES = [
    ["--devices", "cpu:2", "--strategy", "sharded"],
    ["--devices", "cpu:2", "--shard-optimizer"],
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
    train("run", *common, "--epochs", 2, *STRATEGIES[0])
    ended = train("run", "--resume", "run", "--epochs", 3, "--strategy", "replicate", *STRATEGIES[1])
    assert ended["digest"] == alone["digest"]
    assert steps("run") == steps("alone")
    assert len({step["digest"] for step in steps("alone")}) == len(steps("alone")) > 3
    audited = samestep("audit", "run", "--all", "--json", cwd=tmp_path)  # on one device, whatever each segment had
    assert audited.returncode == 0, audited.stdout + audited.stderr
    assert len(json.loads(audited.stdout)["segments"]) == 2
    exported = samestep("export", "run", "weights.safetensors", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "weights.safetensors").read_bytes()


def test_a_strategy_that_there_is_not_is_refused_before_a_worker_starts(tables, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    said = refused("train", "mlp", "--data", tables, "--devices", "cpu:2", "--strategy", "fsdp")
    assert "it is one of replicate, sharded (--strategy)" in said
    assert not (tmp_path / "runs").exists()
