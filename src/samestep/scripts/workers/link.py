"""Messages between the driver, rank 0, which runs the script, and the workers, which compute chunks.

A message is pickled values, among them code and objects of the script's classes, which `Communicator.gather_values`
refuses, and tensors. In host memory: the size of the pickle, the pickle, and the tensors that are there, each padded to
64 bytes; tensors on the device travel apart, packed. Both sides must know the sizes of what they exchange, so each
message begins with a head of a fixed size, which says them, and holds a short message whole: one exchange for most. A
longer one follows as a second exchange.

What was sent is waited for at the next message (`_finish_sent`). The order of exchanges is the same on both sides, and
none may be left out: an exception between two of them puts the devices out of step, and `Link.whole` remembers it.
"""

import pickle
import signal
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.comm.buckets import make_buckets, round_up
from samestep.comm.communicator import Communicator
from samestep.comm.transport import Connection, Pending
from samestep.data.checksums import flattened
from samestep.errors import DeterminismError

SIZE_BYTES = 8
BORDER_BYTES = 64  # a multiple of the size of every dtype: where a tensor begins must be a multiple of its own
# Padded to 64 bytes: what follows in a head begins on a border, as the tensors of a message must.
WORDS = struct.Struct("=3Q?39x")  # bytes of two messages, of what follows on the device; whether any does
HEAD_BYTES = 16 * 1024
INLINE_BYTES = HEAD_BYTES - WORDS.size
BUCKET_BYTES = 25 * 2**20
MOST_GAPS = 2  # times the size of what is not sent as a copy
GAP = torch.zeros(INLINE_BYTES, dtype=torch.uint8)
HANDLED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGCHLD),  # the last is torch's own, for data workers
)


class Message(NamedTuple):
    """What `decode` reads; before it travels, in pieces."""

    on_host: list[Tensor]
    on_device: list[Tensor]


class Received(NamedTuple):
    """A message that has arrived: bytes."""

    on_host: Tensor
    on_device: Tensor


