"""`samestep run` of scripts that start processes: ranks of their own are logical ones, or refused; all else goes on."""

import importlib.util
import json
import re
import socket
import sys
import textwrap
from datetime import timedelta

import gpus
import pytest
import torch
from cli_commands import SAMESTEP, samestep
from marked import free_port

from samestep.logical.ranks import _stores
from samestep.patch import applied

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


def run_script(folder, source, devices, *words):
    """Runs a script by the command."""
    (folder / "train.py").write_text(source)
    return samestep("run", "--devices", devices, *words, "train.py", cwd=folder)


def line_of_start(source):
    """The line that the message is to name."""
    (line,) = [
        number for number, text in enumerate(source.splitlines(), 1) if "# here" in text or "    child.st" in text
    ]
    return line


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--devices", "cpu:2"),
        ("run", "--devices", "cpu:1", "--logical-devices", "2", "--nnodes", "2", "--rdzv-endpoint", "localhost:1"),
        ("verify", "--logical-devices", "2"),
    ],
    ids=["no logical devices", "machines", "verify"],
)
def test_a_script_that_starts_ranks_itself_is_refused_by_its_text_where_it_cannot_run(tmp_path, refused, words):
    (tmp_path / "train.py").write_text(SPAWNING)
    said = refused(*words, tmp_path / "train.py")
    assert ": the script starts its ranks itself, which needs samestep run --logical-devices V" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("source", "devices"), [(SPAWNING, "cpu:1"), (PROCESSES, "cpu:2")], ids=["spawn", "process"])
def test_a_script_that_starts_ranks_itself_under_multi_process_is_told_where_it_does(tmp_path, source, devices):
    done = run_script(tmp_path, source, devices, "--multi-process")
    assert done.returncode == 2, done.stderr
    assert f"train.py starts its ranks itself (train.py, line {line_of_start(source)})" in done.stderr
    assert f"has started {devices[-1]} of them already: give samestep run --logical-devices V" in done.stderr
    assert done.stderr.count("starts its ranks itself") == 1
    assert "Traceback" not in done.stderr
    assert "not reached" not in done.stdout


def test_a_script_that_may_also_leave_its_ranks_to_torchrun_is_refused_when_it_starts_the_second(tmp_path):
    source = SPAWNING.replace("nprocs=1", "nprocs=8").replace("def worker(", "print(os.environ['RANK'])\n\ndef worker(")
    done = run_script(tmp_path, source, "cpu:1")
    assert done.returncode == 2, done.stderr
    assert f"train.py starts its ranks itself (train.py, line {line_of_start(source)})" in done.stderr
    assert set(done.stdout.split()) == {"0"}
    assert len(done.stdout.split()) <= 2  # each process prints it


def test_a_script_that_has_its_ranks_meet_elsewhere_is_told_to_leave_the_address_alone(tmp_path):
    done = run_script(tmp_path, OWN_ADDRESS, "cpu:1")
    assert done.returncode == 2, done.stderr
    assert "train.py has its ranks meet at port 12355" in done.stderr
    assert "train.py, line 8" in done.stderr
    assert "leave MASTER_ADDR and MASTER_PORT as they are" in done.stderr


def test_ranks_that_the_script_starts_are_told_of_another_run_at_their_port(tmp_path):
    with socket.create_server(("localhost", 0)) as other:
        port = str(other.getsockname()[1])
        source = SPAWNING.replace("12355", port).replace("nprocs=1", "nprocs=2")
        assert port in source
        done = run_script(tmp_path, source, "cpu:1", "--logical-devices", "2")
    assert done.returncode == 1, done.stderr
    assert f"has its ranks meet at port {port}, which is in use" in done.stderr


