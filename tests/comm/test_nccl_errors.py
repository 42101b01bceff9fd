"""Errors of NCCL that are no lost rank: at once, on every rank, with NCCL's text and what helps."""

from textwrap import dedent

import pytest
from cli_commands import samestep
from gpus import environment, needs_fake_gpus, places, run_processes, run_ranks, told

from samestep.comm.nccl_errors import nccl_failure
from samestep.errors import DeviceError, OutOfMemoryError

HEAD = "NCCL error in: ProcessGroupNCCL.cpp:4000, "


@pytest.mark.parametrize(
    ("text", "kind", "advice"),
    [
        ("unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'", OutOfMemoryError, "NCCL_BUFFSIZE"),
        ("ncclSystemError: …\nError while creating shared memory segment /dev/shm/nccl-x", DeviceError, "--shm-size"),
        ("ncclInternalError: …\nBootstrap : no socket interface found", DeviceError, "NCCL_SOCKET_IFNAME"),
        ("ncclInvalidUsage: …\nDuplicate GPU detected : rank 0 and rank 1", DeviceError, "one rank a GPU"),
        ("ncclInvalidArgument: …", DeviceError, "NCCL_DEBUG=INFO"),
        ("ncclRemoteError: … a remote process exiting prematurely", None, ""),
        ("ncclSystemError: …\nCall to connect returned Connection refused", None, ""),
        ("ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 'unspecified launch failure'", None, ""),
    ],
    ids=["memory", "/dev/shm", "interface", "usage", "argument", "a lost rank", "a refused connection", "a broken GPU"],
)
def test_an_error_of_nccl_is_told_from_the_loss_of_a_rank(text, kind, advice):
    found = nccl_failure(HEAD + text, 3)
    if kind is None:
        assert found is None
    else:
        assert type(found) is kind
        assert advice in str(found)
        assert "rank 3" in str(found)
        assert text.splitlines()[-1] in str(found)


def test_errors_of_gloo_are_not_ncc_ls():
    assert nccl_failure("[enforce fail at alloc_cpu.cpp] out of memory", 0) is None


SCRIPT = """
    import torch
    import samestep

    run = samestep.Run(8, 4, timeout_seconds=600)
    print("connected", flush=True)
    model = torch.nn.Linear(4, 4)
    step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).sum(1))
    for _ in range(3):
        step(torch.ones(8, 4))
"""


def fail(folder, fault):
    """Three supervised ranks, of which one has this fault; the exit code, stdout and stderr."""
    script = folder / "script.py"
    script.write_text(dedent(SCRIPT))
    own = environment(3, FAKE_NCCL_FAULT=fault, OMP_NUM_THREADS="1")
    # Well under the ten minutes that a lost rank may take, and those of torch's imports on a busy machine.
    done = samestep("run", "--devices", "0,1,2", script, cwd=folder, **own)
    return done.returncode, done.stdout, done.stderr


@needs_fake_gpus
@pytest.mark.parametrize(
    ("fault", "said", "text"),
    [
        ("memory 1 1", "out of memory: NCCL finds none on the GPU of rank 1", "Failed to CUDA calloc async"),
        ("memory 1 1 blocks", "out of memory: NCCL finds none on the GPU of rank 1", "Failed to CUDA calloc async"),
        (
            "shm 2 0",
            "make it larger (docker run --shm-size=1g, or --ipc=host; samestep doctor shows its size)",
            "No space left on device (28)",
        ),
    ],
    ids=["memory", "memory, while others connect", "/dev/shm when NCCL starts"],
)
def test_an_error_in_the_first_exchange_is_found_before_the_model_and_raised_on_every_rank(tmp_path, fault, said, text):
    status, output, errors = fail(tmp_path, fault)
    assert status in (1, 2), errors
    assert said in errors
    assert text in errors
    assert "PeerLostError" not in errors
    assert "connected" not in output


