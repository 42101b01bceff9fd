"""Runs a script by samestep on each number of devices, and by torch or Python alone, and compares all that they leave.

Its text is the head of each script of other people's kind that the simulator prints.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

SECONDS = 240
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?|nan|-?inf")
# Processes with torchrun's variables, which share the import of torch: the exchanges are those of gloo.
FORKED = """
import os, runpy, socket, sys
import torch, torch._dynamo, torch.distributed.fsdp
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
ranks, own = int(sys.argv[1]), []
for rank in range(ranks):
    if not (pid := os.fork()):
        size = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= size
        if rank:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        runpy.run_path(sys.argv[2], run_name="__main__")
        sys.stdout.flush()
        os._exit(0)  # threads of gloo may end the process by SIGABRT else
    own.append(pid)
codes = [os.waitpid(pid, 0)[1] for pid in own]
sys.exit(int(any(codes)))
"""


def left_by(words, script):
    """The lines of stdout and the files that a command leaves in an empty folder with a script."""
    with tempfile.TemporaryDirectory(prefix="simulated-") as folder:
        Path(folder, "script.py").write_text(script)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        if "samestep" not in words:  # which sets it, unless it simulates GPUs
            environment["ACCELERATE_USE_CPU"] = "true"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, **pipes) as command:
            try:
                said, messages = command.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                for process in psutil.Process(command.pid).children(recursive=True):
                    if "fork server" not in " ".join(process.cmdline()):
                        process.send_signal(signal.SIGABRT)  # writes its stacks
                said, messages = command.communicate()
                raise AssertionError(f"{words} hangs\n{messages}") from None
            finally:
                command.kill()
        assert command.returncode == 0, f"{words} ends with {command.returncode}\n{messages}"
        paths = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != "script.py"]
        return said.splitlines(), {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}


def check_same(found, expected, by_lines):
    """Fails if lines or files differ; by lines, their first word says how: their "bits", by "rounding", by "words"."""
    (lines, files), (others, other_files) = found, expected
    assert files.keys() == other_files.keys(), (sorted(files), sorted(other_files))
    texts = [[*lines], [*others]]
    for name in sorted(files):
        if name.endswith(".txt"):
            texts[0] += files[name].decode().splitlines()
            texts[1] += other_files[name].decode().splitlines()
        assert by_lines or files[name] == other_files[name] or name.endswith(".txt"), f"{name} differs"
    assert len(texts[0]) == len(texts[1]), texts
    for ours, theirs in zip(*texts, strict=True):
        how = ours.partition(" ")[0] if by_lines else "bits"
        assert how in ("rounding", "words") or ours == theirs, (ours, theirs)
        assert NUMBER.sub("#", ours) == NUMBER.sub("#", theirs), (ours, theirs)
        for a, b in zip(*(map(float, NUMBER.findall(line)) for line in (ours, theirs)), strict=True):
            is_near = abs(a - b) <= 1e-3 * (1 + abs(b)) or str(a) == str(b)
            assert how == "words" or is_near, (ours, theirs)


def check_script(script, ranks, on_cpus, reference):
    """Runs a script for a number of ranks (or microbatches); a reference is run by "torch" or by "python"."""
    command = ["-m", "samestep", "run", "--logical-devices", str(ranks), "--devices"]
    on_one, *others = (left_by([*command, f"cpu:{devices}", "script.py"], script) for devices in range(1, ranks + 1))
    for found in others:
        check_same(found, on_one, by_lines=False)
    if reference != "none":
        words = ["script.py"] if reference == "python" else ["-c", FORKED, str(ranks), "script.py"]
        check_same(on_one, left_by(words, on_cpus), by_lines=True)
