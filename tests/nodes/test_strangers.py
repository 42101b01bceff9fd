"""Who else reaches the ports of a run on several nodes: they are few, and what is written there is never run."""

import base64
import pickle
import signal
import socket
import struct
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from node_scripts import WAITING

MEETING = ("--rdzv-conf", "join_timeout=60,keep_alive_interval=1", "--devices", "cpu:1")
STATE = "torch.rendezvous.none"
"""The key of the state that the nodes share, with the default --rdzv-id."""


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def bomb(nodes) -> tuple[Path, str]:
    path = nodes.folder / "went-off"
    return path, base64.b64encode(pickle.dumps(Bomb(path))).decode()


def store_of(nodes) -> dist.TCPStore:
    """A stranger's way into the rendezvous of the nodes."""
    return dist.TCPStore("127.0.0.1", nodes.port, is_master=False, wait_for_workers=False)


def start(nodes, rank: int, script: Path, *arguments: str, nnodes: str = "2"):
    meeting = ("--nnodes", nnodes, "--rdzv-endpoint", f"127.0.0.1:{nodes.port}", "--node-rank", str(rank))
    return nodes.start("run", *meeting, *MEETING, script, *arguments)


GARBAGE = struct.pack("<BIBQ", 0, 0x3C85F7CE, 1, 2**63) + bytes(100)
"""The start of a connection as a store expects it, then a command with a key of an impossible length."""


def wait_for_listener(nodes) -> None:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", nodes.port)).close()
            return
        except OSError:
            time.sleep(0.05)
    pytest.fail("nobody listens")


def listening(nodes) -> set[str]:
    """The addresses at which processes of the nodes listen."""
    found = set()
    for process in nodes.processes():
        connections = process.net_connections(kind="tcp")
        found |= {entry.laddr.ip for entry in connections if entry.status == psutil.CONN_LISTEN}
    return found


def stop(nodes) -> None:
    for process in nodes.started:
        process.send_signal(signal.SIGTERM)
        nodes.end_of(process)


def test_nodes_listen_at_the_endpoints_address_alone_and_a_written_pickle_is_not_run(nodes):
    script = nodes.script(WAITING)
    first, second = start(nodes, 0, script, "9"), start(nodes, 1, script, "9")
    nodes.wait_for("met-1")
    assert listening(nodes) == {"127.0.0.1"}
    went_off, text = bomb(nodes)
    store_of(nodes).set(STATE, text)
    time.sleep(2.5)  # two of the beats in which the nodes look there
    assert not went_off.exists()
    assert (first.poll(), second.poll()) == (None, None)
    stop(nodes)


def test_garbage_at_the_port_says_nothing_and_a_pickle_written_there_ends_the_wait_with_a_sentence(nodes):
    first = start(nodes, 0, nodes.script(WAITING), "9")
    wait_for_listener(nodes)
    with socket.create_connection(("127.0.0.1", nodes.port)) as connection:
        connection.sendall(GARBAGE)
        time.sleep(0.5)
    went_off, text = bomb(nodes)
    store_of(nodes).set(STATE, text)
    ended = nodes.end_of(first)
    assert not went_off.exists()
    assert ended.code == 1
    assert "something that is no node of this run has written to the rendezvous at 127.0.0.1" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "frame #" not in ended.stderr


def test_a_further_node_is_told_at_once_that_the_run_is_full(nodes):
    script = nodes.script(WAITING)
    start(nodes, 0, script, "9"), start(nodes, 1, script, "9")
    nodes.wait_for("met-1")
    ended = nodes.end_of(start(nodes, 1, script, "9"))
    assert ended.code == 2
    assert f"the run at 127.0.0.1:{nodes.port} is full: 2 of 2 nodes take part" in ended.stderr
    assert "lost" not in ended.stderr
    stop(nodes)


@pytest.mark.slow
def test_a_spare_node_of_a_run_that_ends_without_it_is_told_so_and_ends_well(nodes):
    script = nodes.script("import time; time.sleep(8)")
    started = [start(nodes, rank, script, nnodes="1:2") for rank in (0, 1)]
    time.sleep(4)
    spare = start(nodes, 1, script, nnodes="1:2")
    assert [nodes.end_of(process).code for process in started] == [0, 0]
    ended = nodes.end_of(spare)
    assert ended.code == 0, ended.stderr
    assert "is over and did not need this node: it was full (2 of 2 nodes)" in ended.stderr