class Link:
    """The two directions: the driver sends, and a worker answers each time. All calls are in this order.

    What is on the devices travels between these; a message in host memory says how much of it follows.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._transport: Any = communicator.control  # a `Connection`, if there are workers
        if self.rank > 0 and isinstance(self._transport, Connection):
            self._transport.limit_waits(None)  # the script may take any time between two messages
        self._nothing = torch.empty(0, dtype=torch.uint8, device=communicator.device)
        self._due = 0  # answers that the driver has not collected: an error came between
        self._is_within = False  # a block of `whole`
        self._failure = ""  # the error that has ended one
        self._sent: list[Pending] = []  # not waited for yet

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    def has_lost(self) -> bool:
        """Whether a process has ended, if that shows at once."""
        return isinstance(self._transport, Connection) and self._transport.has_lost()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """For a block of messages: an exception in it, such as a lack of memory, leaves the devices out of step."""
        if self.world_size == 1 or self._is_within:
            yield
            return
        if self._failure:
            raise DeterminismError(f"the devices have been out of step since {self._failure}: let the script end there")
        self._is_within = True
        try:
            yield
        except BaseException as error:
            self._failure = f"{type(error).__name__} ({error}) came in the midst of their messages"
            raise
        finally:
            self._is_within = False

    def send(self, message: Message, parts: Sequence[Message] = (), tensors: Sequence[Tensor] = ()) -> None:
        """Sends the workers a message from host memory, each its part, by rank from 1 on, and what `receive` takes."""
        if self.world_size == 1:
            return
        with self.whole():
            # The workers have answered a message whose answers an error kept from being read: they come first.
            while self._due:
                self.answers()
            self._finish_sent()
            self._tell(message, list(parts) or [Message([], [])] * (self.world_size - 1))
            self.receive(tensors)
            self._due += 1

    def _tell(self, message: Message, parts: Sequence[Message]) -> None:
        shared = _padded(message.on_host)
        sizes = [sum(_padded_size(each.nbytes) for each in part.on_device) for part in parts]
        self._send([(shared, _padded(part.on_host)) for part in parts], sizes, range(1, self.world_size))
        # One exchange for all workers, which each of them must then take part in, also with nothing of its own.
        if any(sizes):
            on_device = [piece for part in parts for piece in _padded(part.on_device)]
            self._start(torch.cat([self._nothing, *on_device]), [0, *sizes])

    def next_message(self) -> tuple[Received, Received]:
        """On a worker: the shared message and its part of the next one."""
        ((shared, part, size, is_any),) = self._receive(range(1))
        self._finish_sent()
        on_device = self._nothing
        if is_any:
            on_device = self._received_on_device([size, *[0] * (self.world_size - 1)])
        return Received(shared, self._nothing), Received(part, on_device)

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites tensors with those that the driver sends, memory to memory; small ones of a device go together."""
        self._transport.broadcast_all([tensor for tensor in tensors if tensor.is_cpu], 0)
        on_device, small = [tensor for tensor in tensors if not tensor.is_cpu], list[Tensor]()
        for tensor in on_device:
            if tensor.nbytes <= self.communicator.transport.latency_bytes:
                small.append(tensor)
            else:
                self.communicator.broadcast(tensor)
        for bucket in make_buckets(small, BUCKET_BYTES, 1):
            members, (flat, views) = [small[k] for k in bucket.members], bucket.unfilled(small)
            if self.rank == 0:
                torch._foreach_copy_(views, members)
            self.communicator.broadcast(flat)
            if self.rank > 0:
                torch._foreach_copy_(members, views)

    def answer(self, message: Message) -> None:
        """On a worker: answers a message, and does not wait until the driver has read it."""
        on_device = torch.cat([self._nothing, *_padded(message.on_device)])
        self._send([(_padded(message.on_host), [])], [len(on_device)], range(1))
        if self._has_device:
            self._start(on_device, [len(on_device), *[0] * (self.world_size - 1)])

    def answers(self) -> list[Received]:
        """On the driver: the answers of all workers, by rank from 1 on."""
        if self.world_size == 1:
            return []
        with self.whole():
            return self._answers()

    def _answers(self) -> list[Received]:
        received = self._receive(range(1, self.world_size))
        sizes = [size for _, _, size, _ in received]
        on_device = self._received_on_device([0, *sizes]) if self._has_device else self._nothing
        self._due -= 1
        theirs = on_device.split(sizes) if self._has_device else [self._nothing] * len(received)
        return [Received(data, more) for (data, *_), more in zip(received, theirs, strict=True)]

    @property
    def _has_device(self) -> bool:
        return self.communicator.device.type != "cpu"

    def _send(self, messages: Sequence[Sequence[list[Tensor]]], on_device: Sequence[int], ranks: range) -> None:
        """Sends each of some ranks two messages in host memory: in one piece of a fixed size, if they fit into it."""
        heads, rest, head_sizes, rest_sizes = list[Tensor](), list[Tensor](), *([0] * self.world_size for _ in range(2))
        for rank, (first, second), more in zip(ranks, messages, on_device, strict=True):
            sizes = [sum(piece.nbytes for piece in pieces) for pieces in (first, second)]
            head_sizes[rank], length = HEAD_BYTES, sum(sizes)
            heads.append(torch.frombuffer(bytearray(WORDS.pack(*sizes, more, any(on_device))), dtype=torch.uint8))
            if length <= INLINE_BYTES:
                heads += [*first, *second, GAP[length:]]
            else:
                heads.append(GAP)
                rest += [*first, *second]
                rest_sizes[rank] = length
        for pieces, sent in ((heads, head_sizes), (rest, rest_sizes)):
            self._sent.append(self._transport.deliver(pieces, sent, [0] * self.world_size))

    def _receive(self, ranks: range) -> list[tuple[Tensor, Tensor, int, bool]]:
        """From each of some ranks two messages, the bytes on the device that follow, and whether any rank's do."""
        nothing = [0] * self.world_size
        # Of the host's transport alone: no stream of a device is waited for to learn what a message says.
        received = self._transport.deliver([], nothing, [HEAD_BYTES * (k in ranks) for k in range(self.world_size)])
        heads = received.wait().view(-1, HEAD_BYTES)
        words = [WORDS.unpack_from(head.numpy()) for head in heads]
        lengths = [first + second for first, second, *_ in words]
        sizes = [length * (length > INLINE_BYTES) for length in lengths]
        by_rank = [sizes[ranks.index(k)] if k in ranks else 0 for k in range(self.world_size)]
        rest = self._transport.deliver([], nothing, by_rank).wait().split(sizes)
        found = []
        for head, tail, (first, second, *more) in zip(heads, rest, words, strict=True):
            data = tail if len(tail) else head[WORDS.size :]
            found.append((data[:first], data[first : first + second], *more))
        return found

    def _start(self, data: Tensor, sizes: Sequence[int]) -> None:
        """Starts sending; of a device, the stream waits, and the host goes on."""
        transport = self.communicator.carrier(data)
        sent = transport.exchange(data, sizes, [0] * self.world_size)
        if transport.stream is None:
            self._sent.append(sent)
        else:
            sent.wait()  # and the memory is free

    def _received_on_device(self, sizes: Sequence[int]) -> Tensor:
        transport = self.communicator.transport
        return transport.exchange(self._nothing, [0] * self.world_size, sizes).wait()

    def _finish_sent(self) -> None:
        while self._sent:
            self._sent.pop(0).wait()


