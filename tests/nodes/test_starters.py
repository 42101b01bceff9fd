"""Nodes as torchrun, Slurm and Kubeflow start them, and in two networks: the bits of one process."""

import importlib.util
import os
import shutil
import socket
import stat
import sys
import tempfile
from pathlib import Path

import pytest
from forked_machines import ADDRESSES, two_networks
from node_scripts import SMALL

pytestmark = pytest.mark.slow

CLUSTER = Path(__file__).resolve().parents[2] / "examples" / "cluster"
TRAINER_FIELDS = {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}
"""Of spec.trainer in trainer.kubeflow.org/v1alpha1 (`trainjob_types.go` of kubeflow/trainer)."""

SRUN = """#!/bin/bash
# Stands in for Slurm's: starts two tasks, one a node, with the variables that a task finds.
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do
    SLURM_STEP_ID=0 SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NODEID=$task SLURM_STEP_NUM_TASKS=2 \\
        SLURM_STEP_TASKS_PER_NODE="1(x2)" SLURM_STEP_NODELIST=localhost "$@" > "task-$task" 2>&1 &
    tasks="$tasks $!"
done
for task in $tasks; do wait "$task" || failed=$?; done
exit "${failed:-0}"
"""
SCONTROL = "#!/bin/bash\necho localhost\necho othernode\n"
SAMESTEP = '#!/bin/bash\nexec {python} -m samestep "$@"\n'


def digest(text):
    return next(line.split()[-1] for line in text.splitlines() if line.startswith("digest"))


def commands_in(folder, **texts):
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755 | stat.S_IXUSR)
    return f"{folder}:{os.environ['PATH']}"


def free_job_id():
    """A job whose port, as the batch script makes it, is free."""
    for job in range(os.getpid(), os.getpid() + 100):
        try:
            socket.create_server(("", 20_000 + job % 12_000)).close()
            return str(job)
        except OSError:
            continue
    raise AssertionError("no port is free")


@pytest.mark.parametrize("own_script", [False, True])
def test_the_batch_script_trains_on_two_nodes_with_a_stand_in_for_srun(nodes, own_script):
    path = commands_in(
        nodes.folder / "bin", srun=SRUN, scontrol=SCONTROL, samestep=SAMESTEP.format(python=sys.executable)
    )
    slurm = {
        "SLURM_JOB_ID": free_job_id(),
        "SLURM_JOB_NAME": "samestep",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "localhost,othernode",
    }
    script = [str(nodes.script(SMALL))] if own_script else []
    command = ["bash", str(CLUSTER / "train.sbatch"), *script]
    if not own_script:
        command = ["bash", "-c", f"sed 's/train lenet/train lenet --epochs 1/' {CLUSTER / 'train.sbatch'} | bash -s"]
    variables = {**slurm, "PATH": path, "DEVICES": "cpu:1", "DATA": "digits"}
    batch = nodes.end_of(nodes.start_program(command, **variables))
    first, second = ((nodes.folder / f"task-{task}").read_text() for task in (0, 1))
    assert batch.code == 0, batch.stderr + first + second
    if own_script:
        one = nodes.end_of(nodes.start_program([sys.executable, *script]))
    else:
        one = nodes.run("train", "lenet", "--data", "digits", "--epochs", "1", "--devices", "cpu:1", "--run-dir", "one")
    digests = [digest(text) for text in (first, second) if "digest" in text]
    assert digests == [one.digest]


