"""Groups of real processes: their rendezvous, and the ranks that an error names."""

import socket
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from comm_programs import join, odd_broadcasts
from marked import free_port
from worlds import PATIENCE_SECONDS, in_turns, processes

from samestep.comm.connecting import connect
from samestep.comm.environment import Environment
from samestep.comm.group import GroupTransport
from samestep.comm.rendezvous import rendezvous, roll_call
from samestep.errors import PeerLostError, UsageError

KILLED = -9
BOTH = pytest.mark.parametrize("transport", ["auto", "gloo"])


@pytest.fixture(autouse=True)
def _pooled(worlds):
    """Processes come from the server that the pools of processes use too, so they start at once."""


@contextmanager
def started(ranks, world_size, task, seconds, target=None, port=None, **variables):
    """Starts processes of a group, some of which may be left out; yields a function for exit codes and reports."""
    common = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port or free_port(), **variables}

    def outcome(awaited=ranks):
        found = {}
        for rank in awaited:
            process, pipe = begun[rank]
            process.join(PATIENCE_SECONDS)
            found[rank] = process.exitcode, pipe.recv() if process.exitcode != KILLED else None
        return found

    with processes(join, {rank: ({**common, "RANK": rank}, task, seconds, target) for rank in ranks}) as begun:
        yield outcome


