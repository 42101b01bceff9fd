"""Machines that are lost: whatever goes where, the others end in the bits of one process, and nothing is left."""

import base64
import inspect
import json
import os
import re
import resource
import signal
import socket
import time
from dataclasses import asdict, replace
from functools import partial
from select import select as select_ready

import psutil
import pytest
from forked_machines import ADDRESSES, listens, machines_in, two_networks, wait_until
from healing_runs import SCRIPT, Told, run_script
from test_loops import SCRIPT as LOOP
from test_loops import alone
from worlds import cpu_only

from samestep.comm import group
from samestep.comm.wire import Wire
from samestep.devices.selection import select
from samestep.launcher import machines as machines_module
from samestep.launcher.job import Job, Policy, assign
from samestep.launcher.machines import Machine, MachinesPool

pytestmark = cpu_only("the machines have CPU workers")

GONE = "has ended or cannot be reached, and the workers of this one are ended; start the run again"
WORKER, KILLED, CLOSED, SILENT = "SIGKILL", "machine SIGKILL", "supervisor SIGKILL", "machine SIGSTOP"
WORKS_ALONE = {"rank": 0, "step": 3, "phase": "backward", "kind": WORKER}
# The place and the kind of the fault, whether the loop is of one's own, machines, workers of each, and the transport.
# At any instant, and several at once, in tests/simulation.
CASES = [
    ("exchange", SILENT, False, (2, 1), "gloo"),
    ("backward", KILLED, False, (2, 2), "gloo"),
    pytest.param("update", CLOSED, True, (4, 1), "auto", marks=pytest.mark.slow),
    pytest.param("checkpoint", WORKER, False, (3, 1), "auto", marks=pytest.mark.slow),
]


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


@pytest.mark.parametrize(("phase", "kind", "is_loop", "world", "transport"), CASES)
def test_whatever_is_lost_the_others_end_in_the_bits_of_one_process(
    machines, undisturbed, loop_alone, phase, kind, is_loop, world, transport
):
    count, devices = world
    is_written = phase == "checkpoint"  # by the first of the ranks that are left
    victim = devices if is_written else count * devices - 1
    faults = [*[WORKS_ALONE] * is_written, {"rank": victim, "step": 5, "phase": phase, "kind": kind}]
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


@pytest.mark.slow
def test_a_machine_that_comes_late_may_be_lost_and_another_one_joins(machines, undisturbed):
    fault = {"rank": 1, "step": 0, "phase": "forward", "kind": KILLED}
    told = {"folder": str(machines.folder / "run"), "faults": [fault], "pause": 0.05, "wait_for": 2}
    soon = {"nnodes": "1:3", "conf": {"last_call_timeout": "0"}, "SAMESTEP_TRANSPORT": "gloo"}
    first = machines.start(SCRIPT, told, **soon)
    wait_until(lambda: (machines.folder / "pid-0").exists(), "it trains")
    late = machines.start(SCRIPT, told, **soon)
    wait_until(lambda: "was lost" in first.stderr, "the second machine is lost")
    third = machines.start(SCRIPT, told, **soon)
    assert (first.wait(), third.wait()) == (0, 0), first.stderr
    assert "a replacement joined" in first.stderr
    check_end_of(late, KILLED)
    left = machines.left_by(first)
    assert (left.digests, left.steps) == (undisturbed.digests, undisturbed.steps)


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
    "JSON deeper than Python reads": b"[" * 100_000 + b"\n",
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


def test_what_is_said_of_workers_of_an_earlier_attempt_changes_nothing(machines):
    meeting, job = machines.meeting("2", 0, "", {}), Job("script", __file__)
    ours, theirs = socket.socketpair()
    with theirs, MachinesPool(job, select("cpu:1"), meeting, meeting.open_door(), list) as pool:
        machine = Machine(Wire(ours), running={1})
        pool.machines.append(machine)
        pool._attempt = 1
        for said in ({"exited": 1, "code": 9}, {"broken": "late"}):
            pool._handle(machine, {**said, "attempt": 0})
        assert (pool._events, machine.running) == ([], {1})
        pool._handle(machine, {"exited": 1, "code": 9, "attempt": 1})
        assert ([event.slot for event in pool._events], machine.running) == ([1], set())


