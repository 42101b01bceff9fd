"""Weights in and out: what the readers and writers of other libraries make of them, under every strategy."""

import json
import resource
from functools import partial

import pytest
import torch
from hub_programs import config, finetune, needs_transformers, net_class
from torch import nn
from worlds import alone, in_turns

from samestep.checkpoint.digest import state_digest
from samestep.checkpoint.export import export_weights
from samestep.cli.main import main
from samestep.errors import RunFolderError, UsageError
from samestep.run.run import Run

pytestmark = needs_transformers


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The run of a net on one device: its folder, digest and weights."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    return folder, *alone(finetune, "replicate", folder)


def exported(place, folder):
    """The folder of a run's weights for `from_pretrained`."""
    export_weights(place, folder, format="hf")
    return folder


@pytest.mark.parametrize(("strategy", "world_size"), [("replicate", 3), ("zero1", 2)])
def test_from_pretrained_reads_the_weights_of_a_run_and_goes_on_alike(tuned, tmp_path, strategy, world_size):
    check_round_trip(tuned, tmp_path, strategy, partial(in_turns, world_size))


def test_from_pretrained_reads_the_weights_of_a_divided_model_and_goes_on_alike(worlds, tuned, tmp_path):
    check_round_trip(tuned, tmp_path, "sharded", worlds(2).run)


def check_round_trip(tuned, folder, strategy, run):
    place, digest, weights = tuned
    assert {each[0] for each in run(finetune, strategy, folder / "run")} == {digest}
    hub = exported(folder / "run", folder / "hub")
    read = net_class().from_pretrained(hub).state_dict()
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in read)
    reference = exported(place, folder / "reference")
    assert [path.read_bytes() for path in sorted(hub.iterdir())] == [
        path.read_bytes() for path in sorted(reference.iterdir())
    ]
    on = {each[0] for each in run(finetune, strategy, None, hub)}
    assert on == {alone(finetune, "replicate", None, weights)[0]}
    assert on != {digest}, "the twin: a fresh model ends elsewhere"


def test_weights_beyond_the_size_of_a_file_are_cut_and_indexed_as_from_pretrained_reads_them(tuned, tmp_path):
    place, _, weights = tuned
    export_weights(place, tmp_path / "cut", format="hf", max_file_gb=2e-6)
    names = sorted(path.name for path in (tmp_path / "cut").iterdir())
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert len(names) > 4
    assert set(index["weight_map"].values()) == {name for name in names if name.endswith(".safetensors")}
    read = net_class().from_pretrained(tmp_path / "cut").state_dict()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    (tmp_path / "cut" / index["weight_map"]["transformer.wpe.weight"]).unlink()
    with pytest.raises(OSError, match="safetensors"):
        net_class().from_pretrained(tmp_path / "cut")


def test_torch_and_distributed_checkpoints_hold_weights_and_the_state_of_the_optimizer(tuned, tmp_path):
    import torch.distributed.checkpoint as dcp

    place, _, weights = tuned
    export_weights(place, tmp_path / "weights.pt", format="torch")
    model = net_class()(net_class().config_class(**json.loads(config_of(place, tmp_path))))
    model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())

    export_weights(place, tmp_path / "both.pt", format="torch", optimizer=True)
    both = torch.load(tmp_path / "both.pt", weights_only=True)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(both["optimizer"])
    assert both["step"] == 6 == optimizer.state[model.lm_head.weight]["step"]
    assert optimizer.param_groups[0]["lr"] == 0.01

    export_weights(place, tmp_path / "flat", format="dcp")
    read = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    dcp.load(read, checkpoint_id=tmp_path / "flat", no_dist=True)
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    export_weights(place, tmp_path / "nested", format="dcp", optimizer=True)
    moments = {"optimizer": {"state": {0: {"exp_avg": torch.zeros(16, 8)}}}}
    dcp.load(moments, checkpoint_id=tmp_path / "nested", no_dist=True)
    assert torch.equal(moments["optimizer"]["state"][0]["exp_avg"], both["optimizer"]["state"][0]["exp_avg"])


