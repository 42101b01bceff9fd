"""Machines that are lost: whatever goes where, the others end in the bits of one process, and nothing is left."""

import base64
import inspect
import json
import math
import os
import random
import re
import signal
import socket
import time
from dataclasses import asdict, replace
from functools import partial
from select import select as select_ready

import forked_machines
import psutil
import pytest
from forked_machines import ADDRESSES, listens, machines_in, two_networks, wait_until
from healing_runs import SCRIPT, Told, run_script
from test_loops import SCRIPT as LOOP
from test_loops import alone
from worlds import cpu_only

from samestep.comm import connecting, group
from samestep.comm.environment import read_settings
from samestep.comm.heartbeat import HEALS, HeartbeatPage
from samestep.comm.wire import Wire
from samestep.devices.selection import select
from samestep.launcher import machines as machines_module
from samestep.launcher.follower import Follower
from samestep.launcher.job import Job, Policy, assign
from samestep.launcher.machines import MachinesPool
from samestep.launcher.meeting import Meeting

pytestmark = cpu_only("the machines have CPU workers")

GONE = "has ended or cannot be reached, and the workers of this one are ended; start the run again"
WORKER, KILLED, CLOSED, SILENT = "SIGKILL", "machine SIGKILL", "supervisor SIGKILL", "machine SIGSTOP"
LOST_BY = (WORKER, KILLED, CLOSED, SILENT)
WORKS_ALONE = {"rank": 0, "step": 3, "phase": "backward", "kind": WORKER}
PLACES = {  # name: (phase, step, other faults before)
    "in the first step": ("backward", 0, ()),
    "forward": ("forward", 5, ()),
    "backward": ("backward", 5, ()),
    "exchange": ("exchange", 5, ()),
    "update": ("update", 5, ()),
    "files": ("checkpoint", 5, (WORKS_ALONE,)),  # which the first of the ranks that are left writes
    "evaluation": ("evaluate", 8, ()),
    "between steps": ("between", 5, ()),
    "connecting anew": ("reconnect", 3, (WORKS_ALONE,)),
    "at the end": ("end", 8, ()),
}
OF_LOOPS = {"files": "exchanged", "between steps": "data"}  # a loop of one's own has no such place
WORLDS = ((3, 1), (2, 2), (2, 1), (4, 1))  # machines, and workers of each


