"""The commands on GPUs, as a user types them: any devices give the bits of others, here those of the CPU too."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from textwrap import dedent

import gpus
import pytest
from cli_commands import samestep, write_table

pytestmark = gpus.needs_fake_gpus

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TRAIN = ("train", "mlp", "--data", "table.csv", "--epochs", 2, "--global-batch-size", 32)


def on(num_gpus, *words, cwd, status=0, **variables):
    """A command on a machine with so many GPUs; it must end with this status, without a traceback."""
    done = samestep(*words, cwd=cwd, **gpus.environment(num_gpus, OMP_NUM_THREADS="1", **variables))
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def told(text, word):
    """The rest of the line that begins with a word."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"{word} "))
    return line.removeprefix(word).strip()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder with a run on two of four GPUs, `a`, and its digest."""
    folder = tmp_path_factory.mktemp("recorded")
    write_table(folder / "table.csv")
    every = ("--checkpoint-steps", 4)
    done = on(4, *TRAIN, *every, "--devices", "0,1", "--run-dir", "a", cwd=folder)
    return folder, told(done.stdout, "digest")


@pytest.fixture
def folder(recorded):
    return recorded[0]


def test_a_script_of_one_process_cannot_have_kernels_chosen_by_their_time(tmp_path):
    program = """
        import torch

        torch.backends.cudnn.benchmark = True
        model = torch.nn.Linear(2, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(4, 2).cuda()).sum().backward()
        optimizer.step()
        print("benchmark", torch.backends.cudnn.benchmark)
        torch.manual_seed(0)
        convolution = torch.nn.Conv2d(3, 4, 3).cuda()
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            convolution(torch.randn(2, 3, 8, 8).cuda()).square().sum().backward()
        print(torch.backends.cudnn.benchmark, convolution.weight.grad.tolist())
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(program))
    done, again = (on(2, "run", "train.py", cwd=tmp_path) for _ in range(2))
    assert done.stdout.startswith("benchmark False\nFalse [[")
    assert done.stdout == again.stdout
    assert done.stderr.count("samestep: cudnn.benchmark stays off") == 1


PLACES = {
    "all": ((), {}, 4),
    "one": (("--devices", "cuda:3"), {}, 1),
    "visible ones": (("--devices", "auto"), {"CUDA_VISIBLE_DEVICES": "2,0"}, 2),
    "workers on the CPU": (("--devices", "cpu:3", "--no-portable"), {}, 3),
}


@pytest.mark.parametrize("place", PLACES)
def test_training_ends_in_the_same_bits_on_any_devices(recorded, folder, tmp_path, place):
    options, variables, number = PLACES[place]
    run = tmp_path / "run"
    done = on(4, *TRAIN, *options, "--run-dir", run, cwd=folder, **variables)
    first = json.loads((run / "ledger.jsonl").read_text().splitlines()[0])
    assert first["world_size"] == number
    # Kernels of the CPU round otherwise.
    assert (told(done.stdout, "digest") == recorded[1]) == (place != "workers on the CPU")


@pytest.mark.parametrize("nvml", ["1", "0"])
def test_a_variable_that_names_no_gpu_ends_the_command_and_cpu_workers_are_told(folder, tmp_path, nvml):
    words = (*TRAIN, "--run-dir", tmp_path / "run")
    said = on(1, *words, cwd=folder, status=2, CUDA_VISIBLE_DEVICES="MIG-1", FAKE_CUDA_NVML=nvml).stderr
    assert "CUDA_VISIBLE_DEVICES=MIG-1 names 1 device, but CUDA takes 0" in said
    assert "cpu:2" in said
    if nvml == "1":
        said = on(1, *words, "--no-portable", cwd=folder, CUDA_VISIBLE_DEVICES="").stderr
        assert "samestep: CUDA_VISIBLE_DEVICES= leaves 0 of this machine's 1 GPU visible." in said