@pytest.mark.parametrize("other", ["options", "a name", "arguments", "devices of another kind of command"])
def test_a_machine_of_another_run_is_turned_away_in_a_sentence_and_the_right_one_taken(machines, says, other):
    first = machines.start(says, ("2", "0"), "2")
    wait_until(lambda: listens(machines.port), "the first machine listens")
    differs = {
        "options": {"policy": Policy(hang_seconds=7)},
        "a name": {"name": "x"},
        "arguments": {},
        "devices of another kind of command": {"nnodes": "2", "number": 1},
    }
    told = dict(differs[other])
    words = ("2", "1" if other == "arguments" else "0")
    wrong = machines.start(says, words, told.pop("nnodes", "2"), **told)
    assert wrong.wait() == 2
    named = {
        "options": "the handling of failed workers",
        "a name": "--rdzv-id",
        "arguments": "the program and its arguments",
    }.get(other, "--node-rank (all or none)")
    assert f"has turned this machine away: give all machines the same command and packages; these differ: {named}" in (
        wrong.stderr
    )
    second = machines.start(says, ("2", "0"), "2")
    assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr


def test_a_machine_with_more_workers_than_the_first_has_files_for_is_turned_away(machines, says):
    machines.twin = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (120, 120))
    first = machines.start(says, ("1", "0"), "2")
    machines.twin = None
    wait_until(lambda: listens(machines.port), "the first machine listens")
    wide = machines.start(says, ("1", "0"), "2", devices=16, conf={"join_timeout": "1"})
    assert wide.wait() == 2
    assert "17 workers need 172 open files, and 120 are allowed" in wide.stderr
    second = machines.start(says, ("1", "0"), "2")
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


@pytest.mark.parametrize("asked", [[1], [0, 1], [1, 0]])
def test_a_signal_to_a_machine_that_works_stops_all_after_their_step(machines, undisturbed, asked):
    told = {"folder": str(machines.folder / "run"), "faults": [], "pause": 0.05, "epochs": 40, "resume": "auto"}
    first, second = machines.start_all(2, SCRIPT, told)
    wait_until(lambda: len(list(machines.folder.glob("pid-*"))) == 2, "both train")
    for number in asked:
        machines.started[number].signal(signal.SIGTERM, [machines.started[number].pid])
        time.sleep(0.02)
    assert (first.wait(), second.wait()) == (143, 143), first.stderr + second.stderr
    assert "stopping after this step" in first.stderr
    assert "ending at once" not in first.stderr
    assert "samestep: error" not in second.stderr
    again = machines.start(SCRIPT, {**told, "pause": 0, "epochs": 3}, "1:1", number=0)
    assert again.wait() == 0, again.stderr
    assert machines.left_by(again).digests <= undisturbed.digests


@pytest.mark.slow
def test_a_request_to_stop_while_a_machine_joins_waits_for_the_step(machines):
    told = {"folder": str(machines.folder / "run"), "faults": [], "pause": 0.7, "epochs": 8, "checkpoint_steps": 1000}
    first = machines.start(SCRIPT, told, conf={"last_call_timeout": "0"})
    wait_until(lambda: list(machines.folder.glob("pid-*")), "it trains")
    machines.start(SCRIPT, told)
    time.sleep(2.5)  # until it is in a quorum, and the others have not taken that up yet
    first.signal(signal.SIGTERM, [first.pid])
    assert [machine.wait() for machine in machines.started] == [143, 143], first.stderr
    assert "stopping after this step" in first.stderr
    assert list((machines.folder / "run" / "checkpoints").iterdir())


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

    def starter(self):
        """The process that starts the workers of the machine."""
        return wait_until(
            lambda: next((p for p in psutil.Process(self.machine.pid).children() if p.name() != "sh"), None),
            "it starts",
        )

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