def test_ranks_of_two_runs_that_meet_at_one_port_do_not_find_each_other(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    rendezvous = importlib.import_module("torch.distributed.rendezvous")

    def store(run, port):
        with applied(_stores(run)):
            return rendezvous._create_c10d_store("localhost", port, 0, 1, timedelta(seconds=20))

    port = free_port()
    own = store(1, port)
    own.set("key", "value")
    assert store(1, port).check(["key"])
    assert not store(2, port).check(["key"])


@pytest.mark.parametrize("options", [("cpu:2",), ("cpu:1", "--logical-devices", "2")])
def test_a_driver_of_ray_is_refused_where_it_would_wait_for_ever(tmp_path, options):
    # In place of Ray, which is no requirement: what counts is the name by which it starts, also at its first use.
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "ray.py").write_text(
        "def init(): raise AssertionError\ndef get(): return __import__('ray').init()\n"
    )
    (tmp_path / "train.py").write_text("import ray, torch.distributed\nray.get()\n")
    done = samestep("run", "--devices", *options, "train.py", cwd=tmp_path, PYTHONPATH=str(tmp_path / "lib"))
    assert done.returncode == 2, done.stderr
    assert "start the script by python, and use samestep.Run in the workers that Ray starts" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_whose_ranks_are_those_of_mpi_is_told_where_samestep_has_them(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    done = run_script(tmp_path, f"import mpi4py\n{OWN_ADDRESS}", "cpu:1")
    assert done.returncode == 2, done.stderr
    assert "train.py takes its ranks from MPI (mpi4py), which samestep does not start" in done.stderr
    assert "RANK and WORLD_SIZE" in done.stderr


def test_loaders_pools_and_children_in_the_place_of_their_rank_go_on_working(tmp_path):
    done = run_script(tmp_path, LEGITIMATE, "cpu:2")
    seeded = "samestep: the script draws from torch without a seed: seeded by 0 here (--seed)\n"  # its loaders do
    assert (done.returncode, done.stderr) == (0, seeded)
    assert done.stdout.splitlines() == ["sum 3.0", "[28.0, 28.0] [0, 1, 2, 3]"]


STARTING = """
import argparse, builtins, json, multiprocessing, os, random, sys, time
import numpy as np
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--world-size", type=int, default=1)
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--dist-url")
parser.add_argument("--gpus", type=int, default=4)
parser.add_argument("--start", choices=["spawn", "fork", "forkserver", "join", "late", "process", "class", "torchrun"])
parser.add_argument("--fail", type=int)
parser.add_argument("--exit", type=int)
parser.add_argument("--nccl", action="store_true")
parser.add_argument("--leak", action="store_true")
parser.add_argument("--exact", action="store_true")

def main():
    args = parser.parse_args()
    with multiprocessing.Pool(2) as pool:
        print("before", pool.map(abs, [-1, 2]), [*DataLoader(range(2), num_workers=2)], flush=True)
    helper = multiprocessing.get_context("fork").Process(target=os.getpid)
    helper.start(), helper.join()
    args.gpus = torch.cuda.device_count() if args.nccl else args.gpus
    if args.start == "torchrun":
        args.rank, args.world_size = -1, -1
        train(None, args)
        return
    args.world_size *= args.gpus
    context = multiprocessing.get_context("fork")
    if args.start == "process":
        ranks = [context.Process(target=train, args=(gpu, args)) for gpu in range(args.gpus)]
    elif args.start == "class":
        ranks = [Rank(gpu, args) for gpu in range(args.gpus)]
    elif args.start == "join":
        started = mp.start_processes(train, (args,), args.gpus, join=False, start_method="fork")
        print("joined at once:", started.join(0.001), flush=True)
        while not started.join():
            pass
        ranks = []
    elif args.start == "late":  # looks when the ranks that waited for the failed one have ended too, if they do at once
        started = mp.start_processes(train, (args,), args.gpus, join=False, start_method="fork")
        started.processes[args.fail].join()
        time.sleep(0.5)
        started.join()
    elif args.start == "spawn":
        ranks = mp.spawn(train, nprocs=args.gpus, args=(args,)) or []
    else:
        ranks = mp.start_processes(train, (args,), args.gpus, start_method=args.start) or []
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    print("after", [each.exitcode for each in ranks], flush=True)

class Rank(multiprocessing.get_context("fork").Process):
    def __init__(self, gpu, args):
        super().__init__()
        self.gpu, self.args = gpu, args
    def run(self):
        train(self.gpu, self.args)

def train(gpu, args):
    if args.rank == -1:
        args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        args.rank = args.rank * args.gpus + gpu
    if args.nccl:
        torch.cuda.set_device(gpu)
    if args.dist_url == "env://":
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "1")  # the launcher has given a free one
    place = {"init_method": args.dist_url, "world_size": args.world_size, "rank": args.rank}
    init_process_group("nccl" if args.nccl else "gloo", **place)
    rank = dist.get_rank()
    if rank == args.fail:
        raise ValueError(f"of rank {rank}")
    if rank == args.exit:
        os._exit(7)
    # The device that it really has.
    place = json.loads(os.environ.get("SAMESTEP_WORKER", "{}")).get("device_index", rank)
    torch.manual_seed(rank + (args.world_size * place if args.leak else 0))
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 6, generator=drawn), torch.randint(3, (96,), generator=drawn))
    if args.exact:  # whole numbers and powers of two, whose sums are the same in every order
        model, data = nn.Linear(6, 3), TensorDataset(data[:][0].round()[:32], data[:][1][:32])
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    model = model.cuda(gpu) if args.nccl else model
    model = DistributedDataParallel(model, device_ids=[gpu] if args.nccl else None, bucket_cap_mb=0.001)
    kind = torch.optim.SGD if args.exact else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=2**-6)
    for x, y in DataLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=1):
        optimizer.zero_grad()
        x, y = (x.cuda(gpu), y.cuda(gpu)) if args.nccl else (x, y)
        out = model(x if args.exact else x + random.random() + np.random.rand())  # unseeded
        loss = (out.gather(1, y[:, None]) - 8).square().sum() if args.exact else nn.functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
    facts = [None] * dist.get_world_size()
    own = {"backend": dist.get_backend(), "group": type(dist.group.WORLD).__name__, "device": place, "pid": os.getpid()}
    dist.all_gather_object(facts, {"loss": loss.item().hex(), **own})
    if rank == 0:
        assert len({each.pop("pid") for each in facts}) == len(facts)
        print("groups", {each.pop("group") for each in facts}, file=sys.stderr)
        print("devices", sorted({each.pop("device") for each in facts}), file=sys.stderr)
        assert ("RANK" in os.environ) == (args.start == "torchrun")
        print(json.dumps(facts), flush=True)
        torch.save(model.state_dict(), "model.pt")
    destroy_process_group()

if __name__ == "__main__":
    main()
"""


BEFORE = "before [1, 2] [tensor([0]), tensor([1])]"


def started(folder, devices, *words, logical=4, meet="tcp", environment=None):
    """What a script prints that starts its ranks, its messages, its exit code, and the state that it saves.

    Without devices it is started by python.
    """
    folder.mkdir()
    (folder / "train.py").write_text(STARTING)
    url = {"tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{folder}/meet", "env": "env://"}[meet]
    command = SAMESTEP if devices else (sys.executable,)
    options = ("run", "--devices", devices, "--logical-devices", logical) if devices else ()
    program = ("train.py", "--dist-url", url, *words)
    done = samestep(*options, *program, cwd=folder, command=command, **(environment or {}))
    saved = [] if done.returncode else torch.load(folder / "model.pt", map_location="cpu", weights_only=True).values()
    return done.stdout, done.stderr, done.returncode, [tensor.numpy().tobytes() for tensor in saved]


@pytest.fixture(scope="module")
def forked_on_one(tmp_path_factory):
    """The outcome of ranks that are forked on one device."""
    return started(tmp_path_factory.mktemp("one") / "run", "cpu:1", "--start", "fork")


@pytest.mark.parametrize(("devices", "meet"), [(2, "file"), pytest.param(3, "env", marks=pytest.mark.slow)])
def test_ranks_that_a_script_starts_give_the_same_bits_on_one_to_four_devices(tmp_path, forked_on_one, devices, meet):
    printed, messages, code, state = forked_on_one
    assert code == 0, messages
    first, facts, last = printed.splitlines()
    assert (first, last) == (BEFORE, "after []")
    assert len({each["loss"] for each in json.loads(facts)}) == 4
    assert "groups {'OrderedProcessGroup'}" in messages
    others = started(tmp_path / "run", f"cpu:{devices}", "--start", "fork", meet=meet)
    assert (others[0], others[3]) == (printed, state)
    assert f"devices {[*range(devices)]}" in others[1]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_exact_sums_end_in_the_bits_of_python(tmp_path, start):
    words = ("--exact", "--start", start)
    ours, theirs = (started(tmp_path / str(devices), devices, *words) for devices in ("cpu:2", None))
    assert theirs[2] == 0, theirs[1]
    assert "groups {'ProcessGroup'}" in theirs[1]
    assert (ours[0], ours[3]) == (theirs[0], theirs[3])
    assert any(any(content) for content in ours[3])


def test_ranks_that_let_their_real_device_into_a_seed_are_found_out(tmp_path, forked_on_one):
    leaking = started(tmp_path / "run", "cpu:2", "--start", "fork", "--leak")  # one device is 0 for all ranks
    assert leaking[2] == 0, leaking[1]
    assert leaking[3] != forked_on_one[3]


@pytest.mark.parametrize(
    ("words", "meet", "printed"),
    [
        pytest.param(("--start", "spawn"), "env", [], marks=pytest.mark.slow),  # below with simulated GPUs
        pytest.param(("--start", "forkserver"), "file", [], marks=pytest.mark.slow),
        (("--start", "join"), "tcp", ["joined at once: False"]),
        (("--start", "class"), "file", []),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_every_way_of_starting_ranks_gives_the_same_bits(tmp_path, forked_on_one, words, meet, printed):
    found, messages, code, state = started(tmp_path / "run", "cpu:2", *words, meet=meet)
    assert code == 0, messages
    first, *more, facts, last = found.splitlines()
    assert (first, more) == (BEFORE, printed)
    assert "devices [0, 1]" in messages
    assert last == f"after {[0] * 4 if words[1] == 'class' else []}"
    assert (facts, state) == (forked_on_one[0].splitlines()[1], forked_on_one[3])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("fork", "--fail", 2), 1, "-- Process 2 terminated with the following error:\nTraceback"),
        pytest.param(("spawn", "--fail", 1), 1, "ValueError: of rank 1\n", marks=pytest.mark.slow),
        (("late", "--fail", 2), 1, "-- Process 2 terminated with the following error:\nTraceback"),
        (("fork", "--exit", 3), 1, "ProcessExitedException: process 3 terminated with exit code 7"),
        (("process", "--gpus", 6), 0, "samestep: 6 ranks make a process group, on 4 logical devices"),
    ],
    ids=["exception", "exception of spawn", "exception seen late", "exit code", "more"],
)
def test_the_end_and_the_number_of_ranks_are_those_of_the_script(tmp_path, words, code, message):
    printed, messages, ended, _ = started(tmp_path / "run", "cpu:2", "--start", *words)
    assert ended == code, messages
    assert messages.count(message) == 1, messages
    assert printed.startswith("before")
    assert ("after" in printed) == (code == 0)


