"""A single-process script that runs once, in the driver, beside workers: its effects, its ends and its output."""

import os
import re
import signal
import subprocess
import textwrap
import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
from cli_commands import SAMESTEP, samestep, start
from marked import free_port

from samestep.comm.communicator import Communicator
from samestep.comm.group import GroupTransport
from samestep.errors import DeterminismError, PeerLostError
from samestep.scripts.workers.link import Link, decode, encode, whole_messages

DEVICES = (1, 3)
NET = """
    import atexit, os, sys, time, torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x=None, y=None):
        x, y = torch.randn(12, 6) if x is None else x, torch.randint(3, (12,)) if y is None else y
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item().hex()
"""
EFFECTS = """
    import datetime, logging, socket, sqlite3, subprocess, tempfile, uuid
    import numpy
    from torch.utils.data import DataLoader, Dataset
    from tqdm import tqdm

    class Rows(Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, i):
            with open("items.log", "a") as file:
                file.write(f"{i}\\n")
            return torch.full((6,), 0.1 * i), i % 3

    server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    name = input()
    logging.basicConfig(filename="run.log", level=logging.INFO)
    folder = datetime.datetime.now().strftime("out/%H%M%S-%f")
    os.makedirs(folder)
    table = sqlite3.connect("runs.db")
    table.execute("create table runs(name text)")
    table.execute("insert into runs values(?)", (uuid.uuid4().hex,))
    table.commit()
    subprocess.run([sys.executable, "-c", "open('child.log', 'a').write('once')"], check=True)
    atexit.register(lambda: open("end.log", "a").write("once"))
    scale = 1 + 0 * os.getpid() * time.time_ns()  # what differs between processes
    for x, y in tqdm(DataLoader(Rows(), batch_size=12, shuffle=True, num_workers=2)):
        logging.info("%s %s", os.getpid(), step(scale * x, y))
    numpy.save(f"{folder}/weights.npy", net[0].weight.detach().numpy())
    pid = os.fork()
    if pid == 0:
        net(torch.ones(12, 6))
        sys.exit(4)
    print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(os.listdir("out")), step())
    print(net[0].weight.sum().item().hex(), table.execute("select count(*) from runs").fetchone()[0])
"""
CHUNKS = """
    import warnings

    class TooBig(ValueError):
        def __init__(self, row, *, limit=8):
            super().__init__(f"row {row} is above {limit}")
            self.row = row

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            if x.max() > 100:
                raise TooBig(100)
            return 2 * gradient

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x):
            row = x[0, 0].item()
            print("chunk", row, flush=True)
            print("chunk", row, file=sys.stderr)
            warnings.warn("seen")
            warnings.warn("hidden")
            nn.functional.mse_loss(x[:, :1], x)
            warnings.warn(f"row {row}", Careful)
            if 8 < row < 100:
                raise TooBig(row)  # here
            return Doubled.apply(self.linear(x) * 0 + x[:, :3])

    class Careful(UserWarning):
        pass

    warnings.filterwarnings("ignore", message="hidden")
    model = nn.DataParallel(Net())
    rows = torch.arange(12.0)[:, None].expand(12, 6)
    for x in (rows, rows / 2, 20 * rows[-1] + 0 * rows):
        print("before")
        try:
            model(x).sum().backward()
        except TooBig as error:
            print(type(error), error, error.row)
        print("after")
    print(step())
    if len(sys.argv) > 1:
        model(rows)
"""
STOPS = """
    import signal, threading

    class Stop(BaseException):
        pass

    class Late(Exception):
        pass

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x, raises=None, where="", lock=None):
            y = self.linear(x)

            def stop(gradient):
                raise raises("in a chunk")

            if raises is not None and x[0, 0] >= 6:
                if where == "forward":
                    stop(y)
                y.register_hook(stop)
            return y + 0.1 * torch.randn_like(y)

    model = nn.DataParallel(Net())
    rows = torch.arange(12.0)[:, None].expand(12, 6)
    kinds = (ValueError, KeyboardInterrupt, SystemExit, Stop)
    for raises, where in [(kind, where) for kind in kinds for where in ("forward", "backward")]:
        try:
            model(rows, raises, where).sum().backward()
        except raises as error:
            print(type(error).__name__, error)
        print(model(rows).sum().item().hex(), step())

    def refuse(gradient):
        raise Stop("beside chunks")

    for hooked in (model(rows), model.module.linear.weight.clone()):
        hooked.register_hook(refuse)
        try:
            (hooked.sum() + model(rows).sum()).backward()
        except Stop as error:
            print(error)
    if len(sys.argv) > 1:
        try:
            model(rows, lock=threading.Lock())
        except ValueError as error:
            print("an argument of a wrapped forward cannot be sent to the workers" in str(error), file=sys.stderr)
    print(model(rows).sum().item().hex(), step())

    def late(_, frame):  # in a message, a chunk or the sums: torch's own modes do not bear an exception at any place
        while frame is not None and not frame.f_code.co_filename.endswith(("shared_forward.py", "derivatives.py")):
            frame = frame.f_back
        if frame is not None:
            raise Late

    signal.signal(signal.SIGPROF, late)
    signal.signal(signal.SIGALRM, late)
    numbers = [0, 0]
    for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
        for number in range(30):
            try:
                signal.setitimer(timer, 0.0008 * (number + 1))
                for _ in range(20):
                    step()
                    model(rows).sum().backward()
                signal.setitimer(timer, 0)
            except Late:
                numbers[timer > 0] += 1
    print("late", sum(numbers) > 10, file=sys.stderr)
    torch.manual_seed(1)
    for module in (model, net):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
    print(model(rows).sum().item().hex(), step(), step())
"""
LOOP = """
    step()
    try:
        for number in range(100_000):
            step()
            if number == 2:
                print("ready", flush=True)
    except KeyboardInterrupt:
        print("caught", len(step()) > 0, flush=True)
        torch.save(net.state_dict(), "saved.pt")
"""


