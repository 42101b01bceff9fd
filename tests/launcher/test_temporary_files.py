"""Temporary files of a run: no other run removes them, none is left, and a run that loses them ends by an error."""

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from launcher.conftest import MAIN, RUN, Starter
from marked import SECONDS, marked

LOADER = """
import os, shutil, sys, time, torch
from multiprocessing import current_process
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor([float(index)])
"""
# Each epoch starts data workers, which make a socket.
EPOCHS = """
torch.distributed.init_process_group("gloo")
for epoch in range(100):
    for batch in DataLoader(Numbers(), 4, num_workers=1):
        pass
    open(f"epoch-{epoch}", "w").close()
    while epoch == 0 and not os.path.exists("go on"):
        time.sleep(0.1)
    if epoch == 3:
        break
print(batch.flatten().tolist())
"""
LOST = """
if __name__ == "__main__":
    import samestep
    {make}
    shutil.rmtree(current_process()._config["tempdir"])
    print("lost", flush=True)
    for batch in loader:
        print("read", flush=True)
"""
OWN = 'torch.distributed.init_process_group("gloo"); loader = DataLoader(Numbers(), 4, num_workers=1{})'


@pytest.fixture
def starter():
    """As that of other tests, with a shorter path: the name of a socket has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as folder, marked(Starter, Path(folder), 1.0) as started:
        yield started


@pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare")
def test_a_run_in_another_pid_namespace_removes_nothing_of_a_live_one(starter):
    starter.script("epochs.py", LOADER + EPOCHS)
    starter.script("other.py", "print('the other run')")
    live = starter.start("--devices", "cpu:1", "--logical-devices", "2", "epochs.py")
    starter.wait_for("epoch-0")
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", RUN, str(MAIN)]
    other = subprocess.run(
        [*command, "run", "--devices", "cpu:1", "other.py"],
        cwd=starter.folder,
        env=starter.variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    (starter.folder / "go on").touch()
    try:
        stdout, stderr = live.communicate(timeout=SECONDS)
    finally:
        live.kill()
    if "unshare failed" in other.stderr or "mount" in other.stderr:
        pytest.skip(f"no namespace of processes can be made here: {other.stderr.strip()}")
    assert other.stdout == "the other run\n"
    assert (live.returncode, stdout) == (0, "[4.0, 5.0, 6.0, 7.0]\n"), stderr


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_killed_supervisor_leaves_no_file(starter, num_devices):  # the fixture looks
    starter.script("epochs.py", LOADER + EPOCHS)
    live = starter.start("--devices", f"cpu:{num_devices}", "--logical-devices", "2", "epochs.py")
    starter.wait_for("epoch-0")
    live.send_signal(signal.SIGKILL)
    live.communicate(timeout=SECONDS)
    assert not starter.wait_until_gone(SECONDS)


@pytest.mark.parametrize(
    "make",
    [
        OWN.format(""),
        OWN.format(", multiprocessing_context='spawn'"),
        "loader = samestep.Run(4, 2).loader(Numbers(), num_workers=1)",
    ],
    ids=["forked", "spawned", "run.loader"],
)
def test_a_loader_whose_workers_cannot_hand_batches_over_ends_by_an_error(starter, make):
    starter.script("lost.py", LOADER + LOST.format(make=make))
    ended = starter.run("--devices", "cpu:1", "lost.py")
    assert (ended.returncode, ended.stdout) == (1, "lost\n")
    assert "FileNotFoundError" in ended.stderr
    assert "DataLoader worker" in ended.stderr
