"""`samestep run --logical-devices` of scripts that deal with ranks: the same bits on any number of devices."""

import contextlib
import json
import random
import re
import runpy
import subprocess
import textwrap
import time
from pathlib import Path

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
    if "pids" in options:
        with open(f"{options['pids']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}", "w") as file:
            file.write(str(os.getpid()))
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("nccl", device_id=device)
    assert torch.cuda.device_count() == world_size
    is_simulated = "simulated" in torch.cuda.get_device_name(local)
    place = json.loads(os.environ.get("SAMESTEP_WORKER", "{}")).get("device_index")  # the device that it really has
    seed = rank + world_size * (place if options.get("leak") else 0)
    torch.manual_seed(seed)  # dropout of its own on each rank; DistributedDataParallel makes the models equal
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    model = DistributedDataParallel(model.cuda(local), bucket_cap_mb=0.001, device_ids=[local], output_device=local)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 6, generator=drawn), torch.randint(3, (96,), generator=drawn))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, pin_memory=True)
    first, saved = 0, "checkpoint.pt"

    def load():
        state = torch.load(saved, map_location={"cuda:0": f"cuda:{rank}"}, weights_only=True)
        model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
        return state["epoch"]

    if os.path.exists(saved):
        first = load()
    dist.barrier()
    for epoch in range(first, options.get("epochs", 3)):
        torch.manual_seed(100 * epoch + seed)
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(f"cuda:{local}", non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            assert loss.is_cuda and (loss.device == device or not is_simulated)
            loss.backward()
            optimizer.step()
        if epoch == 1 and options.get("killed") == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        losses, total = [torch.zeros_like(loss) for _ in range(world_size)], loss.detach().clone()
        everyone = [None] * world_size
        dist.all_gather(losses, loss.detach())
        dist.all_reduce(total)
        dist.all_gather_object(everyone, total.item())
        assert total.is_cuda and len({*everyone}) == 1
        if is_simulated:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(torch.cuda.Stream()):
                begin.record(), end.record()
            torch.cuda.synchronize(), torch.cuda.empty_cache(), begin.elapsed_time(end)
            assert next(model.parameters()).grad.is_cuda and torch.cuda.memory_allocated() == 0
        if rank == 0:
            print(epoch, [each.item().hex() for each in losses], flush=True)
            state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, saved + ".new")
            os.replace(saved + ".new", saved)
        dist.barrier(device_ids=[local])
        load()
        dist.barrier()
    facts = {
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "backend": dist.get_backend(), "device": str(model.device),
        "count": torch.cuda.device_count(), "size": dist.get_world_size(),
        "name": torch.cuda.get_device_name(local),
    }
    print("rank", rank, json.dumps(facts), flush=True)
    dist.destroy_process_group()
"""
LONG = 20  # epochs: a run lasts longer than the time to its first death


def trained(folder, devices, words=(), environment=None, **options):
    """What a run of the training on four ranks prints, its messages, and the state that it saves."""
    folder.mkdir()
    (folder / "train.py").write_text(textwrap.dedent(TRAINING))
    command = ["run", "--devices", devices, "--logical-devices", 4, *words, "train.py", json.dumps(options)]
    done = samestep(*command, cwd=folder, **(environment or {}))
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, saved_state(folder)


def saved_state(folder):
    """The bytes of all tensors that the training saved."""
    state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    moments = (value for each in state["optimizer"]["state"].values() for value in each.values())
    return [tensor.numpy().tobytes() for tensor in (*state["model"].values(), *moments)]


AGAIN = """
    import torch, torch.distributed as dist

    for turn in range(3):
        dist.init_process_group("gloo")
        group = dist.new_group([turn, (turn + 1) % 3])
        total = torch.ones(2) * dist.get_rank()
        dist.all_reduce(total)
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(total, group=group)
        if dist.get_rank() == 0:
            print(turn, total.tolist(), flush=True)
        dist.destroy_process_group()
"""
CHECKPOINTED = """
    import sys
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def main():
        dist.init_process_group("cpu:gloo")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(dist.get_rank())

        def step():
            model(torch.randn(6, 8)).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
            return {name: value.full_tensor().double().sum().item().hex() for name, value in model.named_parameters()}

        then = step()
        kind = AsyncCheckpointerType[sys.argv[1]]
        dcp.async_save({"model": model.state_dict()}, checkpoint_id="saved", async_checkpointer_type=kind).result()
        now, state = step(), {"model": model.state_dict()}
        dcp.load(state, checkpoint_id="saved")
        model.load_state_dict(state["model"])
        optimizer.param_groups[0]["lr"] = 0.0
        if step() == then != now and dist.get_rank() == 0:
            print(dist.get_backend(), then)
        dist.destroy_process_group()

    if __name__ == "__main__":  # a process of the checkpointer imports the script
        main()
