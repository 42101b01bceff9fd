"""`samestep run` from end to end: a script's view, its results, and the messages about its failures."""

import gzip
import json
import os
import socket
import subprocess
import sys
import zipfile
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from cli_commands import PYTHON, SAMESTEP

FACTS = """
import json, os, pickle, sys, threading, torch

class Defined:
    pass

def main():
    facts = {
        "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "package": __package__,
        "pickled": type(pickle.loads(pickle.dumps(Defined()))) is Defined,
        "main": sys.modules["__main__"].Defined is Defined,
        "rank": int(os.environ["RANK"]), "kind": json.loads(os.environ["SAMESTEP_WORKER"])["device_kind"],
        "torch_threads": torch.get_num_threads(), "threads": len(os.listdir("/proc/self/task")),
        "port": int(os.environ["MASTER_PORT"]), "elastic": os.environ["TORCHELASTIC_USE_AGENT_STORE"],
        "titles": [open(f"/proc/{pid}/{name}").read().rstrip("\\0\\n") for pid in (os.getpid(), os.getppid())
                   for name in ("cmdline", "comm")] if os.path.exists("/proc/self/comm") else [],
        "parent": os.getppid(), "sibling": __import__("sibling").VALUE,
    }
    with open(f"facts-{os.environ['RANK']}.json", "w") as file:
        json.dump(facts, file)

if __name__ == "__main__":
    main()
"""