@contextmanager
def kept_store():
    """A store that outlives the ranks, as torchrun and our own launcher keep one; yields its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def test_two_groups_at_once_do_not_hear_each_other():
    with started([0, 1], 2, "talk", 60, MARK=1) as first, started([0, 1], 2, "talk", 60, MARK=2) as second:
        for mark, outcome in ((1, first()), (2, second())):
            for code, report in outcome.values():
                assert code == 0
                assert report == {"words": [[0, mark], [1, mark]]}


@BOTH
def test_a_process_can_leave_a_group_and_join_again_and_again(transport):
    """Also at a store that still holds the addresses of the first time."""
    options = {"TORCHELASTIC_USE_AGENT_STORE": True, "SAMESTEP_TRANSPORT": transport}
    with kept_store() as port, started([0, 1], 2, "again", 60, port=port, **options) as outcome:
        for code, report in outcome().values():
            assert code == 0
            assert report["words again"] == [[0, 1], [1, 1]]


def test_ranks_of_two_nodes_can_leave_and_join_again_too():
    with kept_store() as port:
        options = {"TORCHELASTIC_USE_AGENT_STORE": True, "LOCAL_WORLD_SIZE": 2}
        with started(range(4), 4, "again", 60, port=port, **options) as outcome:
            for code, report in outcome().values():
                assert code == 0
                assert report["words again"] == [[rank, 1] for rank in range(4)]


def test_a_rank_that_never_comes_is_named_by_all_others():
    with started([0, 2], 3, "talk", 3) as outcome:
        for rank, (code, report) in outcome().items():
            assert code == 1
            assert (report["error"], report["ranks"]) == ("AbsentError", (1,))
            assert f"rank {rank} met 2 of 3 ranks within 3 s; missing: 1" in report["message"]


@BOTH
@pytest.mark.parametrize("hosts_the_store", [False, True])
def test_a_rank_that_dies_is_named_by_all_others(transport, hosts_the_store):
    options = {} if hosts_the_store else {"TORCHELASTIC_USE_AGENT_STORE": True}
    with kept_store() as port:
        place = None if hosts_the_store else port
        with started([0, 1, 2], 3, "lose", 60, 0, port=place, SAMESTEP_TRANSPORT=transport, **options) as outcome:
            found = outcome()
    assert found.pop(0)[0] == KILLED
    for code, report in found.values():
        assert code == 1
        assert (report["error"], report["ranks"]) == ("PeerLostError", (0,))
        assert "waits for rank 0, which has died, has ended, or is late" in report["message"]
        assert "timeout_seconds" in report["message"]


@BOTH
@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_works_alone_is_met_after_any_time_and_named_if_it_dies_meanwhile(transport, dies):
    task = "work alone and die" if dies else "work alone"
    with started([0, 1, 2], 3, task, 4, 0, SAMESTEP_TRANSPORT=transport) as kept:
        outcome = kept()
        if not dies:
            assert all((code, report["met"]) == (0, [[0], [1], [2]]) for code, report in outcome.values())
            return
        assert outcome.pop(0)[0] == KILLED
        for code, report in outcome.values():
            assert (code, report["error"], report["ranks"]) == (1, "PeerLostError", (0,))
            assert "waits for rank 0, which has died or has ended" in report["message"]


@BOTH
def test_a_rank_that_is_too_slow_is_named_as_well(transport):
    with started([0, 1], 2, "late", 3, 1, SAMESTEP_TRANSPORT=transport) as outcome:
        code, report = outcome([0])[0]
        assert code == 1
        assert (report["error"], report["ranks"]) == ("PeerLostError", (1,))
        assert "needs more time than 3 s for its microbatches needs a larger timeout_seconds" in report["message"]


def test_a_store_that_nobody_hosts_is_a_usage_error_that_names_the_address():
    port = free_port()
    with started([1], 2, "talk", 1, port=port) as outcome:
        code, report = outcome()[1]
        assert code == 1
        assert report["error"] == "UsageError"
        assert (
            f"rank 1 cannot reach the store at 127.0.0.1:{port}, as MASTER_ADDR and MASTER_PORT say"
            in report["message"]
        )


def test_a_port_that_is_taken_is_a_usage_error_that_names_it():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with started([0], 2, "talk", 3, port=port) as outcome:
            code, report = outcome()[0]
            assert code == 1
            assert report["error"] == "UsageError"
            assert f"cannot open the store at 127.0.0.1:{port}" in report["message"]


def test_a_roll_call_names_those_who_do_not_answer_and_the_host_of_a_store_that_is_gone():
    store = dist.HashStore()
    for rank in (0, 2):
        store.set(str(rank), "here")
    assert roll_call(store, 3, 5, 0.05, None) == (1, 4)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    assert roll_call(client, 1, 3, 1.0, store_host=0) == (0,)
    with pytest.raises(RuntimeError):
        roll_call(client, 1, 3, 1.0, store_host=None)


def test_ranks_meet_alone_whatever_earlier_ones_have_left_in_the_store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def arrive(rank, seconds=60.0):
        place = Environment(rank, 2, master_port=server.port, store_is_kept=True)
        return rendezvous(place, timedelta(seconds=seconds))

    def meet():
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(arrive, range(2)))

    with pytest.raises(PeerLostError, match=r"met 1 of 2 ranks within 0\.1 s; missing: 0"):
        arrive(1, 0.1)
    for number in range(2):
        one, other = meet()
        assert not one.check(["address"])
        one.set("address", str(number))
        assert other.get("address") == str(number).encode()
        with pytest.raises(PeerLostError, match="missing: 1"):
            arrive(0, 0.1)


TENTHS = [torch.tensor(0.1 + rank) for rank in range(4)]
SUM = ((TENTHS[0] + TENTHS[1]) + (TENTHS[2] + TENTHS[3])).item()


@pytest.mark.parametrize("said", ["auto", "flat"])
@pytest.mark.parametrize("task", ["sum", "adopt and sum"])
def test_ranks_of_two_nodes_sum_by_nodes_unless_they_are_told_not_to(task, said):
    with started(range(4), 4, task, 60, SAMESTEP_NODES=said, LOCAL_WORLD_SIZE=2) as outcome:
        for code, report in outcome().values():
            assert code == 0
            assert report["by nodes"] == (said == "auto")
            assert report["sum"] == SUM


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_rank_that_dies_is_named_by_the_ranks_that_it_shares_a_node_or_a_rail_with(transport):
    options = {"TORCHELASTIC_USE_AGENT_STORE": True, "SAMESTEP_TRANSPORT": transport, "LOCAL_WORLD_SIZE": 2}
    with kept_store() as port, started(range(4), 4, "lose and sum", 60, 3, port=port, **options) as outcome:
        found = outcome()
    assert found[3][0] == KILLED
    for rank in range(3):
        code, report = found[rank]
        assert (code, report["error"]) == (1, "PeerLostError"), report
    assert found[2][1]["ranks"] == (3,)
    assert "rank 2 of 4 waits for rank 3" in found[2][1]["message"]


@pytest.mark.parametrize("source", [0, 1])
def test_broadcasts_reach_strided_empty_and_trainable_tensors(worlds, source):
    results = [*in_turns(3, odd_broadcasts, source)]
    for transport in ("auto", "gloo"):
        results += worlds(2, transport).run(odd_broadcasts, source)
    for strided, scalar, shape, parameter, requires_grad in results:
        assert torch.equal(strided, torch.full((4, 3), float(source)))
        assert scalar == source
        assert shape == (0, 3)
        assert torch.equal(parameter, torch.full((3,), float(source)))
        assert requires_grad


def test_a_process_group_of_the_scripts_own_is_used_unless_it_has_another_size():
    timeout = timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        cpu = torch.device("cpu")
        transport, control = connect(Environment(), cpu, timeout)
        assert transport is control
        assert transport.gather(torch.arange(3)).wait().tolist() == [0, 1, 2]
        transport.close()
        assert dist.is_initialized(), "the script's own group is its own to close"
        with pytest.raises(UsageError, match="the process group has 1 ranks, the environment says 2"):
            connect(Environment(rank=0, world_size=2, master_port=1), cpu, timeout)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def lone_group():
    """A process group of this process alone, and a transport over a group within it."""
    timeout = timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    yield GroupTransport(dist.new_group(backend="gloo"), dist.HashStore(), timeout)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_after_a_failed_transfer_all_groups_are_dropped_at_once(lone_group):
    """One after another each would wait for transfers under way, which the others may never join."""
    with pytest.raises(PeerLostError), lone_group.failures_named():
        raise RuntimeError("Connection closed by peer")
    lone_group.close()
    assert not dist.is_initialized()


def test_after_an_exception_that_ends_the_program_too(lone_group, monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError("the user's own"), raising=False)
    lone_group.close()
    assert not dist.is_initialized()


def test_a_gather_between_gpus_uses_no_deprecated_name(lone_group, monkeypatch):
    monkeypatch.setattr(lone_group, "through_host", False)  # as with NCCL
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lone_group.gather(torch.arange(3)).wait().tolist() == [0, 1, 2]
