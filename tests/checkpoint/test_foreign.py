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
        ([torch.optim.AdamW(model.parameters())] * 2, "state of 1 optimizers, and 2"),
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