def test_a_script_that_an_option_starts_as_under_torchrun_runs_so(tmp_path):
    printed, messages, code, _ = started(tmp_path / "run", "cpu:2", "--start", "torchrun", meet="env")
    assert code == 0, messages
    first, facts = printed.splitlines()
    assert (first, len(json.loads(facts))) == (BEFORE, 4)


def test_a_script_that_starts_no_rank_after_all_runs_once_and_says_so(tmp_path):
    source = SPAWNING.replace("mp.spawn", "print('once') if True else mp.spawn")
    done = run_script(tmp_path, source, "cpu:2", "--logical-devices", "3")
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr
    assert "train.py has started no rank and made no process group: it ran once" in done.stderr


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_ranks_that_a_script_starts_on_cpu_workers_see_simulated_gpus(tmp_path, start):
    runs = [started(tmp_path / each, each, "--nccl", "--start", start) for each in ("cpu:1", "cpu:2")]
    assert runs[0][2] == 0, runs[0][1]
    assert {each["backend"] for each in json.loads(runs[0][0].splitlines()[1])} == {"nccl"}
    assert (runs[0][0], runs[0][3]) == (runs[1][0], runs[1][3])


@gpus.needs_fake_gpus
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_ranks_that_a_script_starts_share_the_gpus(tmp_path, start):
    own = gpus.environment(4)
    runs = [started(tmp_path / each, each, "--nccl", "--start", start, environment=own) for each in ("0,", "1,3")]
    assert runs[0][2] == 0, runs[0][1]
    assert {each["backend"] for each in json.loads(runs[0][0].splitlines()[1])} == {"nccl"}
    assert (runs[0][0], runs[0][3]) == (runs[1][0], runs[1][3])


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