@pytest.fixture
def machines(tmp_path):
    with machines_in(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a run of the script with a Trainer in one process leaves behind."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return Told(folder, run_script(SCRIPT, 1, {"folder": str(folder / "run"), "faults": []}))


@pytest.fixture(scope="module")
def loop_alone(tmp_path_factory):
    """The digest and history of the loop of one's own in one process."""
    return alone("plain", tmp_path_factory.mktemp("alone"))


def cases():
    """Each place with each way to be lost; the other dimensions in turn."""
    for row, place in enumerate(PLACES):
        for column, kind in enumerate(LOST_BY):
            number = row + column
            world = WORLDS[number % 4]
            if PLACES[place][2] and world[0] < 3:
                world = (3, 1)
            is_loop = number % 3 == 1 and place not in OF_LOOPS
            if (place, kind) == ("files", SILENT):
                continue  # it holds the lock of the folder, see below
            of_gate = (place, kind) in (("exchange", SILENT), ("backward", KILLED))
            marks = () if of_gate else (pytest.mark.slow,)
            transport = "gloo" if number % 2 or of_gate else "auto"
            words = f"{place}-{kind}-{'loop' if is_loop else 'trainer'}-{world[0]}x{world[1]}-{transport}"
            yield pytest.param(place, kind, is_loop, world, transport, marks=marks, id=words)


@pytest.mark.parametrize(("place", "kind", "is_loop", "world", "transport"), [*cases()])
def test_whatever_is_lost_the_others_end_in_the_bits_of_one_process(
    machines, undisturbed, loop_alone, place, kind, is_loop, world, transport
):
    count, devices = world
    phase, step, before = PLACES[place]
    victim = devices if place == "files" else count * devices - 1
    faults = [*before, {"rank": victim, "step": step, "phase": phase, "kind": kind}]
    script, told = LOOP if is_loop else SCRIPT, {"folder": str(machines.folder / "run"), "faults": faults}
    if is_loop:
        told["kind"] = "plain"
    first, *others = machines.start_all(count, script, told, devices=devices, SAMESTEP_TRANSPORT=transport)
    assert first.wait() == 0, first.stderr
    struck = sorted(json.loads(path.read_text())["phase"] for path in machines.folder.glob("struck-*.json"))
    assert struck == sorted(fault["phase"] for fault in faults)
    lost = others[victim // devices - 1] if kind != WORKER else None
    for other in others:
        if other is not lost:
            assert other.wait() == 0, other.stderr
    check_end_of(lost, kind)
    if is_loop:
        ended = [json.loads(path.read_text()) for path in machines.folder.glob("ended-*.json")]
        assert ended
        assert all((end["digest"], end["history"]) == tuple(loop_alone) for end in ended)
    else:
        left = machines.left_by(first)
        assert left.digests == undisturbed.digests
        assert left.steps == undisturbed.steps
        assert not left.has_read_a_checkpoint


def check_end_of(lost, kind):
    """A machine that was lost has ended, or does so when it goes on; by its own words if it has any left."""
    if kind == SILENT:
        assert lost.processes()
        lost.signal(signal.SIGCONT)
        assert lost.wait() == 1, lost.stderr
        assert GONE in lost.stderr
    elif kind != WORKER:
        assert lost.wait() == -signal.SIGKILL
    if lost is not None:
        assert lost.is_gone()


def several_faults(seed):
    """Faults by chance at up to three of four machines with a worker each; one worker has none."""
    random_ = random.Random(seed)
    slots = random_.sample(range(1, 4), random_.randint(1, 3))
    kinds = {slot: random_.choice(LOST_BY) for slot in slots}
    if len(slots) < 3 and SILENT not in kinds.values() and random_.random() < 0.5:
        kinds[0] = WORKER  # else a silent machine may hold the lock of the folder
    phases = (
        "data",
        "forward",
        "backward",
        "exchange",
        "sent",
        "exchanged",
        "update",
        "evaluate",
        "between",
        "reconnect",
    )
    return [
        {"rank": slot, "step": random_.choice((0, 3, 3, 4, 7)), "phase": random_.choice(phases), "kind": kind}
        for slot, kind in kinds.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_several_machines_may_be_lost_at_once_or_one_after_another(machines, undisturbed, seed):
    told = {"folder": str(machines.folder / "run"), "faults": several_faults(seed)}
    transport = ("gloo", "auto")[seed % 2]
    started = machines.start_all(4, SCRIPT, told, SAMESTEP_TRANSPORT=transport)
    assert started[0].wait() == 0, started[0].stderr
    for machine in started:
        machine.signal(signal.SIGCONT)
    left = machines.left_by(started[0])
    assert (left.digests, left.steps) == (undisturbed.digests, undisturbed.steps)
    assert not left.has_read_a_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KILLED, SILENT])
@pytest.mark.parametrize("phase", ["join", "forward"])
def test_a_machine_that_comes_late_may_be_lost_while_it_joins_and_another_one_joins(machines, undisturbed, phase, kind):
    fault = {"rank": 1, "step": 0, "phase": phase, "kind": kind}
    told = {"folder": str(machines.folder / "run"), "faults": [fault], "pause": 0.05, "wait_for": 2}
    if phase == "join":
        machines.twin = lambda: wrapped(connecting, "reconnect", struck_once)
        told["faults"], struck_once.kind = [], kind
    soon = {"nnodes": "1:3", "conf": {"last_call_timeout": "0"}, "SAMESTEP_TRANSPORT": "gloo"}
    first = machines.start(SCRIPT, told, **soon)
    wait_until(lambda: (machines.folder / "pid-0").exists(), "it trains")
    late = machines.start(SCRIPT, told, **soon)
    wait_until(lambda: "was lost" in first.stderr, "the second machine is lost")
    third = machines.start(SCRIPT, told, **soon)
    assert (first.wait(), third.wait()) == (0, 0), first.stderr
    assert "a replacement joined" in first.stderr
    check_end_of(late, kind)
    left = machines.left_by(first)
    assert (left.digests, left.steps) == (undisturbed.digests, undisturbed.steps)


def struck_once(real, *args):
    """Loses the machine of slot 1 when it connects."""
    if read_settings().slot == 1:
        forked_machines.faulty_training.strike_machine(signal.Signals[struck_once.kind.split()[1]], alone=False)
    return real(*args)


SAYS = """
import os, sys, time
sys.stdout.write(os.environ["RANK"] * int(sys.argv[1]))
sys.stdout.flush()
time.sleep(float(sys.argv[2]))
"""
"""Prints its rank so many times, and sleeps."""
COLLECTIVE = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
open(f"{os.environ['PLACE']}-{os.environ['RANK']}", "w").close()
dist.all_reduce(torch.ones(1)) if os.environ["RANK"] == "0" else time.sleep(100)
"""
"""Ranks of torch.distributed, which know nothing of samestep; the first waits for the others."""


@pytest.fixture
def says(machines):
    path = machines.folder / "says.py"
    path.write_text(SAYS)
    return path


def visit(machines, text):
    """A connection of a stranger, which has sent some bytes."""
    wait_until(lambda: listens(machines.port), "the first machine listens")
    stranger = socket.create_connection(("localhost", machines.port))
    stranger.sendall(text)
    return stranger


def all_of(stranger):
    """All that a stranger is sent, until the connection is closed."""
    stranger.settimeout(30)
    found = b""
    try:
        while data := stranger.recv(65_536):
            found += data
    except ConnectionResetError:
        pass
    return found.decode()


HELLO = b'{"hello": "x", "number": null, "labels": ["cpu"], "alike": {"--rdzv-id": "another"}}\n'
STRANGERS = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "not a hello, and a request to stop": b'{"a": 1}\n{"stop": 15}\n',
    "turned away, and a request to stop": HELLO + b'{"stop": 15}\n',
    "no mappings": b'[1]\n{"number": [], "alike": {}, "labels": 7, "hello": 3}\n',
    "not UTF-8": b"\xff\xfe\n{\n",
}


def test_strangers_at_the_place_to_meet_change_nothing(machines, says):
    first = machines.start(says, ("3", "0"), "2")
    silent = visit(machines, b"")
    answers = {name: visit(machines, text) for name, text in STRANGERS.items()}
    assert "these differ: " in all_of(answers["turned away, and a request to stop"])
    endless = visit(machines, b"")
    endless.settimeout(30)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):  # a line without an end is not kept
        endless.sendall(b"x" * (64 << 20))
    assert first.code is None
    second = machines.start(says, ("3", "0"), "2")
    assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    assert first.stdout == "000"
    for stranger in (silent, endless, *answers.values()):
        stranger.close()


def test_a_stranger_that_never_says_who_it_is_is_sent_away(machines, says):
    machines.twin = lambda: setattr(machines_module, "HELLO_SECONDS", 0.5)
    first = machines.start(says, ("1", "0"), "2")
    stranger = visit(machines, b"")
    for _ in range(200):  # speaking all the time
        try:
            stranger.sendall(b"x\n")
        except OSError:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("it is listened to for ever")
    stranger.close()
    first.signal(signal.SIGTERM, [first.pid])
    assert first.wait() == 143


def test_what_the_other_end_said_last_is_read_although_it_takes_nothing_any_more():
    with socket.create_server(("localhost", 0)) as door:
        near = Wire(socket.create_connection(door.getsockname()))
        far, _ = door.accept()
    near.send(said="never read")
    far.sendall(b'{"end": 0}\n')
    wait_until(lambda: len(near._connection.recv(64, socket.MSG_PEEK)) == 11, "it is there", 10)
    far.close()  # with something unread: a reset follows
    for _ in range(20):
        near.send(beats=[])
        time.sleep(0.01)
    assert near.receive() == [{"end": 0}]
    near.receive()
    assert not near.is_open
    near.close()


@pytest.mark.parametrize("other", ["options", "a name", "devices of another kind of command"])
def test_a_machine_of_another_run_is_turned_away_in_a_sentence_and_the_right_one_taken(machines, says, other):
    first = machines.start(says, ("2", "0"), "2")
    wait_until(lambda: listens(machines.port), "the first machine listens")
    differs = {
        "options": {"policy": Policy(hang_seconds=7)},
        "a name": {"name": "x"},
        "devices of another kind of command": {"nnodes": "2", "number": 1},
    }
    told = dict(differs[other])
    wrong = machines.start(says, ("2", "0"), told.pop("nnodes", "2"), **told)
    assert wrong.wait() == 2
    named = {"options": "the handling of failed workers", "a name": "--rdzv-id"}.get(other, "--node-rank (all or none)")
    assert f"has turned this machine away: give all machines the same command and packages; these differ: {named}" in (
        wrong.stderr
    )
    second = machines.start(says, ("2", "0"), "2")
    assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr


@pytest.mark.slow
def test_two_machines_with_one_number_are_not_both_taken(machines, says):
    first, second = machines.start_all(2, says, ("2", "3"), "3", conf={"join_timeout": "4"})
    wait_until(lambda: first.stderr, "it waits")
    time.sleep(1)  # until the second is there
    again = machines.start(says, ("2", "3"), "3", number=1, conf={"join_timeout": "1"})
    assert again.wait() == 2, again.stderr
    assert "there is a machine with --node-rank 1 already" in again.stderr
    for machine in (first, second):
        assert machine.wait() == 2, machine.stderr
        assert "not all of 3 machines came to localhost" in machine.stderr


def test_a_signal_to_the_first_machine_while_it_waits_ends_the_others_with_its_code(machines, says):
    first, second = machines.start_all(2, says, ("1", "0"), "3")
    wait_until(lambda: len(connections(machines.port)) >= 1, "the second is there")
    time.sleep(0.5)  # until it is welcome
    first.signal(signal.SIGTERM, [first.pid])
    assert (first.wait(), second.wait()) == (143, 143), second.stderr
    assert "samestep: error" not in second.stderr


def connections(port):
    """The established connections to a port of this machine, as they are at its end."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")][1:]  # noqa: SIM115
    return [row for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"]


def test_a_signal_to_a_machine_that_waits_for_others_ends_it_alone(machines, says):
    first, second = machines.start_all(2, says, ("1", "0"), "3")
    wait_until(lambda: len(connections(machines.port)) >= 1, "the second is there")
    time.sleep(0.5)
    second.signal(signal.SIGINT, [second.pid])
    assert second.wait() == 130
    others = [machines.start(says, ("1", "0"), "3", number=number) for number in (1, 2)]
    assert [machine.wait() for machine in (first, *others)] == [0, 0, 0], first.stderr


def test_a_signal_to_a_machine_that_works_stops_all_after_their_step(machines, undisturbed):
    told = {"folder": str(machines.folder / "run"), "faults": [], "pause": 0.05, "epochs": 40, "resume": "auto"}
    first, second = machines.start_all(2, SCRIPT, told)
    wait_until(lambda: len(list(machines.folder.glob("pid-*"))) == 2, "both train")
    second.signal(signal.SIGTERM, [second.pid])
    assert (first.wait(), second.wait()) == (143, 143), first.stderr + second.stderr
    assert "stopping after this step" in first.stderr
    assert "samestep: error" not in second.stderr
    again = machines.start(SCRIPT, {**told, "pause": 0, "epochs": 3}, "1:1", number=0)
    assert again.wait() == 0, again.stderr
    assert machines.left_by(again).digests <= undisturbed.digests


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(machines, says):
    says.write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SAYS)
    first, second = machines.start_all(2, says, ("1", "100"))
    wait_until(lambda: first.stdout == "0", "it runs")
    for _ in range(2):
        second.signal(signal.SIGTERM, [second.pid])
        time.sleep(0.7)
    assert (first.wait(20), second.wait(20)) == (143, 143), first.stderr
    assert "ending at once" in first.stderr