@contextmanager
def whole_messages(in_backward: bool = False) -> Iterator[None]:
    """Signals that the script handles, Ctrl-C among them, wait until the block ends: no message is left in pieces.

    In a backward they wait for the end of it all, as under python, since a handler may compute. Only if it
    fails, and has no end, they are handled at once.
    """
    # Python runs handlers on the main thread alone, and lets no other one set them.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[tuple[int, FrameType | None]]()
    before = dict[int, Any]()

    def keep(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))

    def handle() -> None:
        with torch.enable_grad() if in_backward else nullcontext():  # an engine has none
            for number, frame in came:
                before[number](number, frame)

    has_failed = True
    try:
        # Only handlers in Python can wait; C's and the default ones act at once, as under python.
        for signum in HANDLED:
            if callable(handler := signal.getsignal(signum)):
                before[signum] = handler
                signal.signal(signum, keep)
        yield
        has_failed = False
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is keep:  # else the forward has set one
                signal.signal(number, handler)
        if came and in_backward and not has_failed:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(handle)
        else:
            handle()


def encode(content: Any, tensors: Sequence[Tensor] = ()) -> Message:
    """A value that pickles, and tensors, as a message."""
    flat = [laid_flat(tensor.detach()) for tensor in tensors]
    forms = [
        (tensor.dtype, len(each), tuple(tensor.shape), stride, each.device.type == "cpu")
        for tensor, (each, stride) in zip(tensors, flat, strict=True)
    ]
    head = pickle.dumps((content, forms))
    first = torch.frombuffer(bytearray(len(head).to_bytes(SIZE_BYTES) + head), dtype=torch.uint8)
    on_host = [each for each, _ in flat if each.device.type == "cpu"]
    return Message([first, *on_host], [each for each, _ in flat if each.device.type != "cpu"])


def laid_flat(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A tensor's memory as a vector, with its strides, by which kernels choose how to add up; or a copy's memory."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if not 0 < span <= MOST_GAPS * tensor.numel() or tensor.is_conj() or tensor.is_neg():
        # Too much between its elements to send that too, or read as other values than its bytes.
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        span = tensor.numel()
    return tensor.as_strided((span,), (1,)), tensor.stride()


def decode(received: Received) -> tuple[Any, list[Tensor]]:
    """What was encoded; the tensors share the memory of the bytes."""
    data, on_device = received
    # Of a message without parts.
    if not len(data):
        return None, []
    size = SIZE_BYTES + int.from_bytes(data[:SIZE_BYTES].numpy().tobytes())
    content, forms = pickle.loads(data[SIZE_BYTES:size].numpy().tobytes())
    tensors, offsets = [], {True: _padded_size(size), False: 0}
    for dtype, span, shape, stride, is_on_host in forms:
        source = data if is_on_host else on_device
        start = source.storage_offset() + offsets[is_on_host]
        offsets[is_on_host] += _padded_size(span * dtype.itemsize)
        # No view, as all views have one version: a write to one would count as a write to all that a graph has saved.
        tensor = torch.empty(0, dtype=dtype, device=source.device)
        tensors.append(tensor.set_(source.untyped_storage(), start // dtype.itemsize, shape, stride))
    return content, tensors


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors as bytes, without a copy, and what fills the place of each."""
    pieces = []
    for tensor in tensors:
        data = flattened(tensor).view(torch.uint8)
        pieces += [data, data.new_zeros(_padded_size(len(data)) - len(data))]
    return pieces


def _padded_size(size: int) -> int:
    return round_up(size, BORDER_BYTES)
