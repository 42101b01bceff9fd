"""The board: its layout, who sees what, and reading it while another process writes."""

import multiprocessing
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from samestep.comm.board import (
    BOARD_VARIABLE,
    HEALS,
    MAX_LOST,
    MAX_SLOTS,
    PHASES,
    SLOT_VARIABLE,
    STOPS_ON_REQUEST,
    Beat,
    Board,
    View,
)

LOSS = {"slot": 1, "rank": 1, "device": "CPU worker 1", "cause": "SIGKILL", "phase": "backward", "step": 17}


@pytest.fixture
def board():
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    made = Board.create(3)
    yield made
    made.close()
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_new_board_shows_all_workers_no_beat_and_no_wish_to_stop(board):
    assert board.view() == View(0, (0, 1, 2), ())
    assert board.stop == 0
    assert board.beat(2) == Beat(0.0, 0, "start", 0, 0)


def test_a_view_has_the_next_number_and_tells_what_became_of_the_lost(board):
    assert board.announce((0, 2), lost=[LOSS]) == View(1, (0, 2), (LOSS,))
    assert (board.number, board.view()) == (1, View(1, (0, 2), (LOSS,)))
    assert board.announce((2,)) == View(2, (2,), ())
    assert board.view() == View(2, (2,), ())


def test_the_newest_losses_are_kept_and_the_largest_view_fits(board):
    lost = [{**LOSS, "slot": slot, "device": "x" * 80} for slot in range(50)]
    board.announce(tuple(range(MAX_SLOTS)), lost=lost)
    assert board.view().slots == tuple(range(MAX_SLOTS))
    assert [loss["slot"] for loss in board.view().lost] == list(range(50 - MAX_LOST, 50))


def test_a_beat_says_when_where_and_what(board):
    before = time.monotonic()
    board.post(2, "backward", 2**40, HEALS | STOPS_ON_REQUEST, 5)
    beat = board.beat(2)
    assert before <= beat.seconds <= time.monotonic()
    assert (beat.step, beat.phase, beat.flags, beat.view) == (2**40, "backward", HEALS | STOPS_ON_REQUEST, 5)
    assert board.beat(1).seconds == 0


def test_every_phase_and_the_last_slot_can_be_posted(board):
    for phase in PHASES:
        board.post(MAX_SLOTS - 1, phase, 1, 0, 0)
        assert board.beat(MAX_SLOTS - 1).phase == phase
    assert board.view() == View(0, (0, 1, 2), ())


def test_the_layout_is_the_documented_one(board):
    board.announce((0, 2))
    board.ask_to_stop(15)
    board.post(1, "data", 7, 3, 9)
    page = os.pread(board.fd, 1 << 20, 0)
    number, stop, length, _ = struct.unpack_from("<QQII", page)
    assert (number, stop, page[24 : 24 + length]) == (1, 15, b'{"number": 1, "slots": [0, 2], "lost": []}')
    assert struct.unpack_from("<QIIQ", page, 16_384 + 64 + 8) == (7, PHASES.index("data"), 3, 9)
    assert len(page) == 16_384 + 64 * MAX_SLOTS


def test_a_wish_to_stop_is_seen_by_all(board):
    other = Board(os.dup(board.fd))
    board.ask_to_stop(2)
    assert other.stop == 2
    other.close()


def test_a_worker_finds_the_board_by_its_variables_and_others_do_not(board, tmp_path):
    found = Board.from_environment({BOARD_VARIABLE: str(board.fd), SLOT_VARIABLE: "2"})
    assert found is not None
    assert found[1] == 2
    found[0].post(2, "data", 3, 0, 0)
    assert board.beat(2).step == 3
    assert Board.from_environment({}) is None
    assert Board.from_environment({BOARD_VARIABLE: str(board.fd)}) is None
    assert Board.from_environment({BOARD_VARIABLE: "1048575", SLOT_VARIABLE: "0"}) is None
    with open(tmp_path / "file", "w+") as file:
        assert Board.from_environment({BOARD_VARIABLE: str(file.fileno()), SLOT_VARIABLE: "0"}) is None


def test_the_board_has_no_name_and_no_program_inherits_it(board):
    assert not os.get_inheritable(board.fd)
    assert os.fstat(board.fd).st_nlink == 0
    if os.path.isdir("/dev/shm"):
        assert not [name for name in os.listdir("/dev/shm") if "samestep" in name]


def test_a_reader_waits_for_a_writer_that_is_half_way_through(board):
    half = b'{"number": 0, "slots": [0, 1, 7], "lost": []}'
    os.pwrite(board.fd, half, 24)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(board.view)
        time.sleep(0.05)
        assert not reading.done()
        board.announce((0, 1, 7))
        assert reading.result(10) == View(1, (0, 1, 7))


def announce_in_turn(board, seconds):
    """Views of many lengths: their slots are their own number, so many times."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        number = board.number + 1
        board.announce((number % MAX_SLOTS,) * (1 + 37 * number % 500), lost=[{"number": number}])


def test_a_view_that_is_read_while_another_process_writes_is_never_torn(board):
    writer = multiprocessing.get_context("fork").Process(target=announce_in_turn, args=(board, 1.0))
    writer.start()
    numbers = []
    while writer.is_alive():
        view = board.view()
        numbers.append(view.number)
        if view.number:
            assert view.lost == ({"number": view.number},)
            assert view.slots == (view.number % MAX_SLOTS,) * (1 + 37 * view.number % 500)
    writer.join()
    assert writer.exitcode == 0
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 10