@pytest.mark.parametrize("megabytes", [8])
def test_all_that_ranks_of_another_machine_print_arrives(machines, says, megabytes):
    size, logs = megabytes << 20, machines.folder / "logs"
    first, second = machines.start_all(2, says, (str(size), "0"), devices=2, log_dir=str(logs))
    assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    assert {path.name: path.stat().st_size for path in logs.iterdir()} == {f"rank-{n}.log": size for n in (1, 2, 3)}
    assert (logs / "rank-3.log").read_text() == "3" * size


class Leader:
    """This test as the first machine, which the supervisor of another one obeys."""

    def __init__(self, machines, script, told, devices=1):
        self._job, self.messages = Job("script", str(script)), []
        with socket.create_server(("localhost", machines.port)) as door:
            patient = {"keep_alive_interval": "20"}
            self.machine = machines.start(script, told, "2", number=1, devices=devices, conf=patient)
            self.wire = Wire(door.accept()[0])
        self.wire.send(welcome=1, name="the test")

    def start(self, attempt, *slots):
        """Starts workers of an attempt."""
        page = {"number": 0, "slots": [0, *slots], "lost": [], "stop": 0, "shown": 0}
        self.wire.send(page=page, attempt=attempt)
        [place] = assign(self._job, select("cpu:1"), "run", attempt)
        for index, slot in enumerate(slots):
            own = replace(place, rank=slot, slot=slot, machine=1, device_index=index, store=("localhost", 1))
            self.wire.send(start=asdict(own), pipes=["events", "dump", "stdout", "stderr"])

    def read_until(self, holds):
        """Reads what the machine sends, with a word of this one now and then, until a message is as wanted."""
        deadline = time.monotonic() + 60
        while not any(map(holds, self.messages)):
            assert time.monotonic() < deadline, self.machine.stderr
            assert self.wire.is_open, self.machine.stderr
            self.wire.keep_alive(0.5)
            self.messages += self.wire.receive()
            time.sleep(0.01)

    def printed(self, slot):
        """What a worker had printed when its end was told."""
        found = b""
        for message in self.messages:
            if message.get("exited") == slot:
                return found
            if (message.get("pipe"), message.get("slot")) == ("stdout", slot) and message["data"]:
                found += base64.b64decode(message["data"])
        raise AssertionError(f"it has not ended: {self.messages}")

    def end(self):
        self.wire.send(end=0)
        assert self.machine.wait() == 0, self.machine.stderr
        self.wire.close()