def script(folder, source, net=NET):
    folder.mkdir(exist_ok=True)
    path = folder / "train.py"
    path.write_text(textwrap.dedent(net) + textwrap.dedent(source))
    return path


def once(path, devices, *words, options=(), **variables):
    """Runs a script once, in its folder."""
    options = ("--devices", f"cpu:{devices}", "--logical-devices", 4, *options)
    return samestep("run", *options, path, *words, cwd=path.parent, **variables)


def test_what_a_script_does_to_the_world_happens_once_and_the_bits_are_equal(tmp_path):
    results, port = [], free_port()
    for devices in DEVICES:
        path = script(tmp_path / str(devices), EFFECTS)
        (path.parent / "answer").write_text("bob\n")
        with open(path.parent / "answer") as answer:
            command = [*SAMESTEP, "run", "--devices", f"cpu:{devices}", "--logical-devices", "4", path, str(port)]
            variables = dict(os.environ)
            ended = subprocess.run(
                command, cwd=path.parent, env=variables, stdin=answer, capture_output=True, text=True, timeout=240
            )
        assert ended.returncode == 0, ended.stderr
        assert len([line for line in ended.stderr.split("\r") if "0/2" in line]) == 1  # one bar
        assert len((path.parent / "run.log").read_text().splitlines()) == 2
        assert sorted(map(int, (path.parent / "items.log").read_text().split())) == list(range(24))
        assert (path.parent / "child.log").read_text() == "once"
        assert (path.parent / "end.log").read_text() == "once" * 2  # the fork's too, as Python has it
        (weights,) = path.parent.glob("out/*/weights.npy")
        results.append((ended.stdout, weights.read_bytes()))
    assert results[0][0].startswith("bob 4 1 ")
    assert results[1:] == results[:1]


