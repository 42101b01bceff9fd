"""Programs and puppets for the tests of the transport through shared memory."""

import os
import resource
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from worlds import PATIENCE_SECONDS, processes

from samestep.comm import segment as segment_module
from samestep.comm.connecting import connect_at
from samestep.comm.environment import Environment
from samestep.comm.rendezvous import Rendezvous
from samestep.comm.shared_memory import MAX_BROADCASTS, SharedTransport

CPU = torch.device("cpu")


def kind_of(communicator):
    """Which transport it is, and whether there is a process group."""
    return type(communicator.transport).__name__, dist.is_initialized()


def numbers(source, target, count, dtype, number):
    """What a rank sends another: bytes that tell whose they are."""
    generator = torch.Generator().manual_seed(1000 * number + 10 * source + target)
    width = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 2 if dtype == torch.bool else 256, (count * width,), generator=generator).byte().view(dtype)


def exchange_many(communicator, operations, order):
    """Posts exchanges, then waits for them in some order.

    Args:
        communicator: this rank's communicator.
        operations: of each its dtype, and the matrix of sizes: [source][target].
        order: in which to wait.

    Returns:
        The bytes received, by operation.
    """
    rank, ranks = communicator.rank, communicator.world_size
    pending = []
    for number, (dtype, sizes) in enumerate(operations):
        parts = torch.cat([numbers(rank, target, sizes[rank][target], dtype, number) for target in range(ranks)])
        received = [sizes[source][rank] for source in range(ranks)]
        pending.append(communicator.transport.exchange(parts, sizes[rank], received))
    arrived = {number: pending[number].wait() for number in order}
    kept = [communicator.transport.gather(torch.full((100,), float(number))).wait() for number in range(20)]
    assert all((value == number).all() for number, value in enumerate(kept)), "received in memory of its own"
    return [arrived[number].view(torch.uint8) for number in range(len(operations))]


def deliver_many(communicator, sizes, lengths):
    """Delivers bytes in pieces, to some ranks; then broadcasts tensors, many at once.

    Args:
        communicator: this rank's communicator.
        sizes: of each delivery the matrix of sizes: [source][target], 0 on its diagonal.
        lengths: those of the tensors.

    Returns:
        What has arrived, and the tensors.
    """
    rank, ranks, transport = communicator.rank, communicator.world_size, communicator.transport
    arrived = []
    for number, matrix in enumerate(sizes):
        parts = [numbers(rank, target, matrix[rank][target], torch.uint8, number) for target in range(ranks)]
        pieces = [piece for part in parts for piece in part.split(7)]  # an empty part is an empty piece
        arrived.append(transport.deliver(pieces, matrix[rank], [matrix[source][rank] for source in range(ranks)]))
    tensors = [torch.full((length,), rank, dtype=torch.uint8) for length in lengths]
    transport.broadcast_all(tensors, 1)
    return [each.wait() for each in arrived], tensors


def memory_in_use():
    """Bytes of shared memory that this process has touched."""
    total, ours = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            if "-" in line.split(" ", 1)[0]:
                ours = "memfd:samestep-transport" in line
            elif ours and line.startswith("Rss:"):
                total += 1024 * int(line.split()[1])
    return total


def patterns(communicator, rounds):
    """Operations of many sizes, up to a thousand under way, some given up; the memory in use after each round."""
    rank, transport = communicator.rank, communicator.transport
    used = []
    for _ in range(rounds):
        pending = []
        for number in range(1000):
            size = 1 + 37 * number % 2000
            pending.append(transport.exchange(torch.full((2 * size,), rank), [size] * 2, [size] * 2))
        assert all((each.wait().chunk(2)[1 - rank] == 1 - rank).all() for each in pending[::-1])
        for _ in range(150):
            given_up = transport.gather(torch.ones(100_000))
            transport.gather(torch.ones(1)).wait()
            del given_up
        used.append(memory_in_use())
    return used