def test_the_end_of_a_worker_is_told_after_all_that_it_printed_however_much_waits(machines, says):
    says.write_text(
        SAYS.replace("os.environ", "time.sleep(0.5 * (os.environ['RANK'] == '2')) or os.environ").replace(
            "int(sys.argv[1])", "int(sys.argv[1].split()[int(os.environ['RANK']) - 1])"
        )
    )
    leader = Leader(machines, says, (f"{16 << 20} 1000", "0"), devices=2)
    leader.start(0, 1, 2)
    time.sleep(2.5)  # in which nothing is read, and the second has ended
    leader.read_until(lambda message: message.get("exited") == 1)
    assert leader.printed(2) == b"2" * 1000
    assert leader.printed(1) == b"1" * (16 << 20)
    leader.end()


def test_workers_that_are_started_when_others_were_killed_run(machines, says):
    leader = Leader(machines, says, ("5", "1"))
    leader.start(0, 1)
    leader.read_until(lambda message: message.get("pipe") == "stdout")
    leader.wire.send = partial(hold, leader.wire, leader.wire.send)
    leader.wire.send(kill=True)
    leader.start(1, 1)
    leader.wire.flush()
    leader.read_until(lambda message: message.get("exited") == 1 and message["attempt"] == 1)
    assert [message["code"] for message in leader.messages if message.get("exited") == 1][-1] == 0
    leader.end()


