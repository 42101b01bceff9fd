"""The ordered process group: a `torch.distributed` backend that adds along the tree over the ranks.

    samestep.register_backend()
    torch.distributed.init_process_group("samestep")

A sum over V ranks is bitwise the sum along the tree (`core.tree`) whose leaves are the ranks, whatever machines and
devices they run on, and however a caller cuts its tensors into buckets. Ranks of one machine exchange through shared
memory; otherwise, and from rank to rank (`send`, `recv`), gloo carries the bytes.

Tensors of GPUs travel over NCCL if each rank of a group has a GPU to itself, and else through host memory. The sums are
added element by element in the same order, so their bits are the same.
"""

import sys
import threading
import time
import traceback
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.callsite import calling_frame, script_line
from samestep.checkpoint.contract import check_same_gpus
from samestep.comm.buckets import pinned
from samestep.comm.connecting import connect_gpus, connect_process_group
from samestep.comm.exceptions import packed, unpacked
from samestep.comm.group import GroupTransport
from samestep.comm.transport import Connection, LocalTransport, Transport, close_at_exit, gather_parts, unexpected_sizes
from samestep.errors import DeterminismError, PeerLostError, SamestepError
from samestep.launcher.device_token import lent_token, shares_device
from samestep.logical import collectives
from samestep.logical.collectives import CallError, Operation
from samestep.logical.work_queue import NO_TIMEOUT, QueuedWork, WorkQueue
from samestep.text import listed, notify

NAME = "samestep"
DEVICES = ["cpu", "cuda"]
SUM = Operation("SUM")
EVEN = {"allreduce", "reduce", "broadcast", "allgather"}  # whose tensors have as many elements on each rank
HISTORY = 256  # operations: a rank is ahead of the others only by broadcasts whose source it is
FORWARD, DDP_FILE = "the forward of DistributedDataParallel", nn.parallel.distributed.__file__
HINTS = {  # of calls that some ranks make while others make another one
    FORWARD: "That forward broadcasts buffers: what one rank does alone calls model.module(…) instead of model(…)",
    "in backward": "A rank that leaves a step out must do so together with all others",
}
ODD = "out of step"
STEP_BITS = 16
NOTES = (
    ("gradients of different steps are added", "step {}", HINTS["in backward"]),
    (
        "copies of the model differ",
        "{:012x}",
        "each rank updates its own, so they stay so; look for a seed, a learning rate or a file of each rank, or ask "
        "samestep verify",
    ),
)
FOLLOWS_SECONDS = 2.0  # by which the error of a rank that waited for a lost one comes after the loss


class GroupError(PeerLostError, dist.DistBackendError):
    """A collective failed: `ranks` are the ranks that did not take part; also torch's error for that."""


def register_backend() -> None:
    """Makes `torch.distributed.init_process_group("samestep")` possible, for tensors of CPUs and of GPUs.

    Sums are taken along the tree over the ranks: tier `bitwise`, whatever devices and machines the ranks run on.
    """
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=DEVICES)
        # Calls of other groups than these are recorded, from torch 2.15 on, by a hook that asks C++ for their backend.
        self_recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        self_recording.add(NAME)


def _make_group(options: Any, _: Any) -> "OrderedProcessGroup":
    """The group whose rank, size, store and timeout torch describes."""
    rank, size = options.group_rank, options.group_size
    ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
    if size == 1:
        return OrderedProcessGroup(LocalTransport(), None, options.store, options, ranks)
    store = options.store
    if options.global_ranks_in_group and dist.is_initialized():
        # torch numbers groups by those that a rank has made: where members alone make theirs, several have one number.
        store = dist.PrefixStore(f"ranks {ranks}", dist.distributed_c10d._get_default_store())
    return OrderedProcessGroup(*connect_process_group(store, rank, ranks, options.timeout), options, ranks)


# Backends of Python: collectives then pass torch's dispatcher, where tensor subclasses, `CommDebugMode` and profilers
# find them. Before, the process group itself is of Python, and called past it.
DISPATCHES = hasattr(dist, "get_backend_impl")  # from torch 2.14 on
_Backend: Any = dist._Backend if DISPATCHES else object
AnyWork = TypeVar("AnyWork", bound=dist.Work)
_Group: Any = dist.ProcessGroup  # its annotations have further forms of each call, which torch.distributed does not use


