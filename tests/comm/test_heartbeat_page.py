"""The page: its layout, who sees what, and reading it while another process writes."""

import multiprocessing
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from samestep.comm import heartbeat
from samestep.comm.environment import WorkerSettings
from samestep.comm.heartbeat import (
    MAX_LOST,
    MAX_SLOTS,
    PHASES,
    Beat,
    HeartbeatPage,
    Quorum,
)
from samestep.errors import PeerLostError

LOSS = {"slot": 1, "rank": 1, "device": "CPU worker 1", "cause": "SIGKILL", "phase": "backward", "step": 17}


@pytest.fixture
def page():
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    made = HeartbeatPage.create(3)
    yield made
    made.close()
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_new_board_shows_all_workers_no_beat_and_no_wish_to_stop(page):
    assert page.quorum() == Quorum(0, (0, 1, 2), ())
    assert page.stop == 0
    assert page.beat(2) == Beat(0.0, 0, "start", 0, 0)


def test_a_quorum_of_which_half_is_written_is_waited_for_and_not_for_ever(page, monkeypatch):
    os.pwrite(page.fd, b"\0", 40)  # where its supervisor died
    monkeypatch.setattr(heartbeat, "WRITING_LOOKS", 3)
    with pytest.raises(PeerLostError, match="the supervisor of the run has ended"):
        page.quorum()


def test_the_newest_losses_are_kept_and_the_largest_view_fits(page):
    lost = [{**LOSS, "slot": slot, "device": "x" * 80} for slot in range(50)]
    page.announce(tuple(range(MAX_SLOTS)), lost=lost)
    assert page.quorum().slots == tuple(range(MAX_SLOTS))
    assert [loss["slot"] for loss in page.quorum().lost] == list(range(50 - MAX_LOST, 50))


def test_every_phase_and_the_last_slot_can_be_posted(page):
    for phase in PHASES:
        page.post(MAX_SLOTS - 1, phase, 1, 0, 0)
        assert page.beat(MAX_SLOTS - 1).phase == phase
    assert page.quorum() == Quorum(0, (0, 1, 2), ())


def test_the_layout_is_the_documented_one(page):
    page.announce((0, 2))
    page.ask_to_stop(15)
    page.count_shown()
    page.count_shown()
    page.post(1, "data", 7, 3, 9)
    page = os.pread(page.fd, 1 << 20, 0)
    number, stop, shown, length, _ = struct.unpack_from("<QQQII", page)
    assert (number, stop, shown) == (1, 15, 2)
    assert page[32 : 32 + length] == b'{"number": 1, "slots": [0, 2], "lost": []}'
    assert struct.unpack_from("<QIIQ", page, 16_384 + 64 + 8) == (7, PHASES.index("data"), 3, 9)
    assert len(page) == 16_384 + 64 * MAX_SLOTS


def test_a_worker_finds_the_board_by_its_variables_and_others_do_not(page, tmp_path):
    found = HeartbeatPage.from_environment(WorkerSettings(slot=2, fds={"page": page.fd}).variables())
    assert found is not None
    assert found[1] == 2
    found[0].post(2, "data", 3, 0, 0)
    assert page.beat(2).step == 3
    with open(tmp_path / "file", "w+") as file:
        for fds in ({}, {"page": 1048575}, {"page": file.fileno()}):
            assert HeartbeatPage.from_environment(WorkerSettings(fds=fds).variables()) is None


def test_the_board_has_no_name_and_no_program_inherits_it(page):
    assert not os.get_inheritable(page.fd)
    assert os.fstat(page.fd).st_nlink == 0
    if os.path.isdir("/dev/shm"):
        assert not [name for name in os.listdir("/dev/shm") if "samestep" in name]


def test_a_reader_waits_for_a_writer_that_is_half_way_through(page):
    half = b'{"number": 0, "slots": [0, 1, 7], "lost": []}'
    os.pwrite(page.fd, half, 24)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(page.quorum)
        time.sleep(0.05)
        assert not reading.done()
        page.announce((0, 1, 7))
        assert reading.result(10) == Quorum(1, (0, 1, 7))


def announce_in_turn(page, seconds):
    """Views of many lengths: their slots are their own number, so many times."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        number = page.number + 1
        page.announce((number % MAX_SLOTS,) * (1 + 37 * number % 500), lost=[{"number": number}])


def test_a_view_that_is_read_while_another_process_writes_is_never_torn(page):
    writer = multiprocessing.get_context("fork").Process(target=announce_in_turn, args=(page, 1.0))
    writer.start()
    numbers = []
    while writer.is_alive():
        quorum = page.quorum()
        numbers.append(quorum.number)
        if quorum.number:
            assert quorum.lost == ({"number": quorum.number},)
            assert quorum.slots == (quorum.number % MAX_SLOTS,) * (1 + 37 * quorum.number % 500)
    writer.join()
    assert writer.exitcode == 0
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 10
