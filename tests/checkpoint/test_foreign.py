"""Weights and optimizers' states that Lightning, Accelerate and torch have saved, loaded into a program."""

import importlib.util
import json
import pickle
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from worlds import in_turns

import samestep
from samestep.checkpoint.digest import state_digest
from samestep.checkpoint.export import export_weights
from samestep.errors import CheckpointError, UsageError

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()


def net(width=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained():
    """A net and its optimizer after two steps."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_fn(model, (X, Y)).backward()
        optimizer.step()
    return model, optimizer


LIGHTNING = """
import argparse, pathlib
import lightning, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Classifier(lightning.LightningModule):
    def __init__(self, data, options):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False)
module = Classifier(pathlib.Path("data"), argparse.Namespace(a=1))
trainer.fit(module, DataLoader(TensorDataset(torch.randn(16, 3), torch.arange(16) % 2), batch_size=8))
trainer.save_checkpoint("last.ckpt")
"""


def lightning(folder):
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed (the extra frameworks)")
    done = subprocess.run([sys.executable, "-c", LIGHTNING], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(pickle.UnpicklingError):
        torch.load(folder / "last.ckpt", weights_only=True)
    saved = torch.load(folder / "last.ckpt", weights_only=False)
    model = net()
    model.load_state_dict({name.removeprefix("net."): value for name, value in saved["state_dict"].items()})
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(saved["optimizer_states"][0])
    return folder / "last.ckpt", model, optimizer


def accelerate(folder, **options):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (the extra frameworks)")
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*trained())
    accelerator.save_state(folder / "state", **options)
    return folder / "state", model, optimizer.optimizer


def distributed(folder, names=False):
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    if names:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        state["optim"] = get_optimizer_state_dict(model, optimizer)
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"app": state} if names else state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp", model, optimizer


def plain(folder, wrapped=False):
    model, optimizer = trained()
    weights = nn.DataParallel(model).state_dict() if wrapped else model.state_dict()
    torch.save({"model": weights, "optimizer": optimizer.state_dict(), "epoch": 3}, folder / "last.pt")
    return folder / "last.pt", model, optimizer


def indexed(folder):
    model, _ = trained()
    tensors = model.state_dict()
    where = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors)}
    for name, file in where.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder, model, None


SOURCES = {
    "accelerate": accelerate,
    "accelerate, as pickles": lambda folder: accelerate(folder, safe_serialization=False),
    "distributed": distributed,
    "distributed, by name": lambda folder: distributed(folder, names=True),
    "torch.save": plain,
    "torch.save of DataParallel": lambda folder: plain(folder, wrapped=True),
    "an index": indexed,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_weights_and_optimizer_are_those_that_were_saved(kind, tmp_path):
    check_loaded(*SOURCES[kind](tmp_path))


def test_a_checkpoint_of_lightning_with_paths_among_its_hyperparameters_is_read_too(tmp_path):
    check_loaded(*lightning(tmp_path))


def check_loaded(source, model, optimizer):
    ours = net(seed=5)
    own = torch.optim.AdamW(ours.parameters(), lr=0.03)
    assert samestep.load_weights(ours, source, None if optimizer is None else own) == []
    assert all(torch.equal(*pair) for pair in zip(ours.state_dict().values(), model.state_dict().values(), strict=True))
    assert own.param_groups[0]["lr"] == 0.03, "settings are the program's"
    if optimizer is not None:
        theirs = optimizer.state_dict()["state"]
        assert own.state_dict()["state"].keys() == theirs.keys() != set()
        for number, entries in own.state_dict()["state"].items():
            assert all(torch.equal(value, theirs[number][name]) for name, value in entries.items())


def go_on(communicator, source, options, run_dir=None):
    """Trains from a source, with the state of its optimizer."""
    mesh = {"pipe": 2} if options.get("strategy") == "pipeline" else None
    run = samestep.Run(16, 4, 0, communicator=communicator, mesh=mesh)
    model = net(seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if source is not None:
        samestep.load_weights(model, source, optimizer)
    step = run.train_step(model, optimizer, loss_fn, **options)
    for _ in range(2):
        step((X, Y))
    if run_dir is not None:
        run.save_checkpoint(run_dir, step)
    return state_digest(step)


def test_training_goes_on_from_them_alike_on_any_devices_and_with_divided_state(worlds, tmp_path):
    source, *_ = plain(tmp_path)
    ends = {digest for size in (1, 2, 3) for digest in in_turns(size, go_on, source, {})}
    ends |= set(in_turns(2, go_on, source, {"shard_optimizer": True}))
    for strategy in ("sharded", "pipeline"):
        ends |= set(worlds(2).run(go_on_divided, strategy, source))
    assert len(ends) == 1
    assert ends != set(in_turns(1, go_on, None, {}))


def go_on_divided(communicator, strategy, source):
    return go_on(communicator, source, {"strategy": strategy})


def test_a_run_of_samestep_is_a_source_too(tmp_path):
    (digest,) = in_turns(1, go_on, None, {}, tmp_path / "own")
    model = net(seed=9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert samestep.load_weights(model, tmp_path / "own", optimizer) == []
    assert digest == state_digest(model, optimizer)


def test_what_does_not_fit_is_named_and_nothing_is_changed_unless_asked(tmp_path):
    source, saved, _ = plain(tmp_path)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5), nn.Linear(5, 1)).double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"no 3\.weight, no 3\.bias, 0\.weight as float32\[4, 3\], which is float64"
    ):
        samestep.load_weights(model, source)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    misfits = samestep.load_weights(model, source, strict=False)
    assert "2.weight as float32[2, 4], which is float64[5, 4] here" in misfits
    assert torch.equal(model[0].weight, saved[0].weight.double())
    assert torch.equal(model[2].weight, before["2.weight"])
    assert "also 2.weight" in samestep.load_weights(net()[:2], source, strict=False)
    with pytest.raises(CheckpointError, match=r"no 0\.alone"):
        samestep.load_weights(nn.Sequential(nn.ParameterDict({"alone": torch.ones(1)})), source, strict=False)


def test_another_optimizer_is_refused_before_anything_is_changed(tmp_path):
    source, *_ = plain(tmp_path)
    model = net(seed=5)
    before = model[0].weight.clone()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1:].parameters())}]
    for optimizer, message in (
        (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), "SGD keeps momentum_buffer"),
        (torch.optim.AdamW(model.parameters(), amsgrad=True), "max_exp_avg_sq"),
        (torch.optim.AdamW(groups), "groups of 2 and 4"),
        ([torch.optim.AdamW(model.parameters())] * 2, "state of 1 optimizer, and 2"),
    ):
        with pytest.raises(CheckpointError, match=message):
            samestep.load_weights(model, source, optimizer)
    with pytest.raises(UsageError, match="parameters that the model does not have"):
        samestep.load_weights(model, source, torch.optim.AdamW(net().parameters()))
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("kind", ["torch.save", "distributed, by name"])
def test_an_optimizer_gets_what_fits_if_it_is_asked_and_the_rest_is_named(tmp_path, kind):
    source, _, saved = SOURCES[kind](tmp_path)
    ours = net(seed=5)
    ours[2] = nn.Linear(4, 5)  # another head, as in fine-tuning
    own = torch.optim.AdamW(ours.parameters(), lr=0.1)
    misfits = samestep.load_weights(ours, source, own, strict=False)
    assert [text for text in misfits if "optimizer" in text] == [
        f"the optimizer's exp_avg float32[{size}] of a parameter float32[{new}]"
        for size, new in (("2, 4", "5, 4"), ("2", "5"))
    ]
    theirs, state = saved.state_dict()["state"], own.state_dict()["state"]
    assert [*state] == [0, 1, 2, 3] != [*theirs]
    assert all(torch.equal(state[n]["exp_avg"], theirs[n]["exp_avg"]) for n in state)
    loss_fn(ours, (X, Y)).backward()
    own.step()


@pytest.mark.parametrize("kind", ["AdamW", "RMSprop"])
def test_parameters_in_another_order_than_the_state_s_are_refused_before_anything_is_changed(tmp_path, kind):
    make, model, ours = partial(getattr(torch.optim, kind), lr=0.1), net(), net(seed=5)
    optimizer = make(model.parameters())
    loss_fn(model, (X, Y)).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    before = ours[0].weight.clone()
    with pytest.raises(CheckpointError, match=r"avg float32\[4, 3\] of a parameter float32\[2\]"):
        samestep.load_weights(ours, tmp_path / "last.pt", make([*ours.parameters()][::-1]))
    assert torch.equal(ours[0].weight, before)
    samestep.load_weights(ours, tmp_path / "last.pt", make(ours.parameters()))
    assert torch.equal(ours[0].weight, model[0].weight)


@pytest.mark.parametrize("entry", [None, "adamw", ["adamw"], {"generator": {"state": {}, "param_groups": []}}, {}])
def test_what_is_no_state_of_an_optimizer_is_left_alone_and_none_is_loaded_from_it(tmp_path, entry):
    torch.save({"model": net().state_dict(), "optimizer": entry}, tmp_path / "last.pt")
    model = net(seed=5)
    assert samestep.load_weights(model, tmp_path / "last.pt") == []
    with pytest.raises(CheckpointError, match="state of 0 optimizers, and 1"):
        samestep.load_weights(model, tmp_path / "last.pt", torch.optim.AdamW(model.parameters()))


def test_a_file_without_names_is_refused_by_what_it_holds(tmp_path):
    torch.save([net().state_dict()], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match=r"list\.pt holds .*list.*; needed: tensors by the names"):
        samestep.load_weights(net(), tmp_path / "list.pt")
    save_file(net().state_dict(), tmp_path / "weights.st")
    with pytest.raises(CheckpointError, match=r"weights\.st is no file of torch\.save, or not only of tensors"):
        samestep.load_weights(net(), tmp_path / "weights.st")


def by_rank(model, momenta):
    """SGD with a momentum for biases, and another one for matrices."""
    groups = [[p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (False, True)]
    return torch.optim.SGD(
        [{"params": group, "momentum": momentum} for group, momentum in zip(groups, momenta, strict=True)], lr=0.1
    )


@pytest.mark.parametrize("momenta", [(0.0, 0.9), (0.9, 0.0)])
def test_each_group_of_an_optimizer_keeps_what_its_own_settings_need(tmp_path, momenta):
    model, ours = net(), net(seed=5)
    optimizer, own = by_rank(model, momenta), by_rank(ours, momenta)
    loss_fn(model, (X, Y)).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    assert samestep.load_weights(ours, tmp_path / "last.pt", own) == []
    for one, other in zip(model.parameters(), ours.parameters(), strict=True):
        buffers = [state.get("momentum_buffer") for state in (optimizer.state[one], own.state.get(other, {}))]
        assert buffers == [None, None] or torch.equal(*buffers)
    with pytest.raises(CheckpointError, match=r"momentum_buffer of \d, and the program's SGD keeps nothing of"):
        samestep.load_weights(ours, tmp_path / "last.pt", by_rank(ours, (0.0, 0.0)))


class Scaled(nn.Linear):
    """A layer with a number that is kept as extra state: a dict, or a tensor."""

    def __init__(self, kind, scale):
        super().__init__(3, 2)
        self.kind, self.scale = kind, scale

    def forward(self, x):
        return super().forward(x) * self.scale

    def get_extra_state(self):
        return self.kind(self.scale)

    def set_extra_state(self, state):
        self.scale = float(state["scale"] if isinstance(state, dict) else state)


def as_dict(scale):
    return {"scale": scale}


@pytest.mark.parametrize("kind", [as_dict, torch.tensor])
def test_extra_state_of_modules_is_loaded_and_missed_where_there_is_none(tmp_path, kind):
    source = nn.Sequential(Scaled(kind, 3.0))
    (run,) = in_turns(1, saved_run, source, tmp_path / "own")
    torch.save(source.state_dict(), tmp_path / "last.pt")
    for place in (tmp_path / "last.pt", run):
        ours = nn.Sequential(Scaled(kind, 1.0))
        assert samestep.load_weights(ours, place) == []
        assert ours[0].scale == 3.0
    torch.save(dict(source.named_parameters()), tmp_path / "parameters.pt")
    with pytest.raises(CheckpointError, match=r"no 0\._extra_state"):
        samestep.load_weights(nn.Sequential(Scaled(kind, 1.0)), tmp_path / "parameters.pt")


def test_several_optimizers_are_given_all_or_by_request_the_first(tmp_path):
    model, optimizer = trained()
    other = torch.optim.SGD(model.parameters(), 0.1)
    content = {"model": model.state_dict(), "optimizer": [optimizer.state_dict(), other.state_dict()]}
    torch.save(content, tmp_path / "last.pt")
    ours = net(seed=5)
    own = torch.optim.AdamW(ours.parameters())
    with pytest.raises(CheckpointError, match="state of 2 optimizers, and 1 are to be loaded; give all"):
        samestep.load_weights(ours, tmp_path / "last.pt", own)
    assert samestep.load_weights(ours, tmp_path / "last.pt", strict=False) == []
    assert samestep.load_weights(ours, tmp_path / "last.pt", own, strict=False) == ["also the state of optimizer 1"]
    assert samestep.load_weights(ours, tmp_path / "last.pt", [own, torch.optim.SGD(ours.parameters(), 0.1)]) == []
    assert own.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


@pytest.mark.parametrize("kind", ["NAdam", "RMSprop", "Adafactor"])
@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_an_export_with_the_optimizer_is_loaded_back_as_it_was(tmp_path, kind, format):
    model, ours = net(), net(seed=5)
    optimizer, own = (getattr(torch.optim, kind)(each.parameters()) for each in (model, ours))
    in_turns(1, saved_run, model, tmp_path / "own", optimizer)
    export_weights(tmp_path / "own", tmp_path / "out", format=format, optimizer=True)
    assert samestep.load_weights(ours, tmp_path / "out", own) == []
    assert state_digest(ours, own) == state_digest(model, optimizer)


def test_a_damaged_checkpoint_is_named_where_an_older_one_is_loaded(tmp_path, capfd):
    model = net()
    in_turns(1, saved_run, model, tmp_path, None, 2)
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"")
    assert samestep.load_weights(net(), tmp_path) == []
    said = capfd.readouterr().err
    assert "step-00000002 is no good checkpoint" in said
    assert "step-00000001 is taken in its place" in said


def saved_run(communicator, model, folder, optimizer=None, steps=1):
    run = samestep.Run(16, 4, 0, communicator=communicator)
    step = run.train_step(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    for _ in range(steps):
        step((X, Y))
        run.save_checkpoint(folder, step)
    return folder


@pytest.mark.parametrize("kind", ["lazy", "meta"])
def test_a_model_without_memory_is_refused_rather_than_left_as_it_is(tmp_path, kind):
    source, *_ = plain(tmp_path)
    model = net().to("meta") if kind == "meta" else nn.Sequential(nn.LazyLinear(4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(UsageError, match=r"no memory yet for 0\.bias, 0\.weight"):
        samestep.load_weights(model, source)
    model.to_empty(device="cpu") if kind == "meta" else model(X)
    assert samestep.load_weights(model, source) == []


class Harm:
    """A pickle that makes a file when it is read."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def poisoned(folder, kind, harm):
    """A source of each kind with that object in a pickle."""
    if kind == "legacy":
        torch.save({"state_dict": net().state_dict(), "x": harm}, folder / kind, _use_new_zipfile_serialization=False)
    elif kind == "metadata":
        distributed(folder)
        with (folder / "dcp" / ".metadata").open("wb") as file:
            pickle.dump(harm, file)
        return folder / "dcp"
    elif kind == "entry":
        model = net()
        with warnings.catch_warnings(action="ignore"):
            dcp.save({"model": model.state_dict(), "x": harm}, checkpoint_id=folder / "dcp", no_dist=True)
        return folder / "dcp"
    else:
        torch.save({"state_dict": net().state_dict(), "x": harm}, folder / kind)
    return folder / kind


@pytest.mark.parametrize("kind", ["ckpt", "legacy", "metadata", "entry"])
def test_a_pickle_with_code_in_it_is_refused_and_does_not_run(tmp_path, kind):
    source, ran = poisoned(tmp_path, kind, Harm(tmp_path / "ran")), tmp_path / "ran"
    with pytest.raises(CheckpointError, match=r"pathlib\.|touch|getattr|read"):
        samestep.load_weights(net(), source)
    assert not ran.exists()
    if kind in ("ckpt", "legacy"):  # the twin: the pickle does what it is made for
        torch.load(source, weights_only=False)
        assert ran.exists()
    elif kind == "metadata":
        pickle.loads((source / ".metadata").read_bytes())
        assert ran.exists()


def test_a_file_outside_of_the_folder_and_a_part_that_is_not_there_are_refused(tmp_path):
    folder, *_ = indexed(tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"0.weight": "../model-0.safetensors"}}))
    with pytest.raises(CheckpointError, match="not a file in it"):
        samestep.load_weights(net(), folder)
    for missing in (tmp_path / "nothing.pt", tmp_path.parent):
        with pytest.raises(UsageError, match="needed"):
            samestep.load_weights(net(), missing)