@needs_fake_gpus
def test_an_error_in_a_later_exchange_ends_the_run_with_its_text(tmp_path):
    status, output, errors = fail(tmp_path, "memory 1 3")
    assert status == 1, errors
    assert "out of memory: NCCL finds none on the GPU of rank 1" in errors
    assert "Failed to CUDA calloc async" in errors
    assert "connected" in output


@needs_fake_gpus
def test_a_failure_that_nothing_explains_is_in_the_messages_that_follow(tmp_path):
    """NCCL's error of a lost peer, though all ranks live: the ranks wait for word of one, and say why."""
    script = SCRIPT.replace("timeout_seconds=600", "timeout_seconds=1").replace("import samestep", HURRY)
    script_file = tmp_path / "script.py"
    script_file.write_text(dedent(script))
    own = environment(3, FAKE_NCCL_FAULT="remote 0 3", OMP_NUM_THREADS="1")
    done = samestep("run", "--devices", "0,1,2", script_file, cwd=tmp_path, **own)
    assert "waits to hear which rank was lost" in done.stderr
    assert "Connection closed by remote peer" in done.stderr


HURRY = """import samestep
    from samestep.comm import quorums
    quorums.NOTICE_SECONDS, quorums.QUORUM_SECONDS = 0.1, 3.0
"""


GROUPS = """
    import torch
    import samestep

    try:
        run = samestep.Run(8, 4, device="cuda", timeout_seconds=60)
        print("connected")
    except samestep.SamestepError as error:
        print(type(error).__name__, error)
    """


@needs_fake_gpus
@pytest.mark.parametrize("fault", ["memory 1 2", "memory 1 3"], ids=["within nodes", "between nodes"])
def test_an_error_in_the_first_exchange_of_some_ranks_is_raised_on_all(fault):
    ranks = places(4)
    for rank, place in enumerate(ranks):  # two nodes of two
        ids = f"{rank // 2 * 2},{rank // 2 * 2 + 1}"
        place |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ids}
    for said, errors in run_processes(GROUPS, *ranks, devices=4, FAKE_NCCL_FAULT=fault, OMP_NUM_THREADS="1"):
        assert said.startswith("OutOfMemoryError out of memory: NCCL finds none on the GPU of rank 1 "), said + errors
        assert "Failed to CUDA calloc async" in said


ORDERED = """
    import samestep
    samestep.register_backend()
    backend = "samestep"
    connect(seconds=60)
    try:
        dist.all_reduce(torch.ones(4, device=device))
        tell(error="none")
    except samestep.SamestepError as error:
        tell(error=f"{type(error).__name__} {error}")
    os._exit(0)
"""


@needs_fake_gpus
def test_an_error_of_nccl_s_in_a_script_s_process_group_is_raised_on_all_its_ranks(tmp_path):
    for found in told(run_ranks(tmp_path, ORDERED, 3, FAKE_NCCL_FAULT="shm 1 1")):
        assert found["error"].startswith("DeviceError rank 1 cannot exchange by NCCL: /dev/shm is too small")


LATE = """
    import time
    import torch
    import samestep

    run = samestep.Run(8, 4, device="cuda", timeout_seconds=3)
    if run.rank == 1:
        time.sleep(6)
    pending = run.communicator.transport.exchange(torch.ones(2, device=run.device), [1, 1], [1, 1])
    if run.rank == 0:
        time.sleep(6)
    print(pending.wait().tolist())
"""


@needs_fake_gpus
def test_torch_s_watchdog_takes_no_late_transfer_for_an_error_where_the_supervisor_watches(tmp_path):
    script_file = tmp_path / "script.py"
    script_file.write_text(dedent(LATE))
    own = environment(2, OMP_NUM_THREADS="1")
    done = samestep("run", "--devices", "0,1", script_file, cwd=tmp_path, **own)
    assert (done.returncode, done.stdout) == (0, "[1.0, 1.0]\n"), done.stderr
    assert "Watchdog" not in done.stderr