def test_the_manifest_has_the_fields_of_a_trainjob_and_its_command_runs_on_two_nodes(nodes):
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load((CLUSTER / "trainjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(manifest["spec"]) == {"runtimeRef", "trainer"}
    assert set(manifest["spec"]["runtimeRef"]) <= {"name", "apiGroup", "kind"}
    trainer = manifest["spec"]["trainer"]
    assert set(trainer) <= TRAINER_FIELDS
    assert all(isinstance(word, str) for word in trainer["command"] + trainer["args"])
    assert trainer["command"][0] == "samestep"
    given = {"mnist": "digits", "/runs/lenet": "many"}
    words = [*trainer["command"][1:], *(given.get(word, word) for word in trainer["args"]), "--epochs", "1"]
    runtime = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "cpu" if os.cpu_count() == 1 else "1",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(nodes.port),
    }
    started = [nodes.start(*words, PET_NODE_RANK=rank, CUDA_VISIBLE_DEVICES="", **runtime) for rank in ("0", "1")]
    first, second = map(nodes.end_of, started)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    one = nodes.run("train", "lenet", "--data", "digits", "--epochs", "1", "--devices", "cpu:1", "--run-dir", "one")
    assert first.digest == one.digest
    assert second.stdout == ""


def test_torchruns_own_agents_start_nodes_that_sum_by_nodes(nodes):
    script = nodes.script(SMALL)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", nodes.endpoint, "--log-dir", str(nodes.folder / "torch")]
    started = [nodes.start_program([*torchrun, *meeting, str(script)]) for _ in range(2)]
    ended = [nodes.end_of(process) for process in started]
    assert [node.code for node in ended] == [0, 0], ended[0].stderr
    told = "".join(node.stdout for node in ended)
    assert "by nodes True" in told
    assert digest(told) == nodes.end_of(nodes.start_program([sys.executable, str(script)])).digest


def test_tasks_of_srun_on_two_nodes_sum_by_nodes(nodes):
    script = nodes.script(SMALL)
    slurm = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(nodes.port),
    }
    started = [
        nodes.start_program(
            [sys.executable, str(script)],
            **slurm,
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank % 2),
            SLURM_NODEID=str(rank // 2),
        )
        for rank in range(4)
    ]
    ended = [nodes.end_of(process) for process in started]
    assert [task.code for task in ended] == [0] * 4, ended[0].stderr
    assert "by nodes True" in ended[0].stdout
    assert ended[0].digest == nodes.end_of(nodes.start_program([sys.executable, str(script)])).digest


@pytest.fixture
def networks():
    with two_networks(pytest.skip) as made:
        yield made


def test_nodes_in_two_networks_find_each_other_by_the_interface_between_them(nodes, networks):
    script = nodes.script(SMALL)
    meeting = ["run", "--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", str(nodes.port)]
    started = [
        nodes.start(
            *meeting,
            *("--node-rank", str(rank), "--devices", "cpu:2", script),
            prefix=("nsenter", f"--net={file}"),
            GLOO_SOCKET_IFNAME=device,
        )
        for rank, (file, device) in enumerate(zip(networks.files, networks.devices, strict=True))
    ]
    first, second = map(nodes.end_of, started)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert "by nodes True" in first.stdout
    assert first.digest == nodes.end_of(nodes.start_program([sys.executable, str(script)])).digest


OTHERS = {
    "mpirun": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable),
    "accelerate launch": (
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "3"),
        *("--main_process_port", "PORT", "--log_dir", "logs"),
    ),
    "deepspeed": (
        *(sys.executable, str(Path(sys.executable).with_name("deepspeed"))),
        *("--num_accelerators", "3", "--master_port", "PORT"),
    ),
}
"""Commands of other packages that start three processes of a script on this machine."""
PACKAGES = {"accelerate launch": "accelerate", "deepspeed": "deepspeed"}


@pytest.mark.parametrize("name", OTHERS)
def test_ranks_that_others_start_end_in_the_bits_of_one_process(nodes, name):
    package = PACKAGES.get(name)
    if importlib.util.find_spec(package) is None if package else shutil.which(OTHERS[name][0]) is None:
        pytest.skip(f"{package or OTHERS[name][0]} is not installed")
    script = str(nodes.script(SMALL + 'run.print("ranks", run.world_size)\n'))
    command = [str(nodes.port) if word == "PORT" else word for word in OTHERS[name]]
    ended = nodes.end_of(nodes.start_program([*command, script], DS_ACCELERATOR="cpu"))
    assert ended.code == 0, ended.stderr
    assert "ranks 3" in ended.stdout
    assert ended.digest == nodes.end_of(nodes.start_program([sys.executable, script])).digest


@pytest.mark.timeout(900)  # Ray starts a dozen processes
def test_workers_of_ray_train_end_in_the_bits_of_one_process(nodes):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    command = [sys.executable, str(CLUSTER / "ray_train.py")]
    with tempfile.TemporaryDirectory() as short:  # Ray's sockets are in it
        started = ([*command, *words] for words in (["1"], ["3"], ["1", "2"]))
        ended = [nodes.end_of(nodes.start_program(each, RAY_TMPDIR=short)) for each in started]
    assert [each.code for each in ended] == [0] * 3, ended[0].stderr
    lines = [next(line.split() for line in each.stdout.splitlines() if "digest" in line) for each in ended]
    assert [words[0] for words in lines[:2]] == ["1", "3"]
    assert len({words[-1] for words in lines}) == 1