# Each changes what a chunk reads without moving a version: the workers are to have it before the next forward.
UNSEEN = """
    import numpy, os
    from torch.nn import functional as F

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.vectors = numpy.random.default_rng(0).normal(size=(6, 3000)).astype("float32")  # 72 kB
            self.online, self.head = nn.Linear(6, 3000), nn.Linear(3000, 3)
            self.target = nn.Linear(6, 3000).requires_grad_(False)

        def forward(self, x):
            return self.head((self.online(x) + self.target(x) + x @ torch.from_numpy(self.vectors)).tanh())

    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    held_out = torch.randn(12, 6)
    for number in range(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            print(step())
        net.target.weight.data.mul_(0.9).add_(net.online.weight.data, alpha=0.1)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            print(net(held_out).double().sum().item().hex())
"""


def test_weights_that_are_written_unseen_arrays_and_casts_of_autocast_are_the_same_on_all_devices(tmp_path):
    one, two = (once(script(tmp_path / str(devices), UNSEEN), devices) for devices in (1, 2))
    assert (two.returncode, two.stdout) == (0, one.stdout), two.stderr
    assert len({*one.stdout.split()}) == 16


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("print(step()); sys.exit(3)", 3, "exited with code 3"),
        ("print(step()); sys.exit('a message')", 1, "a message"),
        ("print(step(), flush=True); os._exit(5)", 5, "exited with code 5"),
        ("print('no forward')", 0, ""),
        ("print(step(), flush=True); os._exit(0)", 0, ""),
    ],
)
def test_a_script_ends_with_its_own_exit_code(tmp_path, source, code, said):
    ended = once(script(tmp_path, source), 2)
    assert (ended.returncode, len(ended.stdout.splitlines())) == (code, 1)
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def said_before_the_error(ended):
    """What a run said on stderr, but for how many devices compute."""
    text = ended.stderr[: ended.stderr.index("samestep: error")]
    lines = [line for line in text.splitlines() if " is computed by " not in line]
    return re.sub(r", by \d devices: this process and \d workers?", "", "\n".join(lines))


def test_chunks_say_raise_and_warn_in_their_order_on_any_number_of_devices(tmp_path):
    path = script(tmp_path, CHUNKS)
    one, three = (once(path, devices, "fail") for devices in DEVICES)
    assert one.stdout.count("chunk 0.0\n") == 3
    assert one.stdout.count("TooBig'> row 9.0 is above 8 9.0\n") == 1
    assert one.stdout.count("TooBig'> row 100 is above 8 100\n") == 1
    said = said_before_the_error(one)
    assert said.count("UserWarning: seen") == 1
    assert said.count("UserWarning: Using a target size") == 1
    assert said.count("Careful: row 9.0") == 1
    assert "hidden" not in said.replace('warnings.warn("hidden")', "")
    assert (three.returncode, three.stdout) == (1, one.stdout)
    assert said_before_the_error(three) == said
    assert three.stderr.count("Traceback") == 1
    assert "TooBig: row 9.0 is above 8" in three.stderr
    assert "raise TooBig(row)  # here" in three.stderr


@pytest.mark.parametrize("draws", [False, True])
def test_a_fork_draws_from_no_generator(tmp_path, draws):
    source = f"""
        import random
        if os.fork() == 0:
            sys.exit(4)
        print(os.waitstatus_to_exitcode(os.wait()[1]), {"random.random()" if draws else "step()"})
    """
    ended = once(script(tmp_path, source), 2)
    assert (ended.returncode, ended.stdout[:1]) == (0, "4"), ended.stderr
    assert ("draws from Python's random without a seed" in ended.stderr) == draws