MEET = """
import os, sys, torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("sum", total.item(), "of", dist.get_world_size(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def before_the_barrier(*lines):
    """The script with these lines on rank 1 alone."""
    indented = "".join(f"    {line}\n" for line in lines)
    return MEET.replace("dist.barrier()\n", f"if dist.get_rank() == 1:\n{indented}dist.barrier()\n")


def facts_of(folder, num_ranks):
    return [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_script_sees_what_python_would_show_it(starter, start_method):
    script = starter.script("scripts/facts.py", FACTS)
    starter.script("scripts/sibling.py", "VALUE = 7")
    options = f"--devices cpu:2 --num-threads 2 --start-method {start_method}"
    done = starter.run(*options.split(), *["scripts/facts.py", "--devices", "x", "--"])
    assert (done.returncode, done.stderr) == (0, "")
    facts = facts_of(starter.folder, 2)
    expected = {
        "name": "__main__",
        "file": str(script),
        "argv": ["scripts/facts.py", "--devices", "x", "--"],
        "path": str(script.parent),
        "package": None,
        "sibling": 7,
        "pickled": True,
        "main": True,
        "kind": "cpu",
        "torch_threads": 2,
        "elastic": "True",
    }
    for rank, fact in enumerate(facts):
        assert fact == {**fact, **expected, "rank": rank}
        if sys.platform == "linux":
            name, short, *parent = fact["titles"]
            assert (name, short) == (f"samestep worker {rank}/2 scripts/facts.py", f"samestep-{rank}/2")
            assert start_method == "spawn" or parent == ["samestep fork server scripts/facts.py", "samestep-fork"]
    assert facts[0]["port"] == facts[1]["port"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", facts[0]["port"]), timeout=1)


def test_a_module_runs_as_python_m_does(starter):
    starter.script("package/__init__.py", "")
    starter.script("package/sibling.py", "VALUE = 7")
    text = FACTS.replace('__import__("sibling")', "sibling")
    module = starter.script("package/__main__.py", f"from package import sibling\n{text}")
    done = starter.run("--nproc_per_node", "1", "-m", "package", "-m", "--num-threads")
    assert (done.returncode, done.stderr) == (0, "")
    (fact,) = facts_of(starter.folder, 1)
    assert fact["argv"] == [str(module), "-m", "--num-threads"]
    assert fact["path"] == str(starter.folder)
    assert fact["package"] == "package"
    assert fact["pickled"]


def test_an_unchanged_script_meets_its_peers_and_three_runs_at_once_do_not_collide(starter):
    starter.script("meet.py", MEET)
    runs = [starter.start("--devices", f"cpu:{size}", "meet.py") for size in (1, 3, 3)]
    outputs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert [out for out, _ in outputs] == ["sum 1.0 of 1\n", "sum 6.0 of 3\n", "sum 6.0 of 3\n"]
    assert [err for _, err in outputs] == ["", "", ""]


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_an_exception_is_told_once_with_rank_device_and_the_scripts_own_lines(starter, start_method):
    script = starter.script("boom.py", before_the_barrier('raise ValueError("no such thing")'))
    done = starter.run("--devices", "cpu:3", "--start-method", start_method, "boom.py")
    assert done.returncode == 1
    assert done.stdout == "sum 6.0 of 3\n"
    assert done.stderr == (
        "samestep: error: rank 1 on CPU worker 1 failed with exit code 1\n"
        "Traceback (most recent call last):\n"
        f'  File "{script}", line 11, in <module>\n'
        '    raise ValueError("no such thing")\n'
        "ValueError: no such thing\n"
    )


def test_a_rank_that_only_saw_its_peer_vanish_is_not_the_cause(starter):
    lines = ("import time", "dist.destroy_process_group()", "time.sleep(0.2)", 'raise ValueError("the cause")')
    starter.script("vanish.py", before_the_barrier(*lines))
    done = starter.run("--devices", "cpu:2", "vanish.py")
    assert done.returncode == 1
    assert "rank 1 on CPU worker 1 failed" in done.stderr
    assert done.stderr.endswith("ValueError: the cause\n")
    assert "Connection closed" not in done.stderr


def test_a_samestep_error_is_told_by_its_message_and_the_users_line(starter):
    script = starter.script(
        "usage.py",
        "from samestep.errors import UsageError\n\n"
        "def build():\n    raise UsageError('got 0 microbatches; give 1 or more')\nbuild()\n",
    )
    done = starter.run("--devices", "cpu:2", "usage.py")
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first == "samestep: error: got 0 microbatches; give 1 or more"
    assert second.startswith("  rank ")
    assert second.endswith(f", at {script}, line 4; exit code 2")


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("sys.exit(7)", 7, "exited with code 7"),
        pytest.param('sys.exit("out of paper")', 1, "out of paper", marks=pytest.mark.slow),
    ],
)
def test_a_scripts_own_exit_code_is_kept(starter, statement, code, said):
    starter.script(
        "leave.py", f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {statement}\ntime.sleep(60)\n"
    )
    done = starter.run("--devices", "cpu:2", "leave.py")
    assert done.returncode == code
    assert "rank 1 on CPU worker 1 exited" in done.stderr
    assert said in done.stderr


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)], ids=str)
def test_a_run_needs_no_standard_streams(starter, closed):
    """As of a daemon: the pipes and sockets of workers would take their numbers."""
    starter.script("meet.py", MEET + "import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.stdin.read()\n")
    command = [sys.executable, "-m", "samestep", "run", "--devices", "cpu:2", "meet.py"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" ' + " ".join(f"{number}>&-" for number in closed), "sh", *command],
        cwd=starter.folder,
        env=starter.variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    more = "samestep: rank 1 printed 1 line, which --log-dir DIR keeps\n"
    assert done.stderr == ("" if 2 in closed else f"err\n{more}")


def test_exit_zero_is_no_failure_and_exit_handlers_run(starter):
    starter.script("leave.py", "import atexit, sys\natexit.register(print, 'bye')\nsys.exit()\n")
    done = starter.run("--devices", "cpu:2", "leave.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "bye\n", "")


def test_a_process_that_a_script_forks_ends_as_its_own(starter):
    starter.script(
        "forks.py",
        "import os, sys\nfor end in ('sys.exit(4)', 'raise ValueError', '()'):\n    pid = os.fork()\n"
        "    if pid == 0:\n        exec(end)\n        sys.exit()\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n",
    )
    done = starter.run("--devices", "cpu:1", "forks.py")
    assert (done.returncode, done.stdout) == (0, "4\n1\n0\n")
    assert done.stderr.endswith("ValueError\n")
    assert "samestep: error" not in done.stderr


def test_a_script_whose_last_words_a_full_disk_refuses_has_failed(starter):
    starter.script("last.py", "print('last words', end='')\n")
    starter.variables.pop("PYTHONUNBUFFERED", None)
    with open("/dev/full", "w") as full:
        process = starter.start("--devices", "cpu:2", "last.py", stdout=full)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "rank 0 on CPU worker 0 failed with exit code 1" in stderr
    assert "No space left on device" in stderr


RUN_PRINTS = """
import torch, samestep
run = samestep.Run(global_batch_size=4)
model = torch.nn.Linear(2, 1)
step = run.train_step(model, torch.optim.SGD(model.parameters(), 0.1), lambda model, batch: model(batch[0]).mean())
"""
PRINTS = (
    RUN_PRINTS
    + """