def hold(wire, send, **message):
    """Keeps a message, so that it goes with the next ones."""
    if "pipes" in message:
        del wire.send
        wire.send(**message)
    else:
        wire._unsent += json.dumps(message).encode() + b"\n"


PRINTS = """
import os, signal
import torch
import samestep
run = samestep.Run(global_batch_size=8)
model = torch.nn.Linear(2, 1)
step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch[0]).mean())
for batch in run.loader((torch.ones(32, 2),)):
    if run.membership.heartbeat.slot == 0 and step.num_steps == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(batch)
for _ in range(50):
    print("x" * 4000)
"""
"""The worker of the first machine is lost, and that of another one prints more than a pipe holds."""


@pytest.mark.slow
def test_a_pause_of_whoever_reads_the_output_loses_no_machine(machines):
    script = machines.folder / "prints.py"
    script.write_text(PRINTS)
    first = machines.start(script, (), number=0, unread=True)
    second = machines.start(script, (), number=1)
    wait_until(lambda: select_ready([machines.unread], [], [], 0)[0], "something is printed")
    time.sleep(5)
    os.set_blocking(machines.unread, True)
    with open(machines.unread) as file:
        printed = file.read()
    assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    assert printed == ("x" * 4000 + "\n") * 50


@pytest.mark.slow
def test_a_run_whose_starter_was_killed_starts_again_on_all_machines(machines, undisturbed):
    told = {"folder": str(machines.folder / "run"), "faults": [], "resume": "auto", "pause": 0.05}
    first, second = machines.start_all(2, SCRIPT, told, policy=Policy(hang_seconds=20.0, max_restarts=1))
    wait_until(lambda: (machines.folder / "run" / "checkpoints" / "latest").exists(), "there is a checkpoint")
    starter = next(p for p in psutil.Process(first.pid).children() if p.name() != "sh")
    starter.kill()
    assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    assert "all workers start again (1 of 1)" in first.stderr
    assert "was lost" not in first.stderr
    assert machines.left_by(first).digests == undisturbed.digests