"""
FORCES = """
    import torch, torch.distributed as dist
    from torch import nn

    class Field(nn.Module):  # the atoms of a batch of molecules, as graph libraries put them together
        def __init__(self):
            super().__init__()
            self.embed, self.last = nn.Embedding(4, 8), nn.Linear(8, 1)
            self.filters = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 8))

        def forward(self, kinds, positions, edges, molecule):
            positions = positions.detach().requires_grad_()
            apart = (positions[edges[0]] - positions[edges[1]]).norm(dim=1, keepdim=True)
            atoms = self.embed(kinds)
            sent = self.filters(torch.exp(-(apart - torch.arange(6.0)).square())) * atoms[edges[0]]
            parts = self.last(torch.tanh(atoms.index_add(0, edges[1], sent)))[:, 0]
            energy = torch.zeros(4).index_add(0, molecule, parts)
            return energy, -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]

    def batch(step, rank):
        drawn = torch.Generator().manual_seed(10 * step + rank)
        molecule = torch.arange(4).repeat_interleave(torch.randint(3, 6, (4,), generator=drawn))
        edges = (molecule[:, None] == molecule).fill_diagonal_(False).nonzero().T
        return torch.arange(len(molecule)) % 4, torch.randn(len(molecule), 3, generator=drawn), edges, molecule

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Field())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(4):
        inputs = batch(step, dist.get_rank())
        energy, forces = model(*inputs)
        loss = (energy - 1).square().mean() + (forces + 2 * inputs[1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(loss.item().hex(), [parameter.double().sum().item().hex() for parameter in model.parameters()])
    dist.destroy_process_group()
"""
SCRIPTS = {
    "a group that was destroyed is made again": (AGAIN, "", (1, 3)),
    "forces are gradients in the forward": (FORCES, "", (1, 3)),
    "checkpoints are written by a thread meanwhile": (CHECKPOINTED, "THREAD", (1, 2)),
    "checkpoints are written by a process meanwhile": (CHECKPOINTED, "PROCESS", (1, 2)),
}
PRINTED = {
    "a group that was destroyed is made again": "0 [6.0, 6.0]\n1 [3.0, 3.0]\n2 [6.0, 6.0]\n",
    "checkpoints are written by a thread meanwhile": "cpu:gloo {",  # the script's own word
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "process" in name else ()) for name in SCRIPTS]
)
def test_a_script_for_several_ranks_prints_and_saves_the_same_bits_on_any_number_of_devices(tmp_path, name):
    source, argument, counts = SCRIPTS[name]
    outputs = []
    for count in counts:
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "train.py").write_text(textwrap.dedent(source))
        words = "--devices", f"cpu:{count}", "--logical-devices", 3, "train.py", argument
        done = samestep("run", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        outputs.append(done.stdout)
    assert outputs[0]
    assert PRINTED.get(name, "") in outputs[0]
    assert outputs[0] == outputs[1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The training on one device."""
    return trained(tmp_path_factory.mktemp("alone") / "run", "cpu:1")


@pytest.mark.parametrize("count", [3, 4])
def test_a_training_for_four_gpus_prints_and_saves_the_same_bits_on_any_number_of_devices(tmp_path, alone, count):
    printed, messages, state = trained(tmp_path / "run", f"cpu:{count}")
    assert '"nccl", "device": "cuda:0", "count": 4, "size": 4, "name": "simulated CUDA device' in printed
    assert "Traceback" not in messages
    assert (printed, state) == (alone[0], alone[2])


def test_gradients_that_stay_on_their_ranks_since_the_wrapper_is_not_called_are_named_with_the_line(tmp_path):
    path = Path(__file__).resolve().parents[1] / "verify" / "breakers" / "unexchanged.py"
    words = "run", "--devices", "cpu:1", "--logical-devices", 2, path, "module"
    done, cured = samestep(*words, cwd=tmp_path), samestep(*words, "cured", cwd=tmp_path)
    assert (done.returncode, cured.returncode) == (0, 0), done.stderr + cured.stderr
    number = 1 + path.read_text().splitlines().index("    optimizer.step()")
    assert f"unexchanged.py, line {number} Sequential is updated by gradients that are not averaged" in done.stderr
    assert "averaged" not in cured.stderr


def test_a_script_that_lets_its_real_device_into_a_seed_is_found_out(tmp_path, alone):
    assert trained(tmp_path / "run", "cpu:2", leak=True)[2] != alone[2]  # one device is 0 for all ranks


def test_after_a_death_all_ranks_start_again_on_the_devices_that_are_left(tmp_path, alone):
    printed, messages, state = trained(tmp_path / "killed", "cpu:2", words=("--max-restarts", 1), killed=3)
    assert "rank 3 on CPU worker 1 was ended by SIGKILL" in messages
    assert "all workers start again on 1 device, without CPU worker 1 (1 of 1)" in messages
    assert state == alone[2]
    assert printed.splitlines()[-2:] == alone[0].splitlines()[-2:]


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
@pytest.mark.parametrize("chunk", range(3))
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
    assert facts.pop("name") == "Fake GPU"
    assert facts == {"backend": "nccl", "count": 4, "device": "cuda:0", "visible": "0,1,2,3", "size": 4}
    assert all((run[0], run[2]) == (printed, state) for run in runs)


REDUCING = """
    import hashlib, os
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    drawn = torch.Generator().manual_seed(rank)
    ops = dict(avg=dist.ReduceOp.AVG, max=dist.ReduceOp.MAX, min=dist.ReduceOp.MIN, product=dist.ReduceOp.PRODUCT)
    ops["premul"] = dist._make_nccl_premul_sum(0.3)
    ops["premul by a tensor"] = dist._make_nccl_premul_sum(torch.tensor([0.3], device="cuda"))

    def show(name, *tensors):
        if rank == 0:
            parts = [tensor.detach().cpu().contiguous().view(torch.uint8) for tensor in tensors]
            print(name, hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest(), flush=True)

    for dtype in (torch.float32, torch.bfloat16):
        for name, op in ops.items():
            values = torch.randn(10_007, generator=drawn)
            values[:: 5 + rank] *= 0  # of both signs
            if name in ("max", "min"):
                values[:: 7 + rank] = float("nan")
            dist.all_reduce(values := values.to(dtype).cuda(), op=op)
            show(f"{name} {dtype}", values)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    for module in (model[0], model[2], model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        x, y = torch.randn(16, 32, generator=drawn), torch.randint(8, (16,), generator=drawn)
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    show("FSDP2", *[parameter.full_tensor() for parameter in model.parameters()])
    dist.destroy_process_group()
"""


@gpus.needs_fake_gpus
def test_reductions_have_the_same_bits_on_three_gpus_over_nccl_as_on_one_through_the_host(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(REDUCING))
    printed = []
    for devices in ("0,1,2", "0,"):
        words = ("run", "--devices", devices, "--logical-devices", 3, "train.py")
        done = samestep(*words, cwd=tmp_path, **gpus.environment(3))
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
    assert printed[0] == printed[1]


CHILDREN = """
    import os, subprocess, sys
    import torch, torch.distributed as dist

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    show = [sys.executable, "-S", "-c", "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"]

    def shown(**options):
        return subprocess.run(show, stdout=subprocess.PIPE, text=True, check=True, **options).stdout.strip()

    with open(f"{rank}.txt", "w") as file:
        print(os.environ["CUDA_VISIBLE_DEVICES"], shown(), shown(env=dict(os.environ)), file=file)
        print(*torch.cuda._parse_visible_devices(), file=file)
    dist.destroy_process_group()
"""


@gpus.needs_fake_gpus
def test_programs_that_a_rank_starts_and_nvidia_s_library_find_its_own_gpu(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(CHILDREN))
    words = ("run", "--devices", "1,3", "--logical-devices", 2, "train.py")
    done = samestep(*words, cwd=tmp_path, **gpus.environment(4))
    assert done.returncode == 0, done.stderr
    for rank, number in enumerate((1, 3)):
        own, lines = f"GPU-fa4ec0da-0000-4000-8000-{number:012x}", (tmp_path / f"{rank}.txt").read_text().splitlines()
        assert lines == [f"0,1 {own} {own}", own]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", "cpu:3", "--logical-devices", "2"), "got 2 logical devices and 3 devices; needed: at least one"),
        (("--devices", "cpu:1", "--logical-devices", "2000"), "a run has 1024 at most (--logical-devices)"),
    ],
)
def test_logical_devices_that_cannot_be_are_refused(tmp_path, words, message):
    (tmp_path / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    done = samestep("run", *words, "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_names_no_gpu_finds_none(tmp_path):
    lines = ("import torch, torch.distributed as dist", "dist.init_process_group('gloo')")
    (tmp_path / "train.py").write_text("\n".join(lines) + "\nprint(getattr(torch, 'cu' + 'da').is_available())")
    done = samestep("run", "--devices", "cpu:1", "--logical-devices", 2, "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False"), done.stderr


SYNCHRONISED = """
    import os, sys
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def network():
        torch.manual_seed(0)
        layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 6)
        return nn.Sequential(*layers, nn.BatchNorm1d(6, affine=False, momentum=None), nn.Linear(6, 3)).double()

    def trained(model, first, last, weight):
        data = torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            x, y = torch.randn(24, 2, 5, 5, generator=data).double(), torch.randint(3, (24,), generator=data)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[first:last]), y[first:last], reduction="sum")
            (loss * weight / 24).backward()
            optimizer.step()
        return model.state_dict()

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        bounds = [0, 9, 10, 10, 24]  # one row, and none
        model = network() if "local" in sys.argv else nn.SyncBatchNorm.convert_sync_batchnorm(network())
        model = DistributedDataParallel(model, broadcast_buffers=False)
        state = trained(model, *bounds[rank : rank + 2], world_size)
        torch.save({name.removeprefix("module."): value for name, value in state.items()}, f"{rank}.pt")
        dist.destroy_process_group()
"""


def test_sync_batch_norm_on_cpus_is_batch_norm_of_one_process_with_the_whole_batch(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SYNCHRONISED))
    program = runpy.run_path(str(tmp_path / "train.py"))
    expected = program["trained"](program["network"](), 0, 24, 1)
    states = {}
    for words in (("cpu:1", "--logical-devices", 4), ("cpu:3", "--logical-devices", 4), ("cpu:4",)):
        done = samestep("run", "--devices", *words, "train.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        for rank in (0, 3):
            states[words, rank] = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
    for state in states.values():
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)  # sums in another order
    one, three = (states[(count, "--logical-devices", 4), 0] for count in ("cpu:1", "cpu:3"))
    assert all(torch.equal(value, three[name]) for name, value in one.items())


def test_batch_norm_of_each_rank_alone_is_found_out(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SYNCHRONISED).replace("10, 10, 24", "12, 15, 24"))
    program = runpy.run_path(str(tmp_path / "train.py"))
    expected = program["trained"](program["network"](), 0, 24, 1)
    done = samestep("run", "--devices", "cpu:2", "--logical-devices", 4, "train.py", "local", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    state = torch.load(tmp_path / "0.pt", weights_only=True)
    assert not torch.allclose(state["1.running_mean"], expected["1.running_mean"], rtol=1e-3)


def test_a_script_that_insists_on_gpus_is_told_what_gives_it_simulated_ones_and_that_does(tmp_path):
    lines = ("import os, torch, torch.distributed as dist", "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))")
    (tmp_path / "sets.py").write_text("\n".join((*lines, "dist.init_process_group('nccl')")))
    (tmp_path / "asks.py").write_text("import torch.distributed as dist\ndist.init_process_group('nccl')")
    for name in ("sets.py", "asks.py"):
        done = samestep("run", "--devices", "cpu:2", name, cwd=tmp_path)
        assert done.returncode == 1
        assert "there is no GPU on the CPU: choose GPUs (--devices)" in done.stderr
        assert "with --logical-devices V, as under samestep verify" in done.stderr
    for name in ("sets.py", "asks.py"):
        assert samestep("run", "--devices", "cpu:2", "--logical-devices", 2, name, cwd=tmp_path).returncode == 0


ON_SIMULATED = """
    import os, torch, torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile

    dist.init_process_group("nccl")
    print("available", torch.cuda.is_available(), flush=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2).cuda(), device_ids=[int(os.environ["LOCAL_RANK"])])
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        model(torch.ones(3, 4).cuda()).sum().backward()
    print("gradient", model.module.bias.grad.tolist())
    with torch.autograd.profiler.profile(use_device="cuda"):
        model(torch.ones(3, 4).cuda()).sum().backward()
    print("events", "aten::addmm" in profiled.key_averages().table(sort_by="cuda_time_total"))
    raise RuntimeError("CUDA is no reason")
"""


def test_simulated_gpus_take_hooks_of_bfloat16_and_profilers_and_are_not_there_for_who_asks_for_cpus(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(ON_SIMULATED))
    words = ("run", "--devices", "cpu:2", "--logical-devices", 2, "train.py")
    done = samestep(*words, cwd=tmp_path)
    assert done.stdout.splitlines() == ["available True", "gradient [3.0, 3.0]", "events True"], done.stderr
    assert "Failed to record CUDA event" not in done.stderr
    assert "CUDA is no reason" in done.stderr
    assert "there is no GPU on the CPU" not in done.stderr
    done = samestep(*words, cwd=tmp_path, ACCELERATE_USE_CPU="True")
    assert done.stdout.splitlines() == ["available False"], done.stderr
    assert "finds V simulated ones on CPU workers, unless ACCELERATE_USE_CPU asks for CPUs" in done.stderr


SHARDED_ON_SIMULATED = """
    import os, torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    def show(name, tensor):
        print(name, tensor.device, tensor.to_local().device, tensor.full_tensor().device, flush=True)

    with torch.device("meta"):
        late = nn.Linear(4, 4)
    fully_shard(late)  # torch chooses the mesh
    print("made late", late.weight.device, late.weight.device_mesh.device_type)
    late.to_empty(device="cuda")
    show("emptied", late.weight)
    model = nn.Linear(4, 4)
    fully_shard(model)
    show("weight", model.weight)
    model(torch.ones(2, 4).cuda()).sum().backward()
    show("gradient", model.weight.grad)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    show("state", optimizer.state[model.weight]["exp_avg"])
    show("norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
"""


def test_tensors_that_torch_shards_are_on_simulated_gpus_as_on_gpus(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SHARDED_ON_SIMULATED))
    done = samestep("run", "--devices", "cpu:1", "--logical-devices", 2, "train.py", cwd=tmp_path)
    shown = [f"{name} cuda:0 cuda:0 cuda:0" for name in ("emptied", "weight", "gradient", "state", "norm")]
    assert done.stdout.splitlines() == ["made late meta cuda", *shown], done.stderr


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
    with torch.backends.cudnn.flags(benchmark=True):
        print(torch._C._get_cudnn_benchmark())
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
    assert (done.returncode, done.stdout) == (0, "False\nOrderedProcessGroup benchmark False\n"), done.stderr
    for line in (
        "put_ does not have a deterministic implementation, in Flatten: bits may differ from run to run; replace it by "
        "Tensor.index_put_",
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
    (tmp_path / "draws_nothing.py").write_text("import rich.default_styles\n")
    assert run("--devices", "cpu:2", "--single-process", "draws_nothing.py") == ([], []), (
        "an import is no draw of the script's"
    )


OUT_OF_STEP = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            dist.all_reduce(torch.tensor([1000.0]))
        model(torch.ones(2, 1)).mean().backward()
    print("trained")
"""


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_a_metric_that_one_rank_sums_while_others_sum_gradients_is_named_with_the_line_of_each(tmp_path, devices):
    (tmp_path / "train.py").write_text(textwrap.dedent(OUT_OF_STEP))
    done = samestep("run", "--devices", devices, "--logical-devices", 2, "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "trained" not in done.stdout
    said = "the ranks are out of step:\n" + "".join(
        f"  rank {rank}: allreduce {where} backward {number}, [(1,)], at train.py, line {line}\n"
        for rank, where, number, line in ((0, "in", 3, 11), (1, "after", 2, 10))
    )
    assert said in done.stderr, done.stderr


CHANCE = """
    import os, random, sys, time
    import numpy as np, torch, torch.distributed as dist

    def by_urandom():
        seed = os.getpid() + int.from_bytes(os.urandom(4), "little")
        return random.Random(seed).random()

    dist.init_process_group("gloo")
    how, = sys.argv[1:]
    if how == "urandom":
        by_urandom()
    elif how == "clock":
        np.random.seed(int(time.time()))
    else:
        torch.manual_seed(3)
        print(time.time(), os.urandom(2))
        print(random.Random(5).random())
"""


@pytest.mark.parametrize(("how", "line"), [("urandom", 7), ("clock", 14), ("fixed", None)])
def test_a_seed_from_a_clock_or_the_system_is_named_by_its_line(tmp_path, how, line):
    (tmp_path / "train.py").write_text(textwrap.dedent(CHANCE))
    done = samestep("run", "--devices", "cpu:1", "--logical-devices", 2, "train.py", how, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"samestep: (.*) seeds a generator by a clock, a process id or os.urandom: ", done.stderr)
    assert said == ([] if line is None else [f"{tmp_path / 'train.py'}, line {line},"]), done.stderr


COPIES = """
    import sys, torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, (how,) = dist.get_rank(), sys.argv[1:]
    torch.manual_seed(rank if how == "seed" else 0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    if how in ("seed", "sharded"):
        model = fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    else:
        model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank if how == "rate" else 1))
    for step in range(5):
        loss = model(torch.randn(8, 4)).square().mean()
        if how == "skip" and step == (2 if rank == 1 else 4):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