@pytest.mark.parametrize("launcher", ["Slurm", "torchrun"])
def test_ranks_of_another_launcher_find_their_gpus(recorded, folder, tmp_path, launcher):
    recipe = ["-m", "samestep.recipes.mlp", *map(str, (*TRAIN[2:], "--run-dir", tmp_path / "run"))]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *recipe]
        places = [{}]
    else:  # each task sees one GPU, its cuda:0
        command = [sys.executable, *recipe]
        step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
        step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost"}
        ranks = ({"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "CUDA_VISIBLE_DEVICES": rank} for rank in "01")
        places = [{**step, **rank} for rank in ranks]
    running = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=gpus.environment(2, OMP_NUM_THREADS="1", **place),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]
    outputs = [process.communicate(timeout=240) for process in running]
    assert [process.returncode for process in running] == [0] * len(running), outputs
    assert told(outputs[0][0], "digest") == recorded[1]
    assert [said for said, _ in outputs[1:]] == [""] * (len(running) - 1)


@pytest.mark.parametrize("devices", ["cuda:3", "1,2,3"])
def test_a_run_goes_on_on_other_gpus_from_its_checkpoint(recorded, folder, tmp_path, devices):
    resume = ("--resume", "a/checkpoints/step-00000004", "--run-dir", tmp_path / "b")
    done = on(4, *TRAIN, *resume, "--devices", devices, cwd=folder)
    assert "resumed from step-00000004, in epoch 1, step 4" in done.stdout
    assert told(done.stdout, "digest") == recorded[1]


def test_a_run_does_not_go_on_on_cpus_by_other_kernels(recorded, folder, tmp_path):
    resume = (*TRAIN, "--resume", "a/checkpoints/step-00000004", "--run-dir", tmp_path / "b")
    resume += ("--devices", "cpu:1", "--no-portable")
    refused = on(4, *resume, cwd=folder, status=2)
    assert "device_kind: cuda before, cpu now (decides the kernels)" in refused.stderr
    assert "allow_contract_change=True" in refused.stderr


@pytest.mark.parametrize("device", [None, "cuda:3", "cpu"])
def test_a_step_is_replayed_on_any_device(folder, device):
    chosen = () if device is None else ("--device", device)
    done = on(4, "replay", "a", "--step", 6, *chosen, "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert found["device"] == (device or "cuda:0")
    assert found["check"]["same_bits"] is (device != "cpu")
    assert found["check"]["tier"] == ("allclose" if device == "cpu" else "bitwise")


def test_an_unchanged_script_prints_the_same_on_gpus_as_on_simulated_ones_of_the_cpu(tmp_path):
    words = ("--logical-devices", 4, EXAMPLES / "house_prices.py", "--epochs", 2, "--out", "curves")
    said = [on(4, "run", "--devices", devices, *words, cwd=tmp_path).stdout for devices in ("cuda:3", "0,1", "cpu:3")]
    assert "test RMSE" in said[0]
    assert said[0] == said[1] == said[2]


@pytest.mark.slow
def test_a_program_is_verified_on_one_to_three_gpus_and_on_chosen_ones(folder):
    recipe = ("mlp", "--data", "table.csv", "--epochs", 1, "--global-batch-size", 32)
    done = on(3, "verify", *recipe, cwd=folder)
    assert told(done.stdout, "runs") == "1 twice, 2, 3; 4 runs in all"
    assert told(done.stdout, "agrees") == "every bit is equal (bitwise)"
    assert "30 of 30 gradients not zero" in done.stdout
    done = on(4, "verify", "--no-portable", "--devices", "cuda:3,2", "--json", *recipe, cwd=folder)
    assert json.loads(done.stdout)["agrees"] is True


@pytest.mark.parametrize(
    ("devices", "ranks"), [("0,1", "2 started and met, on cuda"), ("cuda:3", "one, on cuda: there is no other")]
)
def test_the_doctor_finds_nothing_bad(folder, devices, ranks):
    quick = () if devices == "cuda:3" else ("--quick",)
    done = on(4, "doctor", *quick, "--devices", devices, cwd=folder)
    assert ranks in done.stdout
    assert "nothing is bad" in done.stdout


@pytest.mark.parametrize("nvml", ["1", "0"])
def test_visible_gpus_are_shown_with_torchs_numbers(tmp_path, nvml):
    variables = {"CUDA_VISIBLE_DEVICES": "2,0", "FAKE_CUDA_NVML": nvml}
    done = on(4, "devices", cwd=tmp_path, **variables)
    rows = [line.split()[0] for line in done.stdout.splitlines() if "Fake GPU" in line]
    assert rows == ["cuda:0", "cuda:1"]
    assert ("NVML does not answer" in done.stdout) == (nvml == "0")
    (line,) = on(4, "devices", "--free", 1, cwd=tmp_path, **variables).stdout.splitlines()
    assert line == "CUDA_VISIBLE_DEVICES=GPU-fa4ec0da-0000-4000-8000-000000000002"
    found = json.loads(on(4, "devices", "--json", cwd=tmp_path, **variables).stdout)
    assert [device["uuid"][-1] for device in found["devices"]] == ["2", "0"]


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [("2", "this machine has 0 (cuda); ask for at most 1, or for CPU workers with cpu:2"), ("cuda:1", "device 1")],
)
def test_gpus_that_are_not_there_are_bad_usage(folder, devices, sentence):
    assert sentence in on(1, *TRAIN, "--devices", devices, cwd=folder, status=2).stderr


SHORT = {
    "the model": ("vgg", 64, ("the model, 0.0 GiB of parameters and buffers", "--strategy sharded")),
    "a microbatch": (
        "lenet",
        5,
        # Of the rank that is first, 0 or 1.
        (" of 8 (16 samples) does not fit in the memory of rank ", "use num_microbatches=16 "),
    ),
}


@pytest.mark.parametrize("what", SHORT)
def test_memory_that_runs_out_is_told_with_what_helps(tmp_path, what):
    recipe, mib, parts = SHORT[what]
    train = ("train", recipe, "--epochs", 1, "--devices", "0,1", "--run-dir", "run")
    said = on(2, *train, cwd=tmp_path, status=1, FAKE_CUDA_MEMORY_MIB=str(mib)).stderr
    assert said.startswith("samestep: error: out of memory: ")
    for part in parts:
        assert part in said


def test_a_worker_stays_on_the_cores_near_its_gpu(tmp_path):
    (tmp_path / "cores.py").write_text(
        "import os\nopen(os.environ['RANK'], 'w').write(str(sorted(os.sched_getaffinity(0))))"
    )
    on(2, "run", "--multi-process", "--devices", "0,1", "cores.py", cwd=tmp_path, FAKE_CUDA_NUMA="1")
    every = sorted(os.sched_getaffinity(0))
    for rank in (0, 1):
        near = [core for core in every if core % 2 == rank]
        assert (tmp_path / str(rank)).read_text() == str(near or every)


ATTENDING = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(torch.randn(4, 4, 16).cuda()).square().mean()
        loss.backward()
        optimizer.step()
"""


def test_attention_of_gpus_is_found_to_be_the_cause_of_other_bits(tmp_path):
    (tmp_path / "attend.py").write_text(dedent(ATTENDING))
    verify = ("verify", "--devices", "cuda:0,cuda:1", "--steps", 2, "--tier", "bitwise", "attend.py")
    said = samestep(*verify, cwd=tmp_path, **gpus.environment(2)).stdout
    assert "cause       an operation adds in the order in which threads arrive" in said
    assert told(said, "confirmed").startswith("without the effect of nondeterministic"), said


SEGMENTING = """
    import hashlib
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    layers = [nn.ReflectionPad2d(1), nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(3), nn.Upsample(size=7, mode="bicubic")]
    model = nn.DataParallel(nn.Sequential(*layers).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, classes = torch.randn(8, 3, 8, 8).cuda(), torch.randint(0, 4, (8, 7, 7)).cuda()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), classes) + model(x).cumsum(1).square().mean()
        loss.backward()
        optimizer.step()
    state = torch.cat([p.detach().cpu().view(-1) for p in model.parameters()])
    print(hashlib.sha256(state.numpy().tobytes()).hexdigest())
    torch.rand(4, 4).cuda().kthvalue(2, 0)