def test_with_too_few_machines_left_the_run_starts_again_when_another_has_come(machines, undisturbed):
    fault = {"rank": 2, "step": 7, "phase": "backward", "kind": KILLED, "once": True}
    told = {"folder": str(machines.folder / "run"), "faults": [fault], "resume": "auto"}
    policy = Policy(hang_seconds=20.0, max_restarts=2)
    first, second, third = machines.start_all(3, SCRIPT, told, "3", policy=policy)
    assert third.wait() == -signal.SIGKILL
    wait_until(lambda: "all workers start again" in first.stderr, "the others wait for another")
    assert "--nnodes asks for 3 machines" in first.stderr
    another = machines.start(SCRIPT, told, "3", number=2, policy=policy)
    assert [machine.wait() for machine in (first, second, another)] == [0, 0, 0], first.stderr
    left = machines.left_by(first)
    assert left.has_read_a_checkpoint
    assert left.digests == undisturbed.digests


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Policy(min_devices=2), "1 device is left, and --min-devices asks for 2"),
        (Policy(heal=False), "rank 1 on CPU worker 0 of {0} was lost: {0} has closed its connection"),
    ],
    ids=["--min-devices", "--no-heal"],
)
def test_a_run_that_may_not_go_on_without_a_machine_ends_everywhere(machines, policy, said):
    fault = {"rank": 2, "step": 3, "phase": "backward", "kind": KILLED}
    count = 2 + policy.min_devices
    faults = [{**fault, "rank": rank} for rank in range(1, count - 1)]
    told = {"folder": str(machines.folder / "run"), "faults": faults}
    first, *others = machines.start_all(count - 1, SCRIPT, told, policy=policy)
    assert first.wait() == 1
    assert said.format(socket.gethostname()) in first.stderr
    assert [other.wait() for other in others] == [-signal.SIGKILL] * len(faults)


def test_a_lost_machine_ends_a_script_of_torch_distributed_everywhere(machines):
    script = machines.folder / "collective.py"
    script.write_text(COLLECTIVE)
    started = machines.start_all(3, script, (), PLACE=str(machines.folder / "met"))
    wait_until(lambda: len(list(machines.folder.glob("met-*"))) == 3, "all have met")
    started[2].signal(signal.SIGKILL)
    assert [machine.wait() for machine in started] == [1, 1, -signal.SIGKILL], started[0].stderr
    assert re.search("error: rank 2 on .* was lost: .* has closed its connection", started[0].stderr)
    assert "the run has ended with exit code 1: see the output of" in started[1].stderr


@pytest.mark.slow
def test_what_workers_of_an_earlier_attempt_sent_late_changes_nothing(machines, says):
    """The other machine is this test, which speaks the language of machines."""
    policy = Policy(hang_seconds=1.0, max_restarts=1)
    first = machines.start(says, ("1", "6"), "2", number=0, policy=policy)
    wait_until(lambda: listens(machines.port), "the first machine listens")
    wire = Wire(socket.create_connection(("localhost", machines.port)))
    job = Job("script", str(says), policy=replace(policy, min_machines=2))
    wire.send(**machines_module._described(job, select("cpu:1"), machines.meeting("2", 1, "", {})))
    attempt, lines, ends_at, deadline = 0, [], math.inf, time.monotonic() + 60
    page = HeartbeatPage.create(2)
    page.post(1, "forward", 7, HEALS, 0)  # and nothing more: who posts this hangs
    beat = base64.b64encode(page.read_slot(1)).decode()
    page.close()
    while wire.is_open and time.monotonic() < deadline:
        for message in wire.receive():
            lines.append(message)
            if "start" in message:
                attempt = message["start"]["attempt"]
                wire.send(exited=1, code=9, attempt=0)  # once in time, once late
                wire.send(broken="late", attempt=0)
                wire.send(beats=[[1, beat]], attempt=0)
                wire.send(pipe="stdout", slot=1, data=beat, attempt=0)
            elif attempt == 1 and "page" not in message:
                assert "signal" not in message, "it is taken for hung"
        if attempt == 1 and first.stdout == "00":
            ends_at = min(ends_at, time.monotonic() + 4)
        if time.monotonic() > ends_at:
            attempt, ends_at = 2, math.inf
            wire.send(exited=1, code=0, attempt=1)
        wire.keep_alive(0.5)
        time.sleep(0.02)
    assert first.wait() == 0, first.stderr
    assert lines[-1]["end"] == 0
    wire.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KILLED, CLOSED, SILENT])