def test_the_command_has_the_formats_and_the_size_of_files(tuned, tmp_path, monkeypatch, capsys):
    place, _, weights = tuned
    for words, code, message in (
        (["hub", "--format", "hf", "--max-file-gb", "2e-6"], 0, "the weights of"),
        (["both.pt", "--format", "torch", "--optimizer"], 0, "the weights of"),
        (["x", "--max-file-gb", "0"], 2, "(--max-file-gb)"),
        (["x", "--format", "hug"], 2, "(--format)"),
    ):
        monkeypatch.setattr("sys.argv", ["samestep", "export", str(place), str(tmp_path / words[0]), *words[1:]])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert ended.value.code == code, said.err
        assert message in said.out + said.err
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) > 1
    read = torch.load(tmp_path / "both.pt", weights_only=True)["model"]
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def config_of(place, folder):
    return (exported(place, folder / "hub") / "config.json").read_text()


def saved(communicator, net, folder):
    run = Run(8, 4, 0, communicator=communicator)
    step = run.train_step(net, torch.optim.SGD(net.parameters(), lr=0.1), lambda net, batch: net(batch).logits.mean())
    run.save_checkpoint(folder, step)


def test_weights_that_were_loaded_in_16_bits_and_trained_in_32_are_read_as_they_are(tmp_path):
    in_16_bits = config()
    in_16_bits.dtype = torch.bfloat16
    net = net_class()(in_16_bits).bfloat16().float()
    in_turns(1, saved, net, tmp_path / "run")
    again = net_class().from_pretrained(exported(tmp_path / "run", tmp_path / "hub"))
    assert all(torch.equal(*pair) for pair in zip(net.cpu().parameters(), again.parameters(), strict=True))
    assert again.dtype == torch.float32


def test_what_a_format_does_not_hold_is_refused_before_anything_is_written(tuned, tmp_path):
    place, *_ = tuned
    for options, message in (
        ({"format": "onnx"}, "safetensors, torch, dcp, hf"),
        ({"format": "hf", "optimizer": True}, "needs --format torch or dcp"),
        ({"format": "hf", "max_file_gb": 0}, "max_file_gb"),
    ):
        with pytest.raises(UsageError, match=message):
            export_weights(place, tmp_path / "out", **options)
    (tmp_path / "taken").mkdir()
    for name, given, meant in (("w.pt", "safetensors", "torch"), ("w.safetensors", "torch", "safetensors")):
        with pytest.raises(UsageError, match=f"and the format {given}, .* give --format {meant}"):
            export_weights(tmp_path / "run", tmp_path / name, format=given)
    with pytest.raises(UsageError, match="is there already"):
        export_weights(place, tmp_path / "taken", format="dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp", "hf"])
def test_a_disk_that_is_full_is_named_and_nothing_is_left_of_the_target(tuned, tmp_path, format):
    place, *_ = tuned
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))  # bytes of a file: an error as by a full disk
    try:
        with pytest.raises(RunFolderError, match=r"File too large; free some space, or choose another TARGET"):
            export_weights(place, tmp_path / "out", format=format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    export_weights(place, tmp_path / "out", format=format)


def go_on(communicator, strategy, source):
    """The digest of two steps from what `torch.save` wrote of a model and its optimizer."""
    run = Run(16, 4, 0, communicator=communicator)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if source is not None:
        saved = torch.load(source, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    step = run.train_step(model, optimizer, lambda model, batch: model(batch).square().mean(), strategy=strategy)
    for _ in range(2):
        step(torch.randn(16, 3, generator=torch.Generator().manual_seed(1)))
    return state_digest(step)


def test_training_goes_on_from_what_torch_saved_alike_on_any_devices_and_with_divided_state(worlds, tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 3)).sum().backward()
    optimizer.step()
    source = tmp_path / "last.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    ends = {digest for size in (1, 2, 3) for digest in in_turns(size, go_on, "replicate", source)}
    ends |= set(in_turns(2, go_on, "zero1", source))
    ends |= set(worlds(2).run(go_on, "sharded", source))
    assert len(ends) == 1
    assert ends != {alone(go_on, "replicate", None)}