for batch in run.loader((torch.ones(8, 2),)):
    run.print(step(batch).loss)
"""
)
FITS = (
    RUN_PRINTS
    + """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with samestep.Trainer(run, model, optimizer, lambda model, batch: model(batch[0]).mean()) as trainer:
    trainer.fit((torch.ones(8, 2),), 1)
torch.save(model.state_dict(), "done.pt")
"""
)


@pytest.mark.parametrize("command", [PYTHON, (*SAMESTEP, "run", "--devices", "cpu:2")], ids=["python", "samestep run"])
@pytest.mark.parametrize("script", [PRINTS, FITS], ids=["run.print", "Trainer"])
def test_results_that_a_full_disk_refuses_are_a_failure_and_a_reader_that_is_gone_is_none(starter, script, command):
    starter.script("results.py", script)
    with open("/dev/full", "w") as full:
        process = starter.start("results.py", command=command, stdout=full)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode in (1, 120)  # by Python itself, whose flush at its end fails too
    assert "No space left on device" in stderr
    # The lines of a trainer are shown by the supervisor: for their sake no training ends.
    assert (starter.folder / "done.pt").exists() == (script == FITS and command != PYTHON)
    reader, writer = os.pipe()
    process = starter.start("results.py", command=command, stdout=writer)
    os.close(reader)
    os.close(writer)
    _, stderr = process.communicate(timeout=120)
    assert (process.returncode, "rror" in stderr) == (0, False), stderr


def test_a_log_that_cannot_be_written_is_a_failure_at_the_end(starter):
    replaced = "import os, shutil\nshutil.rmtree('logs')\nopen('logs', 'w').close()"
    starter.script("chat.py", before_the_barrier(*replaced.splitlines(), "print('words')") + "print('the end')\n")
    done = starter.run("--devices", "cpu:2", "--log-dir", "logs", "chat.py")
    assert (done.returncode, done.stdout) == (1, "sum 3.0 of 2\nthe end\n")
    assert "what was printed cannot be written: logs/rank-1.log: Not a directory" in done.stderr


LEFT_OPEN = """
import gzip, os, sys, zipfile