DIFFER = r"samestep: copies of the model differ: \w{12} on rank 0, \w{12} on rank %s, at train.py, line \d+; each rank "


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("nothing", None),
        ("sharded", None),
        ("seed", DIFFER % "2"),
        ("rate", DIFFER % r"1, \w{12} on rank 2, \w{12} on rank 3"),
        ("skip", "samestep: gradients of different steps are added: step 3 on rank 0, 2, 3, step 4 on rank 1, at tr"),
    ],
)
def test_steps_of_one_rank_and_copies_that_differ_are_named_in_one_line(tmp_path, how, said):
    (tmp_path / "train.py").write_text(textwrap.dedent(COPIES))
    done = samestep("run", "--devices", "cpu:2", "--logical-devices", 4, "train.py", how, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("samestep: ")]
    assert len(lines) == (said is not None), lines
    assert said is None or re.match(said, lines[0]), lines


ATTENTION = """
    import hashlib, os
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    attention = nn.TransformerEncoderLayer(16, 2, 32, 0.125, batch_first=True)
    others = [nn.ReflectionPad1d(2), nn.AdaptiveAvgPool1d(7), nn.Flatten()]  # without a deterministic kernel of CUDA
    layers = [attention, *others, nn.Linear(28, 3)]
    model = DistributedDataParallel(nn.Sequential(*layers).cuda(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for dtype in (torch.float32, torch.bfloat16):
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                model(torch.randn(2, 4, 16, device=f"cuda:{rank}")).square().mean().backward()
            optimizer.step()
    if rank == 0:
        state = torch.cat([p.detach().cpu().view(-1) for p in model.parameters()])
        print(hashlib.sha256(state.numpy().tobytes()).hexdigest())
"""