def test_without_the_machine_where_all_meet_the_others_end_and_the_run_is_started_again(machines, undisturbed, kind):
    fault = {"rank": 0, "step": 7, "phase": "backward", "kind": kind, "once": True}
    told = {"folder": str(machines.folder / "run"), "faults": [fault], "resume": "auto"}
    first, *others = machines.start_all(3, SCRIPT, told, SAMESTEP_TRANSPORT="gloo")
    for other in others:
        assert other.wait() == 1, other.stderr
        assert GONE in other.stderr
        assert other.is_gone()
    if kind == SILENT:  # it goes on alone
        first.signal(signal.SIGCONT)
        assert first.wait() == 0, first.stderr
    else:
        assert first.wait() == -signal.SIGKILL
        again = machines.start_all(2, SCRIPT, told)
        assert [machine.wait() for machine in again] == [0, 0], again[0].stderr
    assert machines.left_by(first).digests == undisturbed.digests


@pytest.fixture
def networks():
    with two_networks(pytest.skip) as made:
        yield made


def start_in(networks, machines, told, *, number, end=None, **options):
    """A machine at an end of the cable between two networks: that of its number if it is not told."""
    machines.host, end = ADDRESSES[0], number if end is None else end
    gloo = {"GLOO_SOCKET_IFNAME": networks.devices[end], "SAMESTEP_TRANSPORT": "gloo"}
    return machines.start(SCRIPT, told, number=number, network=networks.files[end], **options, **gloo)


def train_in(networks, machines, **more):
    """Two machines in two networks that train."""
    told = {"folder": str(machines.folder / "run"), "faults": [], "pause": 0.05, **more}
    started = [start_in(networks, machines, told, number=number) for number in (0, 1)]
    wait_until(lambda: len(list(machines.folder.glob("pid-*"))) == 2, "both train")
    return started


CUTS = {"both ways": (0, 1), "to the first machine": (1,), "from the first machine": (0,)}


@pytest.mark.slow
@pytest.mark.parametrize("ways", CUTS)
def test_of_two_halves_without_a_network_between_them_the_first_machine_s_goes_on(
    machines, undisturbed, networks, ways, capsys
):
    first, second = train_in(networks, machines)
    networks.cut(*CUTS[ways])
    at = time.monotonic()
    assert second.wait() == 1
    took = time.monotonic() - at
    assert GONE in second.stderr
    assert second.is_gone()
    assert first.wait() == 0, first.stderr
    with capsys.disabled():
        print(f"\n{ways}: the half that was cut off ended after {took:.1f} s")
    assert "was lost" in first.stderr
    left = machines.left_by(first)
    assert (left.digests, left.steps) == (undisturbed.digests, undisturbed.steps)
    assert len(left.ended) == 1


@pytest.mark.slow
def test_a_machine_that_was_taken_for_lost_ends_when_the_network_is_there_again_and_may_come_as_a_new_one(
    machines, undisturbed, networks
):
    told = {"folder": str(machines.folder / "run"), "faults": [], "pause": 0.1}
    first = start_in(networks, machines, told, number=0)
    patient = start_in(networks, machines, told, number=1, conf={"keep_alive_interval": "100"})
    wait_until(lambda: len(list(machines.folder.glob("pid-*"))) == 2, "both train")
    networks.cut(0, 1)
    wait_until(lambda: "was silent for 3 s" in first.stderr, "the first machine goes on")
    assert patient.processes()
    networks.mend()
    assert patient.wait() == 1
    assert GONE in patient.stderr
    assert patient.is_gone()
    again = start_in(networks, machines, told, number=1)
    assert (first.wait(), again.wait()) == (0, 0), first.stderr + again.stderr
    assert "a replacement joined" in first.stderr
    left = machines.left_by(first)
    assert (left.digests, left.steps) == (undisturbed.digests, undisturbed.steps)


@pytest.mark.slow
def test_the_files_of_a_run_are_written_on_by_another_machine_when_the_one_that_wrote_them_is_cut_off(
    machines, undisturbed, networks
):
    told = {"folder": str(machines.folder / "run"), "faults": [WORKS_ALONE], "pause": 0.05}
    ends = (0, 1, 0)  # of the cable, at which the machines are
    first, second, third = (
        start_in(networks, machines, told, number=number, end=end, nnodes="1:3") for number, end in enumerate(ends)
    )
    wait_until(lambda: "went on after" in first.stderr, "the second machine has rank 0")
    networks.cut(0, 1)
    assert second.wait() == 1
    assert GONE in second.stderr
    assert (first.wait(), third.wait()) == (0, 0), first.stderr
    assert first.stderr.count("went on after") == 2
    left = machines.left_by(first)
    assert (left.digests, left.steps) == (undisturbed.digests, undisturbed.steps)