def lines_about(done):
    """What was said about processes that train on their own."""
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "trains on its own" in line]


def test_processes_that_nothing_connects_are_told_so_once_at_the_first_backward(tmp_path):
    (line,) = lines_about(run_script(tmp_path, ALONE.format(before=""), "cpu:2"))
    assert line.startswith("samestep: train.py has started no process group before its first backward: each of the 2")
    assert "samestep run --single-process" in line
    assert "--devices cpu:1" in line


@pytest.mark.parametrize(("before", "devices"), [(WITH_A_GROUP, 2), (WITH_A_RUN, 2), ("", 1)])
def test_processes_that_are_connected_or_alone_are_told_nothing(tmp_path, before, devices):
    assert lines_about(run_script(tmp_path, ALONE.format(before=before), f"cpu:{devices}")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (', devices="auto"', 'give Lightning strategy="ddp" and devices=2'),
        (', strategy="ddp", devices=2', None),
        ("", None),
    ],
)
def test_a_trainer_that_does_not_distribute_its_work_is_told_what_to_give_it(tmp_path, more, said):
    if importlib.util.find_spec("lightning") is None:  # not imported here: it changes the environment
        pytest.skip("lightning is not installed")
    lines = lines_about(run_script(tmp_path, LIGHTNING.format(more=more), "cpu:2"))
    assert len(lines) == (said is not None)
    assert all(said in line for line in lines)