@gpus.needs_fake_gpus
def test_attention_has_the_same_bits_again_and_on_other_gpus(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(ATTENTION))
    run = ("run", "--logical-devices", 2, "train.py")
    places = (("cuda:1",), ("cuda:1",), ("0,1",))
    done = [samestep(*run[:1], "--devices", *place, *run[1:], cwd=tmp_path, **gpus.environment(2)) for place in places]
    assert [each.returncode for each in done] == [0, 0, 0], done[0].stderr
    assert done[0].stdout
    assert len({each.stdout for each in done}) == 1
    assert "determinis" not in done[0].stderr, done[0].stderr


def test_a_group_that_exchanges_nothing_is_torchs_and_later_ones_are_not(tmp_path):
    (tmp_path / "fake.py").write_text(
        textwrap.dedent("""
            import torch, torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
            total = torch.ones(1)
            dist.all_reduce(total)
            dist.all_reduce(total, group=dist.new_group([0, 7]))
            DistributedDataParallel(torch.nn.Linear(1, 1))(total).sum().backward()
            alone = dist.get_backend(), dist.get_world_size(), total.item()
            dist.destroy_process_group()
            dist.init_process_group("gloo")
            dist.all_reduce(total)
            names = [group._get_backend_name() for group in (dist.group.WORLD, dist.new_group())]
            if dist.get_rank() == 0:
                print(alone, total.item(), *names)
        """)
    )
    ended = samestep("run", "--devices", "cpu:2", "--logical-devices", "2", "fake.py", cwd=tmp_path)
    assert "('fake', 8, 1.0) 2.0 gloo gloo" in ended.stdout, ended.stderr
