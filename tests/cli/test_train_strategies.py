"""`samestep train` with strategies, as a user types it: the digest of one device, and sentences for mistakes."""

import pytest
from test_train_command import samestep, tables, train_json

__all__ = ["tables"]

STRATEGIES = [
    ["--devices", "cpu:2", "--strategy", "sharded"],
    ["--devices", "cpu:2", "--shard-optimizer"],
    ["--devices", "cpu:2", "--strategy", "pipeline", "--mesh", "pipe=2"],
]


def test_every_strategy_ends_with_the_digest_of_one_device_and_goes_on_from_another(tables, tmp_path):
    def digest(*args):
        result, _ = train_json(*args, "--run-dir", "run", cwd=tmp_path)
        return result["digest"]

    common = ["mlp", "--data", tables, "--optimizer", "adam", "--max-grad-norm", 1, "--num-shards", 4]
    expected = [
        train_json(*common, "--epochs", n, "--devices", "cpu:1", "--run-dir", f"one-{n}", cwd=tmp_path)[0]["digest"]
        for n in (1, 2, 3)
    ]
    assert len(set(expected)) == 3
    assert digest(*common, "--epochs", 1, *STRATEGIES[0]) == expected[0]
    assert digest("--resume", "run", "--epochs", 2, *STRATEGIES[2]) == expected[1]
    assert digest("--resume", "run", "--epochs", 3, "--strategy", "replicate", *STRATEGIES[1]) == expected[2]
    exported = samestep("export", "run", "weights.safetensors", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "weights.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--strategy", "fsdp"], "--strategy is one of replicate, sharded, pipeline, tensor"),
        (["--strategy", "pipeline"], "--strategy pipeline --mesh pipe=2"),
        (["--mesh", "pipe=2"], "that axis needs --strategy pipeline"),
        (["--mesh", "tensor=2", "--strategy", "pipeline"], "that axis needs --strategy tensor"),
        (["--strategy", "tensor"], "--strategy tensor --mesh tensor=2"),
        (["--strategy", "tensor", "--mesh", "tensor=3", "--devices", "cpu:3"], "mlp has 16 hidden features"),
        (["--strategy", "pipeline", "--mesh", "pipe=6", "--devices", "cpu:6"], "mlp has 5 parts for 6 stages"),
        (["--strategy", "pipeline", "--mesh", "pipe=3"], "its sizes multiply to 3"),
        (["--strategy", "pipeline", "--mesh", "stage=2"], "'data', 'pipe'"),
        (["--mesh", "two"], "such as data=2,pipe=4"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_a_worker_starts(tables, tmp_path, args, words):
    done = samestep("train", "mlp", "--data", tables, "--devices", "cpu:2", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()
