"""`samestep run --logical-devices` of scripts that deal with ranks: the same bits on any number of devices."""

import contextlib
import json
import random
import re
import subprocess
import textwrap
import time

import gpus
import psutil
import pytest
import torch
from cli_commands import SAMESTEP, samestep

TRAINING = """
    import json, os, signal, sys
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    options = json.loads(sys.argv[1])
    rank, world_size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local)
    if "pids" in options:
        with open(f"{options['pids']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}", "w") as file:
            file.write(str(os.getpid()))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    place = os.environ.get("SAMESTEP_TOKEN", "").rpartition(":")[2] or rank  # the device that it really has
    seed = rank + world_size * int(place if options.get("leak") else 0)
    torch.manual_seed(seed)  # dropout of its own on each rank; DistributedDataParallel makes the models equal
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if options.get("sync") else model
    model = DistributedDataParallel(model.to(device), device_ids=[local] if on_gpu else None, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 6, generator=drawn), torch.randint(3, (96,), generator=drawn))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    first, saved = 0, "checkpoint.pt"
    if os.path.exists(saved):
        state = torch.load(saved, map_location=device, weights_only=True)
        first = state["epoch"]
        model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    dist.barrier()
    for epoch in range(first, options.get("epochs", 3)):
        torch.manual_seed(100 * epoch + seed)
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        if epoch == 1 and options.get("killed") == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        losses = [torch.zeros((), device=device) for _ in range(world_size)]
        dist.all_gather(losses, loss.detach())
        if rank == 0:
            print(epoch, [each.item().hex() for each in losses], flush=True)
            state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, saved + ".new")
            os.replace(saved + ".new", saved)
        dist.barrier()
    facts = {
        "backend": dist.get_backend(), "count": torch.cuda.device_count(), "device": str(model.device),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "size": dist.get_world_size(),
    }
    print("rank", rank, json.dumps(facts), flush=True)
    dist.destroy_process_group()
"""


LONG = 20  # epochs: a run lasts longer than the time to its first death


def trained(folder, devices, logical=4, words=(), environment=None, **options):
    """What a run of the training prints, its messages, and the state that it saves."""
    folder.mkdir()
    (folder / "train.py").write_text(textwrap.dedent(TRAINING))
    command = ["run", "--devices", devices, "--logical-devices", logical, *words, "train.py", json.dumps(options)]
    done = samestep(*command, cwd=folder, **(environment or {}))
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, saved_state(folder)


def saved_state(folder):
    """The bytes of all tensors that the training saved."""
    state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    moments = [value for each in state["optimizer"]["state"].values() for value in each.values()]
    return [tensor.numpy().tobytes() for tensor in (*state["model"].values(), *moments)]


def test_four_ranks_give_the_same_bits_on_one_two_three_and_four_devices(tmp_path):
    runs = {count: trained(tmp_path / str(count), f"cpu:{count}") for count in (1, 2, 3, 4)}
    printed, messages, state = runs[1]
    assert len(printed.splitlines()) == 4
    facts = json.loads(printed.splitlines()[-1].removeprefix("rank 0 "))
    assert (facts["size"], facts["backend"], facts["device"]) == (4, "gloo", "cpu")
    assert "Traceback" not in messages
    assert all((run[0], run[2]) == (printed, state) for run in runs.values())
    other = trained(tmp_path / "three ranks", "cpu:1", logical=3)
    assert other[0] != printed, "the number of logical devices is part of the training"


def test_a_script_that_lets_its_real_device_into_a_seed_is_found_out(tmp_path):
    runs = [trained(tmp_path / str(count), f"cpu:{count}", leak=True) for count in (1, 2)]
    assert runs[0][2] != runs[1][2]