def _plain(value: Any) -> Any:
    """A tensor, or nested tensors, with memory of their own."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if not isinstance(value, Tensor) or type(value).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return value
    if hasattr(value, "wait"):
        return value.wait()
    raise CallError(
        f"a collective got a {type(value).__name__}, whose elements are not in this rank's memory; needed: a plain "
        "tensor, of a distributed one tensor.to_local() or tensor.full_tensor()"
    )


class _Called(threading.local):
    """What a thread calls: the work of its last operation, and the file that has called the group."""

    work: Any = None
    by = ""


class OrderedBackend(_Backend):  # type: ignore[misc]  # a class of torch's stubs only from 2.14 on
    """The collectives of one rank of a group. All ranks call the same ones in the same order.

    Its methods have the names by which torch calls a backend's methods, in torch 2.10 to 2.15.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = _supports_time_estimate = False

    def __init__(
        self, transport: Transport, gloo: Any, store: dist.Store, options: Any, ranks: tuple[int, ...]
    ) -> None:
        super().__init__(*(transport.rank, transport.world_size) if DISPATCHES else ())
        self._transport = transport  # for host memory
        self._over_nccl: GroupTransport | None = None
        self._has_asked = False  # whether the ranks have GPUs of their own
        self._gloo = gloo
        self._store = store
        self._ranks = ranks
        self.timeout = options.timeout
        self._queue = WorkQueue(f"samestep {options.group_id}")
        self._failure: bytes | None = None  # packed
        self._calls: deque[tuple[int, str]] = deque(maxlen=HISTORY)  # the last that were run, with their numbers
        self.num_calls = 0
        self._backward, self._num_backwards = -1, 0  # the last one that has reduced gradients here, and how many have
        self._told: set[str] = set()
        self.step_note = 0  # of the step whose gradients a backward reduces next: see `note_step`
        self._own = OwnMessages()
        self.called = _Called()
        self._end = close_at_exit(self._close)

    def allreduce(self, tensors: Any, opts: Any = None) -> QueuedWork:
        """Overwrites each tensor with the fold over all ranks."""
        tensors = _listed(tensors)
        operation = self._operation(opts, tensors)
        if tensors[0].is_sparse:
            if operation.name not in ("SUM", "AVG"):
                raise CallError(f"got a reduction {operation.name} of sparse tensors; needed: SUM, AVG or dense ones")
            return self._call(lambda _: self._reduce_sparse(self._transport, tensors, operation), tensors, opts)

        def run(transport: Transport) -> None:
            for values in _by_dtype(tensors, transport):
                collectives.all_reduce(transport, values.flat, operation)
                values.write()

        return self._call(run, tensors, opts)

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> QueuedWork:
        """As `allreduce`; tensors of one dtype travel together."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> QueuedWork:
        """Overwrites the root's tensor with the fold over all ranks."""
        tensors = _listed(tensors)
        operation = self._operation(opts, tensors)

        def run(transport: Transport) -> None:
            for tensor in tensors:
                values = _Flat([tensor], transport)
                collectives.reduce(transport, values.flat, opts.rootRank, operation)
                if transport.rank == opts.rootRank:
                    values.write()

        return self._call(run, tensors, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        """Writes the fold of the tensors for this rank; a list of one for each rank, for each output."""
        operation = self._operation(opts, outputs)
        self._check_parts("a reduce-scatter", inputs, outputs)

        def run(transport: Transport) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                values, sizes = _Flat([output], transport), [part.numel() for part in parts]
                collectives.reduce_scatter(transport, _Flat(parts, transport).flat, sizes, values.flat, operation)
                values.write()

        return self._call(run, outputs, opts, also=[part for parts in inputs for part in parts])

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        """Writes, for each input, the fold of the part for this rank: one of equally many."""
        ranks = self._transport.world_size
        for output, parts in zip(outputs, inputs, strict=True):
            _check_sizes("a reduce-scatter", parts.numel(), output.numel() * ranks)
        return self.reduce_scatter(outputs, [_chunks(parts, ranks) for parts in inputs], opts)

    def reduce_scatter_single(self, output: Tensor, parts: Tensor, opts: Any = None) -> QueuedWork:
        """As `reduce_scatter_single_coalesced`, of one."""
        return self.reduce_scatter_single_coalesced([output], [parts], opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        """Writes the tensors of all ranks; a list of one for each rank, for each input."""
        self._check_parts("an all-gather", outputs, inputs)

        def run(transport: Transport) -> None:
            for into, ours in zip(outputs, inputs, strict=True):
                sizes = [tensor.numel() for tensor in into]
                received = gather_parts(transport, _Flat([ours], transport).flat, sizes).wait()
                _Flat(into, transport, received).write()

        return self._call(run, outputs, opts, also=inputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        """Writes the tensors of all ranks; a list of one for each input, for each rank."""
        return self.allgather([list(by_rank) for by_rank in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        """Writes, for each input, the tensors of all ranks, one after another."""
        ranks = self._transport.world_size
        for output, ours in zip(outputs, inputs, strict=True):
            _check_sizes("an all-gather", output.numel(), ours.numel() * ranks)
        return self.allgather([_chunks(output, ranks) for output in outputs], inputs, opts).holding(outputs)

    def all_gather_single(self, output: Tensor, ours: Tensor, opts: Any = None) -> QueuedWork:
        """As `all_gather_single_coalesced`, of one."""
        return self.all_gather_single_coalesced([output], [ours], opts)

    def broadcast(self, tensors: Any, opts: Any) -> QueuedWork:
        """Overwrites the tensors with the root's."""
        tensors = _listed(tensors)

        def run(transport: Transport) -> None:
            for tensor in tensors:
                values = _Flat([tensor], transport)
                transport.broadcast(values.flat, opts.rootRank)
                if transport.rank != opts.rootRank:
                    values.write()

        return self._call(run, tensors, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> QueuedWork:
        """Writes the tensors of all ranks on the root; a list of one for each rank, for each input."""
        if self._transport.rank == opts.rootRank:
            self._check_parts("a gather", outputs, inputs, are_even=True)

        def run(transport: Transport) -> None:
            for index, ours in enumerate(inputs):
                received = collectives.gather(transport, _Flat([ours], transport).flat, opts.rootRank)
                if received is not None:
                    _Flat(outputs[index], transport, received).write()

        return self._call(run, outputs, opts, also=inputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> QueuedWork:
        """Writes this rank's tensor of the root's; a list of one for each rank, for each output."""
        if self._transport.rank == opts.rootRank:
            self._check_parts("a scatter", inputs, outputs, are_even=True)

        def run(transport: Transport) -> None:
            for index, output in enumerate(outputs):
                parts = _Flat(inputs[index], transport).flat if transport.rank == opts.rootRank else None
                values = _Flat([output], transport)
                collectives.scatter(transport, parts, opts.rootRank, values.flat)
                values.write()

        return self._call(run, outputs, opts, also=[part for parts in inputs for part in parts])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        """Sends the r-th tensor to rank r, and writes what all ranks send; tensors may differ in length."""
        self._check_parts("an all-to-all", [inputs, outputs])
        self._check_parts("an all-to-all", [outputs], [inputs[self._transport.rank]])

        def run(transport: Transport) -> None:
            sizes = [[tensor.numel() for tensor in tensors] for tensors in (inputs, outputs)]
            received = transport.exchange(_Flat(inputs, transport).flat, *sizes).wait()
            _Flat(outputs, transport, received).write()

        return self._call(run, outputs, opts, also=inputs)

    def all_to_all_single(
        self, output: Tensor, parts: Tensor, output_sizes: Any = (), sizes: Any = (), opts: Any = None
    ) -> QueuedWork:
        """Sends rows to every rank, and writes the rows that all ranks send; equally many without sizes."""
        ranks = self._transport.world_size
        into = _rows(output, output_sizes, ranks)
        return self.alltoall(into, _rows(parts, sizes, ranks), opts).holding([output])

    def barrier(self, opts: Any = None) -> QueuedWork:
        """Is done when every rank has called it, and their operations before it are done."""

        def run(transport: Transport) -> None:
            self._queue.synchronize()
            collectives.barrier(transport)

        return self._call(run, [], opts)

    if not DISPATCHES:  # until torch 2.12 the callers knew these names
        _allgather_base = all_gather_single
        allgather_into_tensor_coalesced = all_gather_single_coalesced
        _reduce_scatter_base = reduce_scatter_single
        reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
        alltoall_base = all_to_all_single

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist.Work:
        self._check("send", None, (), tensors)
        values = _Flat(tensors, self._transport)
        return self._begun(PeerWork(self, self._peer(rank).send([values.shaped], rank, tag), rank, None))

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist.Work:
        """Writes the tensor that a rank sends."""
        self._check("recv", None, tensors, tensors)
        values = _Flat(tensors, self._transport)
        return self._begun(PeerWork(self, self._peer(rank).recv([values.shaped], rank, tag), rank, values))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Writes the tensor that some rank sends."""
        self._check("recv", None, tensors, tensors)
        values = _Flat(tensors, self._transport)
        return self._begun(PeerWork(self, self._peer(None).recv_anysource([values.shaped], tag), None, values))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Returns when every rank has called it; rank 0 names those that have not within the timeout."""
        limit = getattr(timeout, "timeout", timeout)  # options, of torch's dispatcher
        limit = self.timeout if limit is None or limit < NO_TIMEOUT else limit
        if self._gloo is not None:
            self._queue.drain()
            with lent_token():
                self._gloo.monitored_barrier(limit, wait_all_ranks)

    def shutdown(self) -> None:
        """Ends the group, after the operations that were called."""
        self._queue.drain()
        self._close()

    def abort(self) -> None:
        """Ends the group at once; operations under way fail, here and on the other ranks."""
        self._close()

    def name(self) -> str:
        return NAME

    getBackendName = name

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def _close(self) -> None:
        self._end.detach()
        self._queue.close(GroupError("the process group has been destroyed"))
        self._transport.close()  # ends the wait of an operation under way
        self._queue.join()
        if self._over_nccl is not None:
            # After a failure what NCCL has queued may wait for a rank that is gone.
            self._over_nccl.close() if self._failure is None else self._over_nccl.abandon()
            self._over_nccl = None
        self._gloo = None

    def _peer(self, rank: int | None) -> Any:
        """What carries tensors to and from a rank, or any."""
        if rank == self._transport.rank:
            return self._own
        _check_rank("rank", rank or 0, self._transport.world_size)
        if self._gloo is None:
            raise CallError("a process group of one rank, or one that was destroyed, has no rank to exchange with")
        return self._gloo

    def _operation(self, opts: Any, tensors: Sequence[Tensor]) -> Operation:
        operation = SUM if opts is None else Operation.of(opts.reduceOp)
        for tensor in tensors:
            operation.check(tensor.dtype)
        return operation

    def _reduce_sparse(self, transport: Transport, tensors: Sequence[Tensor], operation: Operation) -> None:
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(collectives.all_reduce_sparse(transport, tensor, operation))

    def _call(
        self, run: Callable[[Transport], Any], outputs: Any, opts: Any, also: Sequence[Tensor] = ()
    ) -> QueuedWork:
        """Queues an operation."""
        self.num_calls += 1
        limit = self.timeout if opts is None or opts.timeout <= NO_TIMEOUT else opts.timeout
        written = outputs if not outputs or isinstance(outputs[0], Tensor) else [t for some in outputs for t in some]
        is_async = opts is None or opts.asyncOp
        name, line = sys._getframe(1).f_code.co_name, script_line()  # now: another thread may run it
        # A metric that a script sums must not be added to a gradient of its size, which torch sums within a backward.
        by = self.called.by
        is_own = by == dist.distributed_c10d.__file__
        kind = zlib.crc32(f"{name} {written[0].dtype if 'reduce' in name else ''} {is_own}".encode()) >> 17
        backward, note, where = torch._C._current_graph_task_id(), 0, f" in {FORWARD}" if by == DDP_FILE else ""
        if backward != -1 and name == "allreduce":
            self._num_backwards += backward != self._backward
            self._backward, note = backward, self.step_note
        if backward != -1 or (self._num_backwards and not where):
            where = f" {'after' if backward == -1 else 'in'} backward {self._num_backwards}"
        said = f"{name}{where}, {[tuple(t.shape) for t in written]}, at {line}"
        call, tensors = (name, written, kind, said, note), [*written, *also]
        self._check(name, opts, written, tensors)
        return self._begun(self._queue.submit(lambda: self._run(run, limit, call, tensors), written, tensors, is_async))

    def _check(self, name: str, opts: Any, written: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Raises if an operation on these tensors would fail: in the queue, its failure would be the group's."""
        rank, root, ranks = self._transport.rank, getattr(opts, "rootRank", 0), self._transport.world_size
        _check_rank("root rank", root, ranks)
        is_sparse = name == "allreduce" and written[0].is_sparse
        for tensor in tensors:
            is_dense = (tensor.layout == torch.strided and not tensor.is_quantized) or is_sparse
            if tensor.device.type not in DEVICES or not is_dense:
                got = f"{tensor.layout}, {tensor.dtype}, on {tensor.device}"
                raise CallError(f"{name} got a tensor of {got}; needed: a dense one, on a CPU or a CUDA device")
        if is_sparse or (name == "broadcast" and rank == root) or (name == "reduce" and rank != root):
            return
        for tensor in written:
            if any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
                got = f"shape {tuple(tensor.shape)} whose elements share memory: strides {tensor.stride()}"
                raise CallError(f"{name} would write a tensor of {got}; needed: another, as of tensor.contiguous()")

    def _check_parts(self, what: str, lists: Any, own: Sequence[Tensor] = (), are_even: bool = False) -> None:
        """Raises unless each list has a tensor for each rank; this rank's tensor, or each, as long as one of `own`."""
        for parts in lists:
            if len(parts) != self._transport.world_size:
                raise CallError(f"{what} got {len(parts)} tensors; needed: {self._transport.world_size}, one a rank")
        for parts, ours in zip(lists, own, strict=False):
            for tensor in parts if are_even else [parts[self._transport.rank]]:
                _check_sizes(what, tensor.numel(), ours.numel())

    def _begun(self, work: AnyWork) -> AnyWork:
        self.called.work = work
        return work

    def _run(
        self,
        run: Callable[[Transport], Any],
        timeout: timedelta,
        call: tuple[str, Sequence[Tensor], int, str, int],
        tensors: Sequence[Tensor],
    ) -> None:
        """Runs an operation whose turn has come. One that fails leaves the ranks at odds, so all later ones fail."""
        if self._failure is not None:
            raise unpacked(self._failure)
        transport, (name, written, kind, said, note) = self._transport, call
        if isinstance(transport, Connection):
            transport.limit_waits(timeout)
            transport.call, transport.note, transport.other_notes = kind, note, {}
        number = self._calls[-1][0] + 1 if self._calls else 0
        self._calls.append((number, said))
        try:
            run(self._transport_of(name, written, tensors))
            if note and isinstance(transport, Connection) and transport.other_notes:
                self._tell_notes(note, transport.other_notes, said.rpartition(", at ")[2])
        except (PeerLostError, DeterminismError) as error:
            self._failure = packed(self._explained(error, number))
            raise unpacked(self._failure) from error
        except Exception as error:
            error.add_note(traceback.format_exc())  # one that nobody foresaw: a packed error has no traceback
            self._failure = packed(error)
            raise
        except BaseException as stop:  # Ctrl-C: the other ranks are further
            self._failure = packed(GroupError(f"{said}, was interrupted by {stop!r}: this rank is behind the others"))
            raise

    def _transport_of(self, name: str, written: Sequence[Tensor], tensors: Sequence[Tensor]) -> Transport:
        """The transport of an operation on these tensors; each rank has some."""
        host, gpus = self._transport, {tensor.device for tensor in tensors if tensor.is_cuda}
        if len(gpus) != 1 or not isinstance(host, Connection):
            return host
        if not self._has_asked:
            self._has_asked = True
            device = gpus.pop()
            check_same_gpus(host, device)
            self._over_nccl = connect_gpus(host, self._store, device, self.timeout, may=not shares_device())
        if self._over_nccl is None:
            return host
        # The ranks meet first: NCCL would wait for ever for one that is lost or makes another call, and read what is
        # not there of a shorter tensor.
        size = sum(tensor.numel() for tensor in written) if name in EVEN else 0
        for rank, other in enumerate(host.gather(torch.tensor([size])).wait().tolist()):
            if other != size:
                raise unexpected_sizes(host.rank, f"{other} elements of rank {rank}", f"{size}")
        return self._over_nccl

    def note_step(self, step: int, weights: int = 0) -> None:
        """Sets what goes along with the gradients of a step: its number, and a checksum of the weights or 0."""
        # Gradients of different steps are as long as each other, and would be added in silence.
        self.step_note = step % 2**STEP_BITS | weights % 2**47 << STEP_BITS

    def _tell_notes(self, ours: int, notes: Mapping[int, int], line: str) -> None:
        """Says once, on rank 0, that ranks reduce the gradients of different steps, or hold different weights."""
        for index, (what, shown, advice) in enumerate(NOTES):
            values: dict[int, list[str]] = {}
            for number, rank in enumerate(self._ranks):
                if note := notes.get(number, ours):  # 0 is of no step
                    values.setdefault(divmod(note, 2**STEP_BITS)[1 - index], []).append(str(rank))
            if len(values) > 1:
                each = listed([f"{shown.format(value)} on rank {', '.join(ranks)}" for value, ranks in values.items()])
                if what not in self._told and self._ranks[self._transport.rank] == 0:
                    notify(f"{what}: {each}, at {line}; {advice[0].lower()}{advice[1:]}")
                self._told.add(what)
                return  # weights of different steps differ in any case

    def _explained(self, error: SamestepError, number: int) -> Exception:
        """The error of an operation that failed between ranks; if they are out of step, with the call of each rank."""
        store, calls = self._store, dict.fromkeys([f"rank {rank}" for rank in self._ranks], "another call, or none")
        is_odd = isinstance(error, DeterminismError)
        with suppress(RuntimeError):  # the store is gone with the rank that hosts it
            if is_odd or (is_odd := store.check([ODD])):
                # Of the first operation that differs: the source of a broadcast, which waits for no rank, is further.
                number = int(store.compare_set(ODD, "", str(number)))
                store.set([*calls][self._transport.rank], dict(self._calls).get(number, self._calls[-1][1]))
                self._transport.close()  # ranks that wait for this one stop waiting, and tell theirs
                for key in calls:
                    with suppress(RuntimeError):  # a rank that computes has no call to tell
                        store.wait([key], timedelta(seconds=2))
                        calls[key] = store.get(key).decode()
        if not is_odd:
            # A parent that looks late names the first of its processes that have ended: that is to be the lost one.
            time.sleep(FOLLOWS_SECONDS)
            return GroupError(str(error), getattr(error, "ranks", ()))
        lines = "\n".join(f"  {key}: {text}" for key, text in calls.items())
        some = [hint for part, hint in HINTS.items() if 0 < sum(part in text for text in calls.values()) < len(calls)]
        return DeterminismError(
            f"the ranks are out of step:\n{lines}\nThey may have other batches, but must all call the same collectives "
            f"in the same order, with tensors of the same shapes{''.join(f'. {hint}' for hint in some[:1])}"
        )

    def peer_failure(self, rank: int | None, error: Exception) -> GroupError:
        """The error of an exchange with one rank, or with any."""
        if rank is None:
            return GroupError(f"rank {self._ranks[self._transport.rank]} got nothing from any rank: {error}")
        names = f"rank {self._ranks[self._transport.rank]} waits for rank {self._ranks[rank]}"
        text = f"{names}, which has died, has ended, or is late: {error}"
        return GroupError(text, (self._ranks[rank],))


class OrderedProcessGroup(_Group):  # type: ignore[misc]  # for the reason above
    """The process group of an `OrderedBackend`: passes every call on to it, by torch's dispatcher if it `DISPATCHES`.

    Its methods have the names by which `torch.distributed` calls them, from Python and from C++, in torch 2.10 to 2.15.
    """

    _device_types = tuple(map(torch.device, DEVICES))  # asked for by distributed checkpoints, for one

    def __init__(
        self, transport: Transport, gloo: Any, store: dist.Store, options: Any, ranks: tuple[int, ...]
    ) -> None:
        super().__init__(transport.rank, transport.world_size)
        self._names: dict[str, str] = {}
        self.called_as = NAME
        self.backend = OrderedBackend(transport, gloo, store, options, ranks)
        if DISPATCHES:
            custom = dist.ProcessGroup.BackendType.CUSTOM
            for device in self._device_types:
                self._register_backend(device, custom, self.backend)
            self._set_default_backend(custom)

    def _get_backend_name(self) -> str:
        """The backend that the script asks for, by which sharded tensors choose their device."""
        return self.called_as

    # As torch calls them from C++, which takes the group for one of C++ if it has the name of one.
    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupName(self) -> str:
        return self._names.get("name", "")

    def setGroupDesc(self, description: str) -> None:
        self._names["description"] = description

    def getGroupDesc(self) -> str:
        return self._names.get("description", "")

    def _get_backend(self, device: torch.device) -> OrderedBackend:
        return self.backend

    def _get_sequence_number_for_group(self) -> int:
        return self.backend.num_calls

    def _set_sequence_number_for_group(self) -> None:
        """It begins with 0 on every rank."""


def _passed_on(name: str) -> Callable[..., Any]:
    """The method of a process group that passes a call on to its backend's method."""
    dispatch = getattr(dist.ProcessGroup, name) if DISPATCHES else None

    def call(self: OrderedProcessGroup, *args: Any, **options: Any) -> Any:
        called, outer = self.backend.called, calling_frame(sys._getframe())
        called.by = "" if outer is None else outer.f_code.co_filename
        if dispatch is None:
            held = getattr(self.backend, name)(*map(_plain, args), **options)
        else:
            held = dispatch(self, *args, **options)
        # What torch makes of a work of Python's can be waited for, and has a future, but no result, end or source.
        work, called.work = called.work, None
        return work or held

    call.__code__ = call.__code__.replace(co_name=name)  # by which pybind11 finds that the method overridden is meant
    return call


for _name in vars(OrderedBackend).keys() & vars(dist.ProcessGroup).keys() - vars(OrderedProcessGroup).keys():
    setattr(OrderedProcessGroup, _name, _passed_on(_name))


class PeerWork(dist.Work):
    """A tensor on its way to a rank, or from one."""

    def __init__(self, group: OrderedBackend, work: Any, rank: int | None, received: "_Flat | None") -> None:
        super().__init__()
        self._group, self._work, self._rank, self._received = group, work, rank, received

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits until the tensor has arrived, or may be overwritten."""
        try:
            with lent_token():
                self._work.wait(timeout or self._group.timeout)
        except (RuntimeError, TimeoutError) as error:
            raise self._group.peer_failure(self._rank, error) from error
        if self._received is not None:
            self._received.write()
            self._received = None
        return True

    def is_completed(self) -> bool:
        """Whether it has arrived; a GPU's tensor is written when it is waited for."""
        return bool(self._work.is_completed())

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    source_rank = _source_rank


class OwnMessages:
    """What a rank sends to itself, which gloo does not carry: in gloo's place."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], Iterator[int]] = defaultdict(count)
        self._messages: dict[tuple[int, int], _OwnMessage] = {}

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> "_OwnMessage":
        message = self._next("send", tag)
        message.set_result(tensors[0].flatten().view(torch.uint8).clone())
        return message

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> "_OwnMessage":
        message = self._next("recv", tag)
        message.add_done_callback(lambda sent: _memory(tensors[0]).flatten().view(torch.uint8).copy_(sent.result()))
        return message

    def _next(self, way: str, tag: int) -> "_OwnMessage":
        """The n-th message that is sent with a tag is the n-th that is received."""
        key = tag, next(self._counts[way, tag])
        return self._messages.pop(key, None) or self._messages.setdefault(key, _OwnMessage())


class _OwnMessage(Future[Tensor]):
    is_completed = Future.done

    def wait(self, timeout: timedelta) -> None:
        self.result(timeout.total_seconds())


class _Flat:
    """Tensors of one dtype as one flat tensor where a transport reads it: their own memory if possible."""

    def __init__(self, tensors: Sequence[Tensor], transport: Transport, flat: Tensor | None = None) -> None:
        self._tensors = [_memory(tensor) for tensor in tensors]
        first, is_on_host = self._tensors[0], transport.through_host
        self._is_copy = flat is not None or len(tensors) > 1 or not first.is_contiguous()
        # What is marked as conjugate or negative is not what lies in memory.
        self._is_copy |= (is_on_host and not first.is_cpu) or first.is_conj() or first.is_neg()
        if flat is not None:
            self.flat = flat
        elif self._is_copy:
            self.flat = _copied_to_host(self._tensors) if is_on_host else _joined(self._tensors)
        else:
            self.flat = first.view(-1)

    @property
    def shaped(self) -> Tensor:
        """The same memory in the shape of the one tensor, which profiles of gloo show."""
        return self.flat.view(self._tensors[0].shape)

    def write(self) -> None:
        """Writes the values to the tensors, unless they have the same memory."""
        if self._is_copy:
            sizes = [tensor.numel() for tensor in self._tensors]
            for tensor, values in zip(self._tensors, self.flat.split(sizes), strict=True):
                # On a GPU behind what its stream has to do; torch keeps pinned memory until the copy has been made.
                tensor.copy_(values.view(tensor.shape), non_blocking=True)


def _memory(tensor: Tensor) -> Tensor:
    """A tensor's elements, outside of autograd: a write is no in-place change to it, as with gloo."""
    data = tensor.data
    if not data.is_inference() or data.is_conj() or data.is_neg():  # of the last two the memory is not the values
        return data
    with torch.inference_mode(False):  # another thread, or the script itself, may be outside of it
        return data.new_empty(0).set_(data.untyped_storage(), data.storage_offset(), data.shape, data.stride())


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _copied_to_host(tensors: Sequence[Tensor]) -> Tensor:
    """The values of tensors of one dtype, one after another; a GPU's values in pinned memory, unless they are large."""
    with torch._C.DisableTorchFunction():  # by their memory: simulated GPUs are the host's
        if tensors[0].is_cuda:
            sizes = [tensor.numel() for tensor in tensors]
            host = pinned(sum(sizes), tensors[0].dtype)
            for tensor, part in zip(tensors, host.split(sizes), strict=True):
                part.view(tensor.shape).copy_(tensor, non_blocking=True)
            torch.cuda.current_stream(tensors[0].device).synchronize()
            return host
    return _joined([tensor.cpu() for tensor in tensors])


def _by_dtype(tensors: Sequence[Tensor], transport: Transport) -> list[_Flat]:
    """The tensors, grouped by dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [_Flat(group, transport) for group in by_dtype.values()]


def _listed(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _chunks(tensor: Tensor, ranks: int) -> list[Tensor]:
    """Views of equal parts of a contiguous tensor."""
    return list(_memory(tensor).view(ranks, -1).unbind())


def _rows(tensor: Tensor, sizes: Sequence[int], ranks: int) -> list[Tensor]:
    """Views of so many rows for each rank."""
    rows = tensor.shape[0] if tensor.ndim else 0
    if not sizes and rows % ranks:
        raise CallError(f"got {rows} rows for {ranks} ranks; needed: a multiple of it, or the numbers of rows")
    wanted = list(sizes) or [rows // ranks] * ranks
    _check_sizes("an all-to-all", sum(wanted), rows)
    return list(_memory(tensor).split(wanted))


def _check_rank(what: str, rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise CallError(f"invalid {what}: {rank}; needed: 0 to {ranks - 1}")


def _check_sizes(what: str, got: int, needed: int) -> None:
    if got != needed:
        raise CallError(f"{what} got tensors of {got} in length; needed: {needed}")