def two_links(tmp_path, rank, timeout=2.0):
    """The link of one of two processes, over gloo, whose operations have a timeout."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    gloo = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout))
    transport = GroupTransport(None, store, timedelta(seconds=timeout), backend=gloo)
    return Link(Communicator(torch.device("cpu"), transport, transport))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_worker_waits_for_the_script_longer_than_for_an_exchange(tmp_path, is_late):
    link = []
    other = threading.Thread(target=lambda: link.append(two_links(tmp_path, 1)), daemon=True)
    other.start()
    driver = two_links(tmp_path, 0)
    other.join()
    if is_late:  # as a process that is no worker
        link[0]._transport.limit_waits(timedelta(seconds=2))
    received = []

    def receive():
        with suppress(PeerLostError):
            received.append(decode(link[0].next_message()[0])[0])
            link[0].answer(encode("seen"))

    other = threading.Thread(target=receive, daemon=True)
    other.start()
    time.sleep(3)
    if not is_late:
        driver.send(encode("late", [torch.ones(3)]))
        assert [decode(each)[0] for each in driver.answers()] == ["seen"]
    other.join()
    assert received == ["late"] * (not is_late)


def test_after_an_error_amid_messages_the_script_is_told_to_end():
    link = Link(SimpleNamespace(control=None, rank=0, world_size=2, device="cpu"))
    with link.whole(), link.whole():
        pass
    with pytest.raises(MemoryError), link.whole():
        raise MemoryError("no room")
    for _ in range(2):
        with pytest.raises(DeterminismError, match=r"out of step since MemoryError \(no room\)"):
            link.send(encode("next"))


@pytest.mark.slow
def test_whatever_is_raised_and_caught_in_a_step_the_next_one_has_the_same_bits_on_any_number_of_devices(tmp_path):
    path = script(tmp_path, STOPS)
    one, three = (once(path, devices, *["lock"] * (devices > 1)) for devices in DEVICES)
    assert one.returncode == 0, one.stderr
    assert one.stdout.count("in a chunk") == 8
    assert three.stderr.startswith("True\n") or "\nTrue\n" in three.stderr
    assert "late True\n" in three.stderr
    assert (three.returncode, three.stdout) == (0, one.stdout), three.stderr


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_a_handler_raises_waits_until_the_messages_are_whole(is_whole):
    steps = []

    def message():
        with whole_messages() if is_whole else nullcontext():
            signal.raise_signal(signal.SIGINT)
            steps.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        message()
    assert bool(steps) == is_whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Running:
    """A run that has printed "ready", and its processes by rank."""

    def __init__(self, path, *options, devices=3):
        command = [*SAMESTEP, "run", "--devices", f"cpu:{devices}", "--logical-devices", "4", *options, path]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = start(command, path.parent, dict(os.environ), **streams)
        self.stdout = ""
        for line in self.process.stdout:
            self.stdout += line
            if line == "ready\n":
                break
        self.children = psutil.Process(self.process.pid).children(recursive=True)
        titles = {child: " ".join(child.cmdline()) for child in self.children}
        workers = [(title, child) for child, title in titles.items() if title.startswith("samestep worker ")]
        self.ranks = {int(title.split()[2].partition("/")[0]): child for title, child in workers}

    def end(self, timeout=60):
        """Waits for the end of all; the exit code and stderr."""
        try:
            rest, stderr = self.process.communicate(timeout=timeout)
        finally:
            self.process.kill()
        self.stdout += rest
        _, left = psutil.wait_procs(self.children, timeout=20)
        for child in left:
            child.kill()
        assert left == []
        return self.process.returncode, stderr


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        (LOOP.replace('print("caught"', 'sys.exit(3); print("caught"'), 3, ""),
        (LOOP.replace('print("caught"', 'float("x"); print("caught"'), 1, "ValueError: could not convert"),
        (LOOP.replace("KeyboardInterrupt", "ValueError"), 130, ""),
    ],
)
def test_a_script_that_is_interrupted_ends_as_it_would_by_itself(tmp_path, source, code, said):
    running = Running(script(tmp_path, source))
    running.process.send_signal(signal.SIGINT)
    ended, stderr = running.end()
    assert (ended, running.stdout) == (code, "ready\n"), stderr
    assert said in stderr
    assert ("Traceback" in stderr) == (said != "")


def test_an_interrupt_reaches_the_script_between_calls_and_it_can_go_on(tmp_path):
    running = Running(script(tmp_path, LOOP))
    running.process.send_signal(signal.SIGINT)
    code, stderr = running.end()
    assert (code, running.stdout) == (0, "ready\ncaught True\n"), stderr
    assert (tmp_path / "saved.pt").exists()
    assert "Traceback" not in stderr


SIGNALLED = """
    import signal

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x, where=""):
            y = self.linear(x)
            if where and x[0, 0] == 0:
                signal.raise_signal(signal.SIGUSR1) if where == "forward" else y.register_hook(strike)
            return y + 0.1 * torch.randn_like(y)

    def strike(gradient):
        signal.raise_signal(signal.SIGUSR1)

    def handle(*_):
        has_gradient = model.module.linear.weight.grad is not None
        loss = model(rows).square().sum()
        loss.backward()
        print(where, has_gradient, torch.is_grad_enabled(), loss.item().hex())

    signal.signal(signal.SIGUSR1, handle)
    model = nn.DataParallel(Net())
    rows = torch.arange(12.0)[:, None].expand(12, 6)
    for where in ("forward", "backward"):
        model.zero_grad()
        model(rows, where).sum().backward()
        print(model.module.linear.weight.grad.sum().item().hex())