def large_broadcast(communicator, numel):
    """A broadcast of far more than is under way at once, to ranks in no hurry: whether it came, the memory in use."""
    tensor = torch.arange(numel) if communicator.rank == 0 else torch.zeros(numel, dtype=torch.int64)
    if communicator.rank > 0:
        time.sleep(0.5)
    communicator.broadcast(tensor)
    communicator.barrier()
    return torch.equal(tensor, torch.arange(numel)), memory_in_use()


def after_a_large_operation(communicator, length, count):
    """Shared memory in use after a large operation and after further small ones, twice; what arrives is checked."""
    transport, rank = communicator.transport, communicator.rank
    used = []
    for _ in range(2):
        parts = transport.gather(torch.full((length,), rank)).wait().chunk(2)
        assert all((part == source).all() for source, part in enumerate(parts))
        used.append(memory_in_use())
        for _ in range(3):
            under_way = transport.gather(torch.full((length // 64,), rank))
            for _ in range(count):  # while the other's bytes still lie there
                communicator.barrier()
            assert (under_way.wait().chunk(2)[1 - rank] == 1 - rank).all()
        used.append(memory_in_use())
    return used


def await_readers(transport):
    """Returns when the other ranks have read all that this one has posted, so that its next place is the first."""
    while not all(map(transport._is_read, transport._outbox.blocks)):
        time.sleep(0.001)


def broadcasts_over_payload(communicator):
    """Broadcasts after one whose place another operation took, with the number of the former where that had lain."""
    transport = communicator.transport
    for _ in range(5):  # the number is not that of a mark, 1
        communicator.barrier()
    await_readers(transport)
    before = transport.gather(torch.zeros(1 << 20, dtype=torch.uint8))
    number = transport._number
    communicator.broadcast(torch.ones(1))
    before.wait()
    await_readers(transport)
    payload = transport.gather(torch.full((1 << 18,), number))
    if is_source := communicator.rank == 0:
        first = transport._lane.outbox + transport._broadcasts[-1].start
        assert transport._segment.words[first // 8] == number, "payload lies in the broadcast's place"
    payload.wait()
    transport.limit_waits(timedelta(seconds=20))
    for _ in range(MAX_BROADCASTS + 2):
        communicator.broadcast(torch.ones(1))
    communicator.barrier()
    transport.limit_waits(timedelta(seconds=PATIENCE_SECONDS))
    return is_source


class Puppet:
    """A rank that does what it is told, one thing after another."""

    def __init__(self, process, pipe):
        self.process, self._pipe = process, pipe

    def tell(self, name, *args):
        """Tells it to do something, without waiting."""
        self._pipe.send((name, args))

    def answer(self):
        """What came of what it was told first and has not answered for."""
        assert self._pipe.poll(PATIENCE_SECONDS), "no answer"
        return self._pipe.recv()

    def ask(self, name, *args):
        """Tells it to do something; what came of it."""
        self.tell(name, *args)
        return self.answer()

    def is_quiet(self, seconds):
        """Whether it does not answer for a while."""
        return not self._pipe.poll(seconds)


@contextmanager
def puppets(tmp_path, world_size, setups=(), seconds=120, choice="auto"):
    """Ranks that are connected to each other; yields them, and ends those that are left.

    Args:
        tmp_path: for the store.
        world_size: their number.
        setups: names of methods of `Stage` to run before they connect, by rank.
        seconds: their timeout.
        choice: of the transport.
    """
    store = str(tmp_path / "store")
    arguments = {rank: (rank, world_size, store, dict(setups).get(rank), seconds, choice) for rank in range(world_size)}
    with processes(perform, arguments) as started:
        yield [Puppet(*each) for each in started.values()]


def perform(rank, world_size, path, setup, seconds, choice, pipe):
    """A puppet's process: connects, then does what it is told."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch shows its stack when a peer goes
    stage = Stage(rank, world_size, path, seconds, choice)
    if setup is not None:
        getattr(stage, setup)()
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(getattr(stage, name)(*args))
        except Exception as error:
            pipe.send((type(error).__name__, str(error), getattr(error, "ranks", ())))
    os._exit(0)


class Stage:
    """What puppets can do."""

    def __init__(self, rank, world_size, path, seconds, choice):
        self.rank, self.world_size = rank, world_size
        self._path, self._timeout = path, timedelta(seconds=seconds)
        self._choice = choice
        self._pending = []
        self._posted = self._connections = 0
        self.transport = None

    def connect(self):
        """Connects; the name of the transport's class."""
        self._connections += 1
        store = dist.FileStore(f"{self._path}-{self._connections}", self.world_size)
        place = Environment(self.rank, self.world_size, self.rank, self.world_size, transport=self._choice)
        self.transport, _ = connect_at(Rendezvous(store, place, self._timeout), CPU, self._timeout)
        return type(self.transport).__name__

    def post(self, size=100):
        """Begins an exchange in which each part tells who sent it and when."""
        parts = torch.full((size * self.world_size,), 100 * self._posted + self.rank)
        self._posted += 1
        self._pending.append(self.transport.exchange(parts, [size] * self.world_size, [size] * self.world_size))

    def wait(self):
        """What the oldest exchange brought, a number a rank."""
        parts = self._pending.pop(0).wait().chunk(self.world_size)
        assert all((part == part[0]).all() for part in parts), "torn"
        return [int(part[0]) for part in parts]

    def exchange(self):
        """An exchange from beginning to end."""
        self.post()
        return self.wait()

    def exchange_many(self, count):
        """Exchanges one after another; those that brought something wrong."""
        first = self._posted
        arrived = [self.exchange() for _ in range(count)]
        wanted = [[100 * number + rank for rank in range(self.world_size)] for number in range(first, first + count)]
        return [got for got, want in zip(arrived, wanted, strict=True) if got != want]

    def broadcast(self, count, source, size=1000):
        """Many broadcasts."""
        for _ in range(count):
            self.transport.broadcast(torch.zeros(size), source)

    def leave(self):
        """Closes the transport."""
        self.transport.close()
        self._pending, self._posted = [], 0
        self.transport = None

    def open_files(self):
        """What the process has open."""
        return sorted(os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name != "3")

    def seconds_used_by(self, name):
        """Processor seconds that something took."""
        before = resource.getrusage(resource.RUSAGE_SELF)
        getattr(self, name)()
        after = resource.getrusage(resource.RUSAGE_SELF)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def close_in_a_child(self):
        """A forked child closes its copy of the transport, as a data worker may on its way out."""
        pid = os.fork()
        if pid == 0:
            self.transport.close()
            os._exit(0)
        os.waitpid(pid, 0)

    def die_before_it_is_known(self):
        """From the second exchange on, this rank dies when its bytes are written, and the others do not know it yet."""
        real = SharedTransport._announce

        def announce(transport, segment, block):
            if block.number == 1:
                os.kill(os.getpid(), 9)
            real(transport, segment, block)

        SharedTransport._announce = announce

    def look_elsewhere(self):
        """This rank has another nonce than what it finds."""
        real = segment_module.join

        def join(address, world_size):
            pid, fd, nonce = address.split()
            return real(f"{pid} {fd} {int(nonce) ^ 2}", world_size)

        segment_module.join = join

    def refuse(self):
        """This rank was told not to."""
        self._choice = "gloo"

    def little_space(self):
        """This process may not map what rank 0 has made."""
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), resource.RLIM_INFINITY))

    def announce_too_early(self):
        """Twin: an operation is known before its bytes are written."""
        real = SharedTransport._place

        def place(transport, size):
            block = real(transport, size)
            transport._announce(transport._segment, block)
            return block

        def late(*args):
            time.sleep(0.02)
            write(*args)

        write, segment_module.Segment.write = segment_module.Segment.write, late
        SharedTransport._place = place

    def reuse_too_early(self):
        """Twin: a place is used again before all have read what is there."""
        SharedTransport._is_read = lambda transport, block: True