def test_workers_run_on_a_machine_whose_starter_was_killed_before(machines, says):
    leader = Leader(machines, says, ("5", "0"))
    starter = leader.starter()
    starter.kill()
    wait_until(lambda: not psutil.pid_exists(starter.pid), "it has ended")
    leader.start(0, 1)
    leader.read_until(lambda message: message.get("exited") == 1)
    assert [message["code"] for message in leader.messages if "exited" in message] == [0]
    leader.end()


def test_a_machine_says_that_its_starter_is_stopped(machines, says):
    leader = Leader(machines, says, ("5", "0"))
    starter = leader.starter()
    leader.wire.send(groups=True)
    leader.read_until(lambda message: message.get("groups", {}).get("-1", [True])[0] is False)
    starter.suspend()
    wait_until(lambda: starter.status() == psutil.STATUS_STOPPED, "it is stopped")
    leader.wire.send(groups=True)
    leader.read_until(lambda message: message.get("groups", {}).get("-1", [False])[0])
    leader.end()


@pytest.mark.slow
def test_a_machine_whose_starter_is_stopped_is_lost_alone(machines, undisturbed):
    told = {"folder": str(machines.folder / "run"), "faults": [], "pause": 0.05}
    first, second = machines.start_all(2, SCRIPT, told, policy=Policy(hang_seconds=4.0, grace_seconds=2.0))
    wait_until(lambda: len(list(machines.folder.glob("pid-*"))) == 2, "both train")
    next(p for p in psutil.Process(second.pid).children() if p.name() != "sh").suspend()
    assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    assert "was stopped by a signal" in first.stderr
    assert machines.left_by(first).digests == undisturbed.digests


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


@pytest.mark.parametrize(
    ("nnodes", "least", "said"),
    [
        ("3", 1, "--nnodes asks for 3 machines"),
        pytest.param("1:4", 3, "--min-devices asks for 3", marks=pytest.mark.slow),
    ],
)
def test_with_too_few_machines_left_the_run_starts_again_when_another_has_come(
    machines, undisturbed, nnodes, least, said
):
    fault = {"rank": 2, "step": 7, "phase": "backward", "kind": KILLED, "once": True}
    told = {"folder": str(machines.folder / "run"), "faults": [fault], "resume": "auto"}
    policy, conf = Policy(hang_seconds=20.0, max_restarts=2, min_devices=least), {"last_call_timeout": "0"}
    first, second, third = machines.start_all(3, SCRIPT, told, nnodes, policy=policy, conf=conf)
    assert third.wait() == -signal.SIGKILL
    wait_until(lambda: "all workers start again" in first.stderr, "the others wait for another")
    assert said in first.stderr
    another = machines.start(SCRIPT, told, nnodes, number=2, policy=policy, conf=conf)
    assert [machine.wait() for machine in (first, second, another)] == [0, 0, 0], first.stderr
    left = machines.left_by(first)
    assert left.has_read_a_checkpoint
    assert left.digests == undisturbed.digests


@pytest.mark.parametrize(
    ("policy", "nnodes", "said"),
    [
        (Policy(min_devices=2), None, "1 device is left, and --min-devices asks for 2"),
        (Policy(heal=False), None, "rank 1 on CPU worker 0 of {0} was lost: {0} has closed its connection"),
        (Policy(max_restarts=1), "2", "not all of 2 machines came to localhost"),
    ],
    ids=["--min-devices", "--no-heal", "--nnodes"],
)
def test_a_run_that_may_not_go_on_without_a_machine_ends_everywhere(machines, policy, nnodes, said):
    count = 1 + policy.min_devices
    faults = [{"rank": rank, "step": 3, "phase": "backward", "kind": KILLED} for rank in range(1, count)]
    told = {"folder": str(machines.folder / "run"), "faults": faults}
    first, *others = machines.start_all(count, SCRIPT, told, nnodes, policy=policy, conf={"join_timeout": "6"})
    assert first.wait() == 1
    assert said.format(socket.gethostname()) in first.stderr
    assert [other.wait() for other in others] == [-signal.SIGKILL] * len(faults)


