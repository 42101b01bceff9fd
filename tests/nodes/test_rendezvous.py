"""The rendezvous and the agent: what nodes say of themselves, and of how they ended."""

import json
import pickle
import socket
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from samestep.comm.listening import listen
from samestep.errors import UsageError
from samestep.launcher.agent import end_of
from samestep.launcher.assignment import Assignment, Instruction, assign, worker_variables
from samestep.launcher.assignment import Node as Place
from samestep.launcher.cluster import ClusterOptions, cluster_of
from samestep.launcher.failure import Casualty
from samestep.launcher.job import Job, Outcome
from samestep.launcher.rendezvous import (
    ForeignError,
    Introduction,
    _as_json,
    _pickled,
    difference,
    interface_to,
    open_listener,
    order_of,
    own_address,
    told,
)

FIRST = Introduction("a", 0, "2", "2 CPU workers", 1, "train.py", "abc", "2.13", "0.1")


def cluster(host, port, **more):
    return cluster_of(ClusterOptions(nnodes="2", rdzv_endpoint=f"{host}:{port}", **more))


def casualty(code=None, report=None):
    return Casualty(3, "CPU worker 1", code, report, "", None)


def outlook(asked="", changes=False):
    return SimpleNamespace(asked=asked, changes=changes)


def test_nodes_with_other_names_and_numbers_are_alike():
    assert difference(replace(FIRST, name="b", node_rank=1), FIRST) == ""


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("nnodes", "3", "--nnodes: 3 on b, 2 on a"),
        ("devices", "1 CPU worker", "devices: 1 CPU worker on b, 2 CPU workers on a"),
        ("threads", 2, "--threads: 2 on b, 1 on a"),
        ("torch", "2.12", "PyTorch: 2.12 on b, 2.13 on a"),
        ("samestep", "0.2", "samestep: 0.2 on b, 0.1 on a"),
        ("program", "other.py", "the command: other.py on b, train.py on a"),
        ("content", "abd", "the content of the script: abd on b, abc on a"),
    ],
)
def test_a_difference_is_told_with_both_values(field, value, words):
    assert words in difference(replace(FIRST, name="b", **{field: value}), FIRST)


def test_nodes_go_by_their_numbers_if_all_have_one_else_as_they_came():
    assert order_of([1, 0, 2]) == [1, 0, 2]
    assert order_of([2, 0, 1]) == [1, 2, 0]
    assert order_of([2, None, 0]) == [0, 1, 2]
    with pytest.raises(UsageError, match="--node-rank 1"):
        order_of([1, 0, 1])


def test_the_node_whose_address_it_is_hosts_the_meeting_and_later_agents_there_do_not():
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    with open_listener(cluster("localhost", port)) as listener:
        assert listener.getsockname()[1] == port
        assert open_listener(cluster("localhost", port)) is None
        with pytest.raises(UsageError, match="choose another port"):
            open_listener(cluster("localhost", port, node_rank=0))
    assert open_listener(cluster("192.0.2.1", port)) is None
    assert open_listener(cluster("localhost", port, node_rank=1)) is None


@pytest.mark.parametrize(
    ("host", "addresses"),
    [("127.0.0.1", ["127.0.0.1"]), ("localhost", ["127.0.0.1", "::1"]), ("192.0.2.1", ["::", "0.0.0.0"])],
)
def test_a_store_listens_at_its_hosts_address_and_at_all_only_if_that_is_not_this_machines(host, addresses):
    with listen(host, 0) as listener:
        assert listener.getsockname()[0] in addresses


def test_what_no_node_has_written_is_told_as_such():
    assert told(Introduction, json.dumps(vars(FIRST)).encode()) == FIRST
    for text in (b"\x80\x04.", b"", b"[1, 2]", b'{"name": "a"}', b"3"):
        with pytest.raises(ForeignError):
            told(Introduction, text)


def test_a_state_of_torchs_rendezvous_comes_back_from_json_and_another_text_is_none():
    first, second, now = _NodeDesc("a", 1, 0), _NodeDesc("b", 2, 0), datetime.now(UTC)
    state = _RendezvousState()
    state.round, state.complete, state.deadline = 3, True, now
    state.participants, state.last_heartbeats = {first: 0}, {first: now}
    state.wait_list, state.redundancy_list = {second}, {first, second}
    assert vars(pickle.loads(_pickled(_as_json(state)))) == vars(state)
    for text in (b"", b"null", b"{}", _as_json(state).replace(b"+00:00", b"?"), b"[" * 100_000):
        with pytest.raises(RendezvousStateError):
            _pickled(text)


def test_loopback_is_the_interface_only_if_the_endpoint_says_so():
    local = cluster("localhost", 29400)
    assert interface_to(local, own_address(local)) in ("lo", "lo0")
    assert interface_to(cluster("node1", 29400), "127.0.1.1") is None
    assert interface_to(cluster("node1", 29400), "192.0.2.7") is None


def test_a_worker_of_the_second_node_finds_torchruns_variables():
    selection = SimpleNamespace(count=2, kind="cpu", environment={})
    node = Place(1, 2, "node0", 29400, "eth7", "b")
    place = assign(selection, 1, "run", attempt=3, max_restarts=4, node=node)[1]
    told = Instruction(place, Job("module", "train"), 5, {"events": 3, "board": 4})
    variables = worker_variables(Instruction.from_json(told.to_json()))
    expected = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_MAX_RESTARTS": "4",
        "GLOO_SOCKET_IFNAME": "eth7",
    }
    assert {name: variables[name] for name in expected} == expected
    assert isinstance(place, Assignment)
    assert "node 1 (b)" in place.device


@pytest.mark.parametrize(
    ("outcome", "culprit", "stopped_by", "seen", "kind"),
    [
        (Outcome(0), None, None, outlook(), "done"),
        (Outcome(0), None, None, outlook("end"), "peer"),
        (Outcome(143), None, 15, outlook(), "stopped"),
        (Outcome(143), None, 15, outlook("stop"), "stopped"),
        (Outcome(0), None, 15, outlook(), "done"),
        (Outcome(143), None, None, outlook("stop"), "left"),
        (Outcome(143), None, None, outlook("stop", True), "again"),
        (Outcome(143), casualty(report={"type": "SystemExit", "exit_code": 143}), None, outlook(), "left"),
        (Outcome(1), casualty(report={"type": "PeerLostError", "peer_lost": True}), None, outlook(), "peer"),
        (Outcome(137), casualty(-9), None, outlook(), "failed"),
        (Outcome(1), None, None, outlook(), "failed"),
    ],
)
def test_how_a_node_ended_is_told_by_who_asked_and_who_failed(outcome, culprit, stopped_by, seen, kind):
    end = end_of(outcome, culprit, stopped_by, seen, False)
    assert end.kind == kind
    assert (end.exit_code == 0) == (kind == "done")