@pytest.mark.slow
def test_a_machine_that_is_frozen_while_it_writes_to_the_folder_of_all_ends_the_run_in_a_sentence(machines):
    fault = {"rank": 1, "step": 5, "phase": "checkpoint", "kind": SILENT}
    told = {"folder": str(machines.folder / "run"), "faults": [WORKS_ALONE, fault]}
    first, second, third = machines.start_all(3, SCRIPT, told)
    assert (first.wait(), third.wait()) == (2, 2)
    assert f"has been writing to {machines.folder / 'run'} since" in first.stderr  # it has the lock, and may wake up
    check_end_of(second, SILENT)


@pytest.mark.slow
def test_a_machine_behind_a_slow_network_is_not_lost(machines, undisturbed, networks):
    if not networks.slow_down("400kbit"):
        pytest.skip("the kernel slows no network down")
    first, second = train_in(networks, machines)
    assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    assert "lost" not in first.stderr
    assert machines.left_by(first).digests == undisturbed.digests


def wrapped(owner, name, around):
    """Replaces a function by `around(the function, its arguments)`."""
    real = getattr(owner, name)
    setattr(owner, name, lambda *args: around(real, *args))


def never_lost_leader(real, *args):
    """A machine that another one leads waits for its words without end."""
    Meeting.silence_seconds = property(lambda meeting: 1e9)
    return real(*args)


def unread_is_kept(real, pool, machine, text):
    unread = [*machine.unread]
    real(pool, machine, text)
    machine.unread.extend(unread)


def heard_again(real, pool, machine, message):
    """What is said of another attempt counts."""
    real(pool, machine, {**message, "attempt": pool._attempt})


silent_in_an_exchange = partial(
    test_whatever_is_lost_the_others_end_in_the_bits_of_one_process,
    place="exchange",
    kind=SILENT,
    is_loop=False,
    world=(2, 1),
    transport="gloo",
)
leader_is_silent = partial(
    test_without_the_machine_where_all_meet_the_others_end_and_the_run_is_started_again, kind=SILENT
)
TWINS = {
    "gloo's waits without looks": (
        lambda: setattr(group, "_has_arrived", lambda work: work.wait()),
        silent_in_an_exchange,
    ),
    "the sockets of a lost machine stay open": (
        lambda: setattr(group, "_shut", lambda inodes: None),
        silent_in_an_exchange,
    ),
    "a machine that does not end when the leader is silent": (
        lambda: wrapped(Follower, "run", never_lost_leader),
        leader_is_silent,
    ),
    "workers start before their page is there": (
        lambda: wrapped(
            MachinesPool, "_send_page", lambda real, pool, machine: machine.posted is not None and real(pool, machine)
        ),
        silent_in_an_exchange,
    ),
    "changes of the page are not sent": (
        lambda: setattr(MachinesPool, "post", lambda pool, page: None),
        partial(silent_in_an_exchange, world=(3, 1)),
    ),
    "messages of another attempt count": (
        lambda: wrapped(MachinesPool, "_handle", heard_again),
        test_what_workers_of_an_earlier_attempt_sent_late_changes_nothing,
    ),
    "two machines with one number": (
        lambda: wrapped(
            MachinesPool,
            "_greet",
            lambda real, pool, machine, message: real(pool, machine, {**message, "number": None}),
        ),
        test_two_machines_with_one_number_are_not_both_taken,
    ),
    "what strangers say after they were sent away": (
        lambda: wrapped(MachinesPool, "_lose", unread_is_kept),
        test_strangers_at_the_place_to_meet_change_nothing,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("defect", TWINS)
def test_twin_with_a_defect_the_test_of_it_fails(machines, request, defect):
    put_in, test = TWINS[defect]
    machines.twin, machines.patience = put_in, 15.0
    given = {name: request.getfixturevalue(name) for name in inspect.signature(test).parameters if name in FIXTURES}
    try:
        with pytest.raises((AssertionError, OSError, IndexError, KeyError)):
            test(**given)
    finally:
        for machine in machines.started:
            machine.signal(signal.SIGKILL)


FIXTURES = ("machines", "undisturbed", "loop_alone", "says")
