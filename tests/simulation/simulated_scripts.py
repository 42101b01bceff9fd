"""Runs a script by samestep on each number of devices, and by torch or Python alone, and compares all that they leave.

Its text is the head of each script of other people's kind that the simulator prints.
"""

import importlib
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
from forked_pool import forked_pool

from samestep.cli.main import main
from samestep.launcher.worker_pool import ServerPool

SECONDS = 240
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?|nan|-?inf")
# What takes longer to import than most scripts to run.
IMPORTED = ("torch._dynamo", "samestep.cli.run", "samestep.logical.ranks", "samestep.scripts.single_process")


def by_samestep(ranks, devices):
    """Runs the script as `samestep run` does, by forks."""
    ServerPool.executed = lambda variables, preload, *_: forked_pool(None, variables, preload)
    sys.argv = ["samestep", "run", f"--logical-devices={ranks}", f"--devices=cpu:{devices}", "script.py"]
    main()


def by_python():
    """Runs the script, on CPUs, as samestep says unless it simulates GPUs."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    runpy.run_path("script.py", run_name="__main__")


def by_torch(ranks):
    """Runs the script in processes with the variables of torchrun, which exchange over gloo."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))

    def rank_main(rank):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), **place}
        if rank:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        by_python()

    own = [forked(partial(rank_main, rank)) for rank in range(ranks)]
    sys.exit(int(any(psutil.Process(pid).wait() for pid in own)))


def forked(run):
    """The process id of a fork, in which a function runs."""
    sys.__stdout__.flush()
    with warnings.catch_warnings():  # Python 3.12 warns where threads run, of which the fork has none
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # threads of gloo may end the process by SIGABRT else


def left_by(run, script):
    """The lines of stdout and the files that a function, in a process in an empty folder, leaves beside a script."""
    with tempfile.TemporaryDirectory(prefix="simulated-") as folder, tempfile.TemporaryDirectory() as streams:
        said, messages = Path(streams, "stdout"), Path(streams, "stderr")
        Path(folder, "script.py").write_text(script)

        def begin():
            os.setsid()
            for fd, file in enumerate((said, messages), 1):
                os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), fd)
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # what runs a simulation may have its own
            for signum in signal.SIGINT, signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
            os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
            os.chdir(folder)
            run()

        process = psutil.Process(forked(begin))
        try:
            code = process.wait(SECONDS)
        except psutil.TimeoutExpired:
            for rank in process.children(recursive=True):
                rank.send_signal(signal.SIGABRT)  # workers write their stacks
            with suppress(psutil.TimeoutExpired):
                process.wait(10)
            raise AssertionError(f"{run} hangs\n{messages.read_text()}") from None
        finally:
            for each in [*process.children(recursive=True), process] if process.is_running() else ():
                each.kill()
                process.wait()
        assert code == 0, f"{run} ends with {code}\n{messages.read_text()}"
        paths = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != "script.py"]
        found = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}
        return said.read_text().splitlines(), found


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
    for name in (*re.findall(r"^(?:import|from) ([\w.]+)", script, re.MULTILINE), *IMPORTED):
        importlib.import_module(name)  # once, by the process that forks
    on_one, *others = (left_by(partial(by_samestep, ranks, 1 + devices), script) for devices in range(ranks))
    for found in others:
        check_same(found, on_one, by_lines=False)
    if reference != "none":
        run = by_python if reference == "python" else partial(by_torch, ranks)
        check_same(on_one, left_by(run, on_cpus), by_lines=True)