CUT_OFF = """
import os, signal, socket
import torch
import samestep
run = samestep.Run(8, 4, 1)
slot = run.membership.heartbeat.slot
model = torch.nn.Linear(4, 1)
step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch[0]).mean())
def cut():
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as found:
                if found.getpeername()[1] == int(os.environ["MASTER_PORT"]):
                    found.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
for batch in run.loader((torch.arange(128.).view(32, 4) / 128,)):
    if slot == 2 and step.num_steps == 1:
        cut()
    if slot == 1 and step.num_steps == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    step(batch)
print(run.world_size, samestep.state_digest(model, step.optimizers[0]))
"""
"""The connection of a worker with the store of the run breaks, before another worker is lost."""


@pytest.mark.slow
def test_a_worker_whose_connection_with_the_store_broke_goes_on_when_another_is_lost(machines):
    script = machines.folder / "cut_off.py"
    script.write_text(CUT_OFF)
    first, *others = machines.start_all(3, script, ())
    assert [machine.wait() for machine in (first, *others)] == [0, 0, 0], first.stderr
    alone = machines.start(script, (), "1:1", number=0)
    assert alone.wait() == 0
    assert (first.stdout.split()[0], alone.stdout.split()[0]) == ("2", "1")
    assert first.stdout.split()[1] == alone.stdout.split()[1]


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
def test_without_the_machine_where_all_meet_the_others_end_and_it_goes_on_alone_if_it_wakes_up(machines, undisturbed):
    fault = {"rank": 0, "step": 7, "phase": "backward", "kind": SILENT}
    told = {"folder": str(machines.folder / "run"), "faults": [fault]}
    first, *others = machines.start_all(3, SCRIPT, told, SAMESTEP_TRANSPORT="gloo")
    for other in others:
        assert other.wait() == 1, other.stderr
        assert GONE in other.stderr
        assert other.is_gone()
    first.signal(signal.SIGCONT)
    assert first.wait() == 0, first.stderr
    assert machines.left_by(first).digests == undisturbed.digests


@pytest.fixture
def networks():
    with two_networks(pytest.skip) as made:
        yield made


@pytest.mark.slow
def test_of_two_halves_without_a_network_between_them_the_first_machine_s_goes_on(machines, undisturbed, networks):
    machines.host = ADDRESSES[0]
    told = {"folder": str(machines.folder / "run"), "faults": [], "pause": 0.05}
    first, second = (
        machines.start(SCRIPT, told, number=number, network=file, GLOO_SOCKET_IFNAME=device, SAMESTEP_TRANSPORT="gloo")
        for number, (file, device) in enumerate(zip(networks.files, networks.devices, strict=True))
    )
    wait_until(lambda: len(list(machines.folder.glob("pid-*"))) == 2, "both train")
    networks.cut()
    assert second.wait() == 1
    assert GONE in second.stderr
    assert second.is_gone()
    assert first.wait() == 0, first.stderr
    assert "was lost" in first.stderr
    left = machines.left_by(first)
    assert (left.digests, left.steps) == (undisturbed.digests, undisturbed.steps)
    assert len(left.ended) == 1


@pytest.mark.slow
def test_a_machine_that_is_frozen_while_it_writes_to_the_folder_of_all_ends_the_run_in_a_sentence(machines):
    fault = {"rank": 1, "step": 5, "phase": "checkpoint", "kind": SILENT}
    told = {"folder": str(machines.folder / "run"), "faults": [WORKS_ALONE, fault]}
    first, second, third = machines.start_all(3, SCRIPT, told)
    assert (first.wait(), third.wait()) == (2, 2)
    assert f"has been writing to {machines.folder / 'run'} since" in first.stderr  # it has the lock, and may wake up
    check_end_of(second, SILENT)


def wrapped(owner, name, around):
    """Replaces a function by `around(the function, its arguments)`."""
    real = getattr(owner, name)
    setattr(owner, name, lambda *args: around(real, *args))


def unread_is_kept(real, pool, machine, text):
    unread = [*machine.unread]
    real(pool, machine, text)
    machine.unread.extend(unread)


silent_in_an_exchange = partial(
    test_whatever_is_lost_the_others_end_in_the_bits_of_one_process,
    phase="exchange",
    kind=SILENT,
    is_loop=False,
    world=(2, 1),
    transport="gloo",
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