rank = os.environ["RANK"]
text, packed, archive = open(f"{rank}.txt", "w"), gzip.open(f"{rank}.gz", "wt"), zipfile.ZipFile(f"{rank}.zip", "w")
both = open(f"{rank}.raw", "w+b")
text.write("text"), packed.write("packed"), archive.writestr("member", "archived"), both.write(b"both")
sys.exit(3)
"""


def test_what_files_that_are_left_open_hold_back_is_written_at_the_end(starter):
    starter.script("open.py", LEFT_OPEN)
    assert starter.run("--devices", "cpu:1", "open.py").returncode == 3
    assert Path(starter.folder, "0.txt").read_text() == "text"
    assert Path(starter.folder, "0.raw").read_bytes() == b"both"
    assert gzip.decompress(Path(starter.folder, "0.gz").read_bytes()) == b"packed"
    assert zipfile.ZipFile(Path(starter.folder, "0.zip")).read("member") == b"archived"


def test_a_crash_names_the_signal_and_shows_the_line_and_the_last_words(starter):
    script = starter.script("crash.py", before_the_barrier("print('last words')", "os.kill(os.getpid(), 11)"))
    done = starter.run("--devices", "cpu:2", "crash.py")
    assert done.returncode == 128 + 11
    assert "rank 1 on CPU worker 1 was ended by SIGSEGV" in done.stderr
    assert "\noutput of rank 1:\nlast words\n" in done.stderr
    assert f'File "{script}", line 12' in done.stderr
    assert "launcher" not in done.stderr


def test_a_killed_worker_is_told_with_a_hint_and_its_children_go_with_it(starter):
    starter.script(
        "killed.py",
        "import os, signal, subprocess, time\n"
        "from multiprocessing import Process, shared_memory\n"
        "if os.environ['RANK'] == '1':\n"
        "    memory = shared_memory.SharedMemory(create=True, size=4096)\n"
        "    open('name', 'w').write(memory.name)\n"
        "    Process(target=time.sleep, args=(600,), daemon=True).start()\n"
        "    subprocess.Popen(['sleep', '600'])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)\n",
    )
    done = starter.run("--devices", "cpu:2", "--log-dir", "logs", "killed.py")
    assert done.returncode == 128 + 9
    assert "rank 1 on CPU worker 1 was ended by SIGKILL" in done.stderr
    assert "out of memory" in done.stderr
    assert "its log: logs/rank-1.log" in done.stderr
    with pytest.raises(FileNotFoundError):
        SharedMemory((starter.folder / "name").read_text())


def test_the_log_folder_keeps_what_other_ranks_print(starter):
    starter.script("chat.py", "import os, sys\nprint('I am', os.environ['RANK'])\nprint('psst', file=sys.stderr)\n")
    done = starter.run("--devices", "cpu:3", "--log-dir", "logs/deep", "chat.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "I am 0\n", "psst\n")
    logs = {path.name: path.read_text() for path in (starter.folder / "logs/deep").iterdir()}
    assert logs == {"rank-1.log": "I am 1\npsst\n", "rank-2.log": "I am 2\npsst\n"}


def test_a_starter_that_has_threads_says_so_and_starts_each_worker_as_a_new_program(starter):
    starter.script(
        "customs/sitecustomize.py",
        "import sys, threading, time\n"
        "if '-m' in sys.orig_argv and 'samestep.launcher.forkserver' in sys.orig_argv:\n"
        "    threading.Thread(target=time.sleep, args=(600,), name='profiler', daemon=True).start()\n",
    )
    starter.script(
        "hello.py", "import os\nprint(os.environ['WORLD_SIZE'])\nraise SystemExit(3 * (os.environ['RANK'] == '0'))"
    )
    starter.variables["PYTHONPATH"] = str(starter.folder / "customs")
    done = starter.run("--devices", "cpu:2", "hello.py")
    assert (done.returncode, done.stdout) == (3, "2\n"), done.stderr
    first, *more = done.stderr.splitlines()
    assert first.startswith("samestep: the starter process has 2 threads (profiler) and cannot fork, so each worker")
    assert not [line for line in more if "cannot fork" in line]


def test_a_handler_at_the_fork_may_take_the_wake_up_descriptor_away(starter):
    starter.script(
        "customs/sitecustomize.py",
        "import os, signal\nos.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))\n",
    )
    starter.script("hello.py", "print('hello')")
    starter.variables["PYTHONPATH"] = str(starter.folder / "customs")
    done = starter.run("--devices", "cpu:2", "hello.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "there is no script to run"),
        (("nowhere.py",), "there is no script nowhere.py"),
        (("folder",), "got the folder folder"),
        (("-m", "no/path.py"), "after -m give a dotted name"),
        (("--devices", "cpu:2", "--nproc-per-node", "2", "ok.py"), "give one of the two"),
        (("--devices", "cpu:0", "ok.py"), "1 or more"),
        (("--num-threads", "0", "ok.py"), "--num-threads"),
        (("--start-method", "thread", "ok.py"), "it is one of fork, spawn (--start-method)"),
        (("--node-rank", "1", "--master-addr", "a", "ok.py"), "got --node-rank, --master-addr without the number of"),
        (("--nnodes", "2", "--node-rank", "2", "--master-addr", "a", "ok.py"), "needed: a number from 0 to 1"),
    ],
)
def test_bad_usage_gets_one_sentence_and_starts_nothing(refused, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("ok.py").write_text("open('ran', 'w')")
    assert said in refused("run", *arguments)
    assert not Path("ran").exists()


def test_under_another_launcher_it_is_refused(refused, tmp_path, monkeypatch):
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("ok.py").touch()
    assert "started by torchrun already" in refused("run", "ok.py")


def test_the_parent_never_imports_torch():
    program = "import sys, samestep.launcher.supervisor, samestep.cli.run; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout == "False\n"


STRANGER = """
import os, socket, struct, time

if os.environ["RANK"] == "0":
    with socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))) as connection:
        connection.sendall(struct.pack("<BIBQ", 0, 0x3C85F7CE, 1, 2**63) + bytes(100))
        time.sleep(0.5)
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
print("met", flush=True)
"""


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_garbage_at_the_port_of_the_store_is_survived_without_a_word(starter, start_method):
    script = starter.script("stranger.py", STRANGER)
    done = starter.run("--devices", "cpu:2", "--start-method", start_method, script)
    assert (done.returncode, done.stdout) == (0, "met\n")
    assert "frame #" not in done.stderr
    assert "TCPStore" not in done.stderr