"""


SHORT_OF_MEMORY = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    free, steps = map(int, sys.argv[1:])
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 1)).cuda()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = torch.empty(64 - free << 20, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(99 << 20, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        assert "Tried to allocate 99 MiB" in str(error)  # the script goes on as it likes
    x = torch.ones(8, 3, 8, 8, device="cuda")
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if not steps:
        torch.autograd.grad(model(x).sum(), model.module[0].weight)  # no update follows
    print("the end")
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("free", "steps"), [(4, 2), (4, 0), (48, 2)])
def test_a_rank_for_which_cudnn_got_no_workspace_ends_with_a_sentence(tmp_path, free, steps):
    (tmp_path / "short.py").write_text(dedent(SHORT_OF_MEMORY))
    size = {"FAKE_CUDA_MEMORY_MIB": "64", "FAKE_CUDA_WORKSPACE_MIB": "8", "OMP_NUM_THREADS": "1"}
    words = "run", "--logical-devices", 2, "--devices", "cuda:0", "short.py", free, steps
    done = samestep(*words, cwd=tmp_path, **gpus.environment(1, **size))
    if free == 48:
        assert done.returncode == 0, done.stderr
        assert done.stdout == "the end\n"  # of rank 0
        return
    assert done.returncode == 1
    assert "the memory of cuda:0 was short 1 times in what rank " in done.stderr
    assert "Let it need less: smaller batches" in done.stderr
    assert done.stdout == ("" if steps else "the end\n")


def test_a_script_uses_kernels_in_place_of_refused_ones_and_is_told_what_to_replace(tmp_path):
    (tmp_path / "segment.py").write_text(dedent(SEGMENTING))
    printed = set()
    for devices in ("cuda:1", "0,1"):
        done = samestep(
            "run", "--logical-devices", 4, "--devices", devices, "segment.py", cwd=tmp_path, **gpus.environment(2)
        )
        assert done.returncode == 1
        assert "kthvalue CUDA does not have a deterministic implementation" in done.stderr
        assert "replace it by torch.sort and Tensor.select, or run the script without samestep" in done.stderr
        printed.add(done.stdout)
    assert len(printed) == 1
    assert len(printed.pop()) == 65
