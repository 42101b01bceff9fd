import os
import select
import threading
from collections.abc import Iterator

import pytest

from samestep.comm.environment import WorkerSettings
from samestep.comm.events import Channel, EventParser, read_events


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    for fd in (reader, writer):
        try:
            os.close(fd)
        except OSError:
            continue


def test_an_event_arrives_with_its_fields(pipe):
    Channel(pipe[1]).send("progress", epoch=1, loss=None, step=3)
    assert read_events(pipe[0], EventParser()) == [{"event": "progress", "epoch": 1, "loss": None, "step": 3}]


def test_a_long_event_travels_in_atomic_parts_and_arrives_whole(pipe):
    text = 'a "quoted" \\ line\n' * 500 + "é"
    Channel(pipe[1]).send("failed", traceback=text)
    parser = EventParser()
    data = os.read(pipe[0], 1 << 20)
    assert all(len(line) < select.PIPE_BUF for line in data.split(b"\n"))
    assert len(data) > select.PIPE_BUF
    assert parser.feed(data) == [{"event": "failed", "traceback": text}]


def test_events_survive_being_cut_anywhere(pipe):
    channel = Channel(pipe[1])
    for step in range(5):
        channel.send("beat", step=step)
    data = os.read(pipe[0], 65_536)
    parser = EventParser()
    events = [event for index in range(len(data)) for event in parser.feed(data[index : index + 1])]
    assert [event["step"] for event in events] == list(range(5))


def test_long_events_of_several_threads_do_not_mix(pipe):
    received, parser = [], EventParser()

    def send(name: str) -> None:
        channel = Channel(pipe[1])
        for index in range(20):
            channel.send("line", text=name * 10_000, index=index)

    threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        received += read_events(pipe[0], parser) or []
    received += read_events(pipe[0], parser) or []
    for name in "abc":
        assert [event["index"] for event in received if event["text"] == name * 10_000] == list(range(20))


def test_progress_is_dropped_while_the_pipe_is_full_and_events_that_matter_are_not(pipe):
    channel = Channel(pipe[1])
    for step in range(10_000):
        channel.send("beat", step=step)
    assert not select.select([], [pipe[1]], [], 0)[1]
    late = threading.Thread(target=lambda: channel.send("failed", message="x" * 10_000))
    late.start()
    received, parser = [], EventParser()
    while late.is_alive() or not received:
        received += read_events(pipe[0], parser) or []
    received += read_events(pipe[0], parser) or []
    assert 100 < len(received) < 10_000
    assert received[-1] == {"event": "failed", "message": "x" * 10_000}


def test_sending_to_a_supervisor_that_is_gone_is_no_error(pipe):
    channel = Channel(pipe[1])
    os.close(pipe[0])
    channel.send("line", text="anybody there?")


def test_what_is_no_event_is_skipped():
    parser = EventParser()
    assert parser.feed(b'garbage\n[1]\n"text"\n\xff\n{"event": "beat"}\n') == [{"event": "beat"}]


def test_the_end_of_the_pipe_is_told_after_the_last_event(pipe):
    Channel(pipe[1]).send("beat")
    os.close(pipe[1])
    parser = EventParser()
    assert read_events(pipe[0], parser) == [{"event": "beat"}]
    assert read_events(pipe[0], parser) is None


def test_there_is_a_channel_only_where_a_supervisor_listens(pipe, tmp_path):
    with open(tmp_path / "file", "w") as file:  # a program started by a worker may have this number for its own file
        for fds in ({}, {"page": pipe[1]}, {"events": 1048575}, {"events": file.fileno()}):
            assert Channel.from_environment(WorkerSettings(fds=fds).variables()) is None
    channel = Channel.from_environment(WorkerSettings(fds={"events": pipe[1]}).variables())
    assert channel is not None
    channel.send("beat", step=1)
    assert read_events(pipe[0], EventParser()) == [{"event": "beat", "step": 1}]
