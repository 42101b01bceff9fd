"""`samestep run` of scripts that start processes: ranks of their own are refused with a sentence, all else goes on."""

import importlib.util

import pytest
from cli_commands import samestep

SPAWNING = """
import os

import torch.multiprocessing as mp
from torch.distributed import destroy_process_group, init_process_group


def worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    init_process_group("gloo", rank=rank, world_size=world_size)
    destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(2,), nprocs=1)  # here
"""
PROCESSES = """
import os

import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, world_size):
    os.environ.setdefault("MASTER_PORT", "12355")
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    finally:
        print("not reached")


children = [mp.get_context("fork").Process(target=worker, args=(rank, 3)) for rank in range(3)]
for child in children:
    child.start()  # here
for child in children:
    child.join()
print("joined", flush=True)
"""
OWN_ADDRESS = """
import os

import torch.distributed as dist

os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = "12355"
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
"""
LEGITIMATE = """
import multiprocessing
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

fork = multiprocessing.get_context("fork")


def total(rank):
    dist.init_process_group("gloo")
    number = torch.tensor(rank + 1.0)
    dist.all_reduce(number)
    dist.destroy_process_group()
    if rank == 0:
        print("sum", number.item(), flush=True)


def alone(index, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{os.environ['RANK']}", rank=0, world_size=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    loader = DataLoader(torch.arange(8.0), batch_size=2, num_workers=2)
    rows = [sum(batch.sum().item() for batch in loader) for epoch in range(2)]
    with fork.Pool(2) as pool:
        squares = pool.map(abs, range(4))
    mp.start_processes(alone, args=(os.getcwd(),), nprocs=1, start_method="fork")
    child = fork.Process(target=total, args=(rank,))  # takes the place of its parent's rank
    child.start()
    child.join()
    assert child.exitcode == 0
    child.close()
    if rank == 0:
        print(rows, squares, flush=True)
"""


def run_script(folder, source, devices):
    """Runs a script by the command."""
    (folder / "train.py").write_text(source)
    return samestep("run", "--devices", devices, "train.py", cwd=folder)


@pytest.mark.parametrize(("source", "devices"), [(SPAWNING, "cpu:1"), (PROCESSES, "cpu:2")], ids=["spawn", "process"])
def test_a_script_that_starts_ranks_itself_is_told_where_it_does_and_what_to_write_instead(tmp_path, source, devices):
    done = run_script(tmp_path, source, devices)
    assert done.returncode == 2, done.stderr
    (line,) = [number for number, text in enumerate(source.splitlines(), 1) if "# here" in text]
    assert f"train.py starts its ranks itself (train.py, line {line})" in done.stderr
    assert f"has started {devices[-1]} of them already: start it with plain python; or drop the spawn" in done.stderr
    assert done.stderr.count("starts its ranks itself") == 1
    assert "Traceback" not in done.stderr
    assert "not reached" not in done.stdout


def test_a_script_that_has_its_ranks_meet_elsewhere_is_told_to_leave_the_address_alone(tmp_path):
    done = run_script(tmp_path, OWN_ADDRESS, "cpu:1")
    assert done.returncode == 2, done.stderr
    assert "train.py has its ranks meet at port 12355" in done.stderr
    assert "train.py, line 8" in done.stderr
    assert "leave MASTER_ADDR and MASTER_PORT as they are" in done.stderr


def test_loaders_pools_and_children_in_the_place_of_their_rank_go_on_working(tmp_path):
    done = run_script(tmp_path, LEGITIMATE, "cpu:2")
    seeded = "samestep: the script draws from torch without a seed: seeded by 0 here (--seed)\n"  # its loaders do
    assert (done.returncode, done.stderr) == (0, seeded)
    assert done.stdout.splitlines() == ["sum 3.0", "[28.0, 28.0] [0, 1, 2, 3]"]


ALONE = """
import os

import torch

os.environ["RANK"]
model = torch.nn.Linear(3, 1)
{before}
for _ in range(2):
    model(torch.ones(4, 3)).mean().backward()
"""
WITH_A_GROUP = "torch.distributed.init_process_group('gloo')"
WITH_A_RUN = "import samestep; run = samestep.Run(4, 2)"
LIGHTNING = """
import lightning, torch, warnings
warnings.simplefilter("ignore")

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 1)
    def training_step(self, batch, index):
        return self.inner(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **options{more})
trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8, 3), 2))
"""
FABRIC = """
import torch, warnings
from lightning.fabric import Fabric
warnings.simplefilter("ignore")

fabric = Fabric({more})
fabric.launch()
model = torch.nn.Linear(3, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
fabric.backward(model(torch.ones(4, 3)).mean())
assert fabric.world_size == 2
"""
TRANSFORMERS = """
import torch
from transformers import Trainer, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 1)
    def forward(self, x):
        return {{"loss": self.inner(x).mean()}}

arguments = TrainingArguments("out", max_steps=1, report_to=[], disable_tqdm=True, save_strategy="no"{more})
Trainer(Net(), arguments, train_dataset=[{{"x": torch.ones(3)}}] * 8).train()
"""


def lines_about(done):
    """What was said about processes that train on their own."""
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "trains on its own" in line]


def test_processes_that_nothing_connects_are_told_so_once_at_the_first_backward(tmp_path):
    (line,) = lines_about(run_script(tmp_path, ALONE.format(before=""), "cpu:2"))
    assert line.startswith("samestep: train.py has started no process group before its first backward: each of the 2")
    assert "samestep run --adopt" in line
    assert "--devices cpu:1" in line


@pytest.mark.parametrize(("before", "devices"), [(WITH_A_GROUP, 2), (WITH_A_RUN, 2), ("", 1)])
def test_processes_that_are_connected_or_alone_are_told_nothing(tmp_path, before, devices):
    assert lines_about(run_script(tmp_path, ALONE.format(before=before), f"cpu:{devices}")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "source", "more", "said"),
    [
        ("lightning", LIGHTNING, ', devices="auto"', 'give Lightning strategy="ddp" and devices=2'),
        ("lightning", LIGHTNING, ', strategy="ddp", devices=2', None),
        ("lightning", LIGHTNING, "", None),
        ("lightning", FABRIC, "", None),
        ("lightning", FABRIC, 'strategy="ddp"', None),
        ("transformers", TRANSFORMERS, "", None),
    ],
)
def test_trainers_that_do_not_distribute_their_work_are_told_what_to_give_them(tmp_path, package, source, more, said):
    if importlib.util.find_spec(package) is None:  # not imported here: it changes the environment
        pytest.skip(f"{package} is not installed")
    lines = lines_about(run_script(tmp_path, source.format(more=more), "cpu:2"))
    assert len(lines) == (said is not None)
    assert all(said in line for line in lines)
