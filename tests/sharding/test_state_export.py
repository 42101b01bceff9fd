"""The weights of a checkpoint as one file, whoever wrote it."""

import pytest
import torch
from safetensors.torch import load_file, load_model
from state_programs import odd, own_loop, train

from samestep.checkpoint.export import export_weights
from samestep.checkpoint.verified_files import part_name
from samestep.cli.main import main


@pytest.fixture(scope="module")
def run(worlds, tmp_path_factory):
    """A run on three ranks that each had a part of it."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    worlds(3).run(train, "sharded", "sgd", folder)
    return folder


def test_an_export_of_a_sharded_run_has_the_weights_that_it_ended_with(run, tmp_path):
    chosen = export_weights(run, tmp_path / "all.safetensors")
    assert chosen.name == "step-00000009"
    found, expected = load_file(tmp_path / "all.safetensors"), load_file(run / "weights.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    load_model(odd(), tmp_path / "all.safetensors")


def test_an_export_of_a_whole_checkpoint_is_the_same_file(worlds, run, tmp_path):
    worlds(1).run(train, "replicate", "sgd", tmp_path / "whole")
    for name, place in (("one", run), ("other", tmp_path / "whole")):
        export_weights(place / "checkpoints" / "step-00000004", tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_the_folder_of_a_loop_of_ones_own_is_exported_too(worlds, tmp_path):
    worlds(2).run(own_loop, "sharded", tmp_path / "own", None, 3)
    assert export_weights(tmp_path / "own", tmp_path / "own.safetensors").name == "step-00000003"


def test_a_checkpoint_with_a_damaged_part_is_passed_over_or_refused(run, tmp_path):
    newest = run / "checkpoints" / "step-00000009"
    part = newest / part_name("model", 2, 3)
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        assert export_weights(run, tmp_path / "older").name == "step-00000008"
        with pytest.raises(Exception, match="is damaged"):
            export_weights(newest, tmp_path / "newest")
    finally:
        part.write_bytes(data)
    assert not (tmp_path / "newest").exists()


def test_the_command_writes_once_and_says_what_it_took(run, tmp_path, monkeypatch, capsys):
    file = tmp_path / "weights.safetensors"
    said = [command(monkeypatch, capsys, "export", run, file) for _ in range(2)]
    assert said[0][0] == 0
    assert "step-00000009" in said[0][1]
    assert said[1][0] == 2
    assert "is there already" in said[1][1]
    code, text = command(monkeypatch, capsys, "export", run, tmp_path / "x", "--model", "model.1")
    assert code == 2
    assert "--model is one of model" in text
    assert command(monkeypatch, capsys, "export", tmp_path, tmp_path / "x")[0] == 2


def command(monkeypatch, capsys, *words):
    """The exit code of a command, and what it printed."""
    monkeypatch.setattr("sys.argv", ["samestep", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return ended.value.code, said.out + said.err