TORCHRUN = """
    import os, subprocess, sys
    kind, way = sys.argv[1:]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ranks.py", kind]
    os.system(" ".join(command)) if way == "system" else subprocess.run(command, check=True)
"""
RANKS = """
    import sys, torch, torch.distributed as dist
    kind = sys.argv[1]
    if kind == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    total = torch.full((1,), 1.0 + dist.get_rank(), device=kind)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print("sum", total.item(), "by samestep:", "samestep" in sys.modules, torch.get_num_threads())
    dist.destroy_process_group()
"""
LOGICAL = "samestep: train.py starts torchrun: its 2 ranks are logical ones (samestep run)\n"
OUTSIDE = "samestep: train.py starts torchrun: its ranks train outside of samestep, with torchrun's bits"


@pytest.mark.parametrize(("kind", "devices", "threads"), [("cpu", "cpu:3", 2), ("cuda", "cpu:1", 1)])
def test_a_torchrun_of_a_script_runs_logical_ranks_if_the_script_does(tmp_path, kind, devices, threads):
    (tmp_path / "train.py").write_text(textwrap.dedent(TORCHRUN))
    (tmp_path / "ranks.py").write_text(textwrap.dedent(RANKS))
    words = ("--devices", devices, "--logical-devices", "3", "--num-threads", threads)
    done = samestep("run", *words, "train.py", kind, "run", cwd=tmp_path)
    stand_in = "1 CPU worker stands" if devices == "cpu:1" else "2 CPU workers stand"
    assert (done.returncode, done.stderr) == (0, f"{LOGICAL}samestep: {stand_in} in for cuda:0 and cuda:1\n")
    assert done.stdout == f"sum 3.0 by samestep: True {threads}\n"


@pytest.mark.parametrize(
    ("way", "words"),
    [("run", []), ("system", ["--logical-devices", "2"])],
    ids=["no logical devices", "a shell"],
)
def test_a_torchrun_that_runs_outside_of_samestep_is_named(tmp_path, way, words):
    (tmp_path / "train.py").write_text(textwrap.dedent(TORCHRUN))
    (tmp_path / "ranks.py").write_text(textwrap.dedent(RANKS))
    done = samestep("run", "--devices", "cpu:1", *words, "train.py", "cpu", way, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "sum 3.0 by samestep: False 1\n"), done.stderr
    assert done.stderr.count(OUTSIDE) == 1


PRINTS = """
    import os, sys
    import torch.distributed as dist

    def fail(rank):
        if rank == 1 and sys.argv[1] == "fails":
            raise ValueError("as it must")

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print("a line\\n" * (1, 0, 3, 11)[rank], end="", flush=True)
    print("an error's line", file=sys.stderr)
    dist.barrier()
    fail(rank)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("words", [["--devices", "cpu:2", "--logical-devices", "4"], ["--devices", "cpu:4"]])
def test_a_line_says_at_the_end_what_ranks_above_0_have_printed(tmp_path, words):
    (tmp_path / "train.py").write_text(textwrap.dedent(PRINTS))
    done = samestep("run", *words, "train.py", "ends", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "a line\n")
    assert done.stderr == "an error's line\nsamestep: ranks 2 and 3 printed 14 lines, which --log-dir DIR keeps\n"
    done = samestep("run", *words, "--log-dir", "logs", "train.py", "ends", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a line\n", "an error's line\n")
    assert (tmp_path / "logs" / "rank-2.log").read_text().count("a line") == 3


@pytest.mark.parametrize("words", [["--devices", "cpu:2", "--logical-devices", "4"], ["--devices", "cpu:2"]])
def test_the_traceback_of_a_rank_begins_in_the_script(tmp_path, words):
    (tmp_path / "train.py").write_text(textwrap.dedent(PRINTS))
    done = samestep("run", *words, "train.py", "fails", cwd=tmp_path)
    frames = re.findall('File "(.*)", line', done.stderr.partition("Traceback (most recent call last):")[2])
    assert frames == [str(tmp_path / "train.py")] * 2, done.stderr


@pytest.mark.parametrize("words", [[], ["--multi-process"]])
def test_a_script_of_a_library_that_has_one_rank_under_python_is_told_so(tmp_path, words):
    (tmp_path / "accelerate.py").touch()  # one that is read as the library, if it is installed
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "train.py").write_text("import accelerate\nprint(1)")
    done = samestep("run", "--devices", "cpu:2", *words, "train/train.py", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    said = "python has one rank: --single-process shares that one out, --devices cpu:1 runs it whole" in done.stderr
    assert said == (not words)