"""


def test_a_handler_of_the_script_computes_at_a_signal_that_came_amid_a_step_as_under_python(tmp_path):
    one, three = (once(script(tmp_path, SIGNALLED), devices) for devices in DEVICES)
    assert one.returncode == 0, one.stderr
    forward, _, backward, _ = one.stdout.splitlines()
    assert forward.startswith("forward False True 0x")
    assert backward.startswith("backward True True 0x")
    assert (three.returncode, three.stdout) == (0, one.stdout), three.stderr


def test_a_handler_of_the_script_can_compute_and_save_at_sigterm(tmp_path):
    handler = """
        import signal

        @torch.enable_grad()  # the signal may come amid the optimizer's step, which has none
        def end(*_):
            print("at the end", len(step()) > 0)
            sys.exit(0)

        signal.signal(signal.SIGTERM, end)
    """
    running = Running(script(tmp_path, textwrap.dedent(handler) + textwrap.dedent(LOOP)))
    running.process.send_signal(signal.SIGTERM)
    code, stderr = running.end()
    assert (code, running.stdout) == (0, "ready\nat the end True\n"), stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_ends_the_run_and_is_named(tmp_path, rank):
    running = Running(script(tmp_path, LOOP))
    running.ranks[rank].kill()
    code, stderr = running.end()
    assert code == 137
    assert f"rank {rank} on CPU worker {rank} was ended by SIGKILL" in stderr
    assert "Traceback" not in stderr


def test_workers_end_with_the_command(tmp_path):
    running = Running(script(tmp_path, LOOP))
    running.process.kill()
    assert running.end()[0] == -signal.SIGKILL


def test_workers_that_wait_compute_nothing(tmp_path):
    running = Running(script(tmp_path, "step(); print('ready', flush=True); time.sleep(4); step()"))
    time.sleep(1)
    before = [sum(running.ranks[rank].cpu_times()[:2]) for rank in (1, 2)]
    time.sleep(2)
    after = [sum(running.ranks[rank].cpu_times()[:2]) for rank in (1, 2)]
    assert running.end()[0] == 0
    assert all(end - start <= 0.3 for start, end in zip(before, after, strict=True))  # of 2 s


@pytest.mark.slow
def test_a_restart_begins_with_all_processes_anew(tmp_path):
    source = """
        print(step())
        if not os.path.exists("once"):
            open("once", "w").close()
            os._exit(5)
        print("second")
    """
    ended = once(script(tmp_path, source), 2, options=("--max-restarts", 1))
    assert ended.returncode == 0, ended.stderr
    first, again, second = ended.stdout.splitlines()
    assert (again, second) == (first, "second")
    assert "all workers start again (1 of 1)" in ended.stderr