def test_after_a_death_all_ranks_start_again_on_the_devices_that_are_left(tmp_path):
    undisturbed = trained(tmp_path / "undisturbed", "cpu:1")
    printed, messages, state = trained(tmp_path / "killed", "cpu:2", words=("--max-restarts", 1), killed=3)
    assert "rank 3 on CPU worker 1 was ended by SIGKILL" in messages
    assert "all workers start again on 1 device, without CPU worker 1 (1 of 1)" in messages
    assert state == undisturbed[2]
    assert printed.splitlines()[-2:] == undisturbed[0].splitlines()[-2:]


def killed_at_random(folder, draw):
    """A run on 2 to 4 devices; up to as many deaths less one, of a rank or of all ranks of a device, from outside.

    Returns the number of deaths, the messages and the state that is saved.
    """
    folder.mkdir()
    (folder / "train.py").write_text(textwrap.dedent(TRAINING))
    devices, logical = draw.randint(2, 4), 4
    words = ["--devices", f"cpu:{devices}", "--logical-devices", str(logical), "--max-restarts", str(devices - 1)]
    command = [*SAMESTEP, "run", *words, "train.py", json.dumps({"pids": "pid", "epochs": LONG})]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    kills = 0
    with subprocess.Popen(command, cwd=folder, **pipes) as run:
        for attempt in range(devices - 1):
            numbers = {folder / f"pid-{attempt}-{rank}": rank for rank in range(logical)}
            while not all(path.exists() and path.read_text() for path in numbers) and run.poll() is None:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.6))
            left = devices - attempt
            device = draw.randrange(left)
            those = [rank for rank in range(logical) if rank * left // logical == device]
            for rank in draw.choice([those, [draw.choice(those)]]):
                try:
                    process = psutil.Process(int((folder / f"pid-{attempt}-{rank}").read_text()))
                    if process.cwd() == str(folder):
                        process.kill()
                except (OSError, psutil.Error):
                    continue  # it has ended
                kills = attempt + 1
            if kills <= attempt:
                break
        messages = run.communicate(timeout=240)[1]
    assert run.returncode == 0, messages
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert process.cwd() != str(folder), f"{process} is left behind"
    return kills, messages, saved_state(folder)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_a_run_whose_ranks_are_killed_at_random_ends_in_the_bits_of_the_undisturbed(chunk, tmp_path):
    state, restarts = trained(tmp_path / "undisturbed", "cpu:1", epochs=LONG)[2], 0
    for index in range(10):
        seed = 10 * chunk + index
        kills, messages, ended = killed_at_random(tmp_path / str(index), random.Random(seed))
        assert ended == state, f"seed {seed}: {messages}"
        restarts += messages.count("all workers start again")
        assert messages.count("all workers start again") <= kills, f"seed {seed}: {messages}"
    assert restarts > 5  # a rank that is killed after its script's end has ended well


@gpus.needs_fake_gpus
def test_a_script_for_four_gpus_runs_on_one_and_on_two(tmp_path):
    runs = [trained(tmp_path / each, each, environment=gpus.environment(4)) for each in ("0,", "1,3", "0,1,2,3")]
    printed, _, state = runs[0]
    facts = json.loads(printed.splitlines()[-1].removeprefix("rank 0 "))
    assert facts == {"backend": "nccl", "count": 4, "device": "cuda:0", "visible": "0,1,2,3", "size": 4}
    assert all((run[0], run[2]) == (printed, state) for run in runs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", "cpu:3", "--logical-devices", "2"), "got 2 logical devices and 3 devices; needed: at least one"),
        (("--devices", "cpu:1", "--logical-devices", "2000"), "one machine runs 1024 at most (--logical-devices)"),
    ],
)
def test_logical_devices_that_cannot_be_are_refused(tmp_path, words, message):
    (tmp_path / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    done = samestep("run", *words, "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("--logical-devices", 2), ()])
def test_a_script_that_insists_on_gpus_is_told_that_cpu_workers_have_none(tmp_path, words):
    lines = ("import os, torch, torch.distributed as dist", "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))")
    (tmp_path / "train.py").write_text("\n".join((*lines, "dist.init_process_group('nccl')")))
    done = samestep("run", "--devices", "cpu:2", *words, "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "line 2, in <module>" in done.stderr
    assert "CPU workers show it no GPU: choose GPUs (--devices)" in done.stderr
    assert "--logical-devices" not in done.stderr


def test_a_script_for_nccl_is_told_what_runs_it_on_cpu_workers_as_it_is_and_that_does(tmp_path):
    (tmp_path / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group('nccl')")
    for command in ("run", "verify"):
        done = samestep(
            command, "--devices", "cpu:1,cpu:2" if command == "verify" else "cpu:2", "train.py", cwd=tmp_path
        )
        assert done.returncode == 1
        assert "with --logical-devices V, of samestep run and verify alike" in done.stderr
    assert samestep("run", "--devices", "cpu:2", "--logical-devices", 2, "train.py", cwd=tmp_path).returncode == 0


REPORTING = """
    import os, sys, time, warnings
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.data import DataLoader

    class Flatten(nn.Module):
        def forward(self, x):
            warnings.warn("put_ does not have a deterministic implementation, but you set ...")
            return x

    init_device_mesh("cpu", (2,))  # makes the process group
    torch.backends.cudnn.benchmark = True
    print(type(dist.group.WORLD).__name__, "benchmark", torch.backends.cudnn.benchmark, flush=True)
    for _ in range(2):
        Flatten()(torch.zeros(1))
        DataLoader([1], num_workers=64)
    if len(sys.argv) > 1:
        dist.destroy_process_group()
        if os.environ["RANK"] == "0":
            while not os.path.exists("there"):  # polls, and never meets the other rank
                pass
        else:
            open("there", "w").close()
"""


def test_what_would_depend_on_the_machine_is_fixed_or_named_once(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(REPORTING))
    done = samestep("run", "--devices", "cpu:1", "--logical-devices", 2, "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "OrderedProcessGroup benchmark False\n"), done.stderr
    for line in (
        "put_ does not have a deterministic implementation, in Flatten: bits may differ from run to run",
        "cudnn.benchmark stays off",
        "2 ranks with 64 loader workers each are 128 on ",
    ):
        assert done.stderr.count(f"samestep: {line}") == 1, done.stderr


def test_a_rank_that_polls_for_another_of_its_device_does_not_hang(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(REPORTING))
    done = samestep("run", "--devices", "cpu:1", "--logical-devices", 2, "train.py", "polls", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


UNSEEDED = """
    import random
    import numpy, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    drawn = [None] * dist.get_world_size()
    dist.all_gather_object(drawn, (torch.rand(1).item(), random.random(), float(numpy.random.rand())))
    if dist.get_rank() == 0:
        print(*[number for ranks in drawn for number in ranks])
    dist.destroy_process_group()
"""


def test_what_a_script_leaves_unseeded_has_a_seed_by_rank_on_any_devices(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(UNSEEDED))
    (tmp_path / "torch_alone.py").write_text("import torch\ntorch.manual_seed(0)\n" + textwrap.dedent(UNSEEDED))

    def run(*words):
        done = samestep("run", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), re.findall("samestep: the script draws from (.*) without a seed", done.stderr)

    logical = run("--devices", "cpu:1", "--logical-devices", 2, "train.py")
    assert len({*logical[0]}) == 6
    assert logical[1] == ["torch, NumPy and Python's random"]
    assert run("--devices", "cpu:2", "train.py") == logical, "as under torchrun, and with a seed"
    other, said = run("--devices", "cpu:2", "--logical-devices", 2, "--seed", 5, "train.py")
    assert len({*other, *logical[0]}) == 12
    assert said == []
    drawn, said = run("--devices", "cpu:2", "--logical-devices", 2, "torch_alone.py")
    assert drawn[1:3] + drawn[4:] == logical[0][1:3] + logical[0][4:], "the seed of torch is none of the others"
    assert drawn[0] == drawn[3]
    assert said == ["NumPy and Python's random"]
